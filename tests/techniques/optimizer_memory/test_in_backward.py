"""The step inside backward: the plain step's parameters, with few gradients alive."""

import weakref
from functools import partial

import pytest
import timm
import torch
from timm.optim import Lamb, Lars
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from memengine.memory.allocated import allocated_peak_bytes
from memengine.techniques import efficient_conv_bn_eval
from memengine.techniques.optimizer_memory.in_backward import step_in_backward
from memengine.testing import assert_same_step, run_ranks
from tests.marks import NEEDS_SHARDING

OPTIMIZERS = {
    'AdamW': lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    'AdamW, multi-tensor': lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=True),
    'AdamW, fused': lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    'SGD': lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
    'LARS': lambda groups: Lars(groups, lr=0.1, momentum=0.9),
}


class Net(nn.Module):
    """A weight that is used twice, a frozen one, one without gradient, dropout, recomputation."""

    def __init__(self, recompute=False):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 6))
        self.middle[0].weight.requires_grad_(False)
        self.unused = nn.Linear(6, 6)
        self.recompute = recompute

    def forward(self, x):
        x = self.first(x).tanh()
        x = checkpoint(self.middle, x, use_reentrant=False) if self.recompute else self.middle(x)
        return self.first(x)


def build(make, recompute=False):
    """A network and its optimiser, with two groups and a schedule."""
    torch.manual_seed(0)
    net = Net(recompute).double()
    biases = [p for name, p in net.named_parameters() if name.endswith('bias')]
    weights = [p for name, p in net.named_parameters() if name.endswith('weight')]
    optimizer = make(
        [dict(params=weights, weight_decay=0.1), dict(params=biases, weight_decay=0.0)]
    )
    return net, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def take_step(net, optimizer, schedule, seed, in_backward):
    torch.manual_seed(seed)
    loss = net(torch.randn(5, 6).double()).square().mean()
    if in_backward:
        with step_in_backward(optimizer):
            loss.backward()
        assert all(p.grad is None for p in net.parameters())
    else:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()


def state_of(net, optimizer):
    """All numbers that training has made, by name."""
    names = {p: name for name, p in net.named_parameters()}
    state = {
        f'{names[p]}.{key}': value
        for p, values in optimizer.state.items()
        for key, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    return {**dict(net.named_parameters()), **state}


@pytest.mark.parametrize('recompute', [False, True])
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_parameters_and_state_are_those_of_the_plain_step(name, recompute):
    plain, fused = build(OPTIMIZERS[name]), build(OPTIMIZERS[name], recompute)
    for seed in range(5):
        take_step(*plain, seed, in_backward=False)
        take_step(*fused, seed, in_backward=True)
    expected, actual = state_of(*plain[:2]), state_of(*fused[:2])
    assert_same_step(actual, expected, tolerance=1e-15)
    take_step(*fused, 5, in_backward=True)
    with pytest.raises(AssertionError, match='tensors differ'):
        assert_same_step(state_of(*fused[:2]), expected, tolerance=1e-15)


def test_a_run_goes_on_with_or_without_from_the_same_checkpoint():
    expected = build(OPTIMIZERS['AdamW'])
    for seed in range(4):
        take_step(*expected, seed, in_backward=False)
    for first in (True, False):
        before = build(OPTIMIZERS['AdamW'])
        for seed in range(2):
            take_step(*before, seed, in_backward=first)
        after = build(OPTIMIZERS['AdamW'])
        for old, new in zip(before, after, strict=True):
            new.load_state_dict(old.state_dict())
        for seed in range(2, 4):
            take_step(*after, seed, in_backward=not first)
        assert_same_step(state_of(*after[:2]), state_of(*expected[:2]), tolerance=1e-15)


@pytest.mark.slow
def test_a_compiled_model_takes_the_same_steps():
    plain, fused = build(OPTIMIZERS['AdamW']), build(OPTIMIZERS['AdamW'])
    for net in (plain[0], fused[0]):
        net.middle[2].p = 0.0
        net.compile(backend='aot_eager')
    for seed in range(3):
        take_step(*plain, seed, in_backward=False)
        take_step(*fused, seed, in_backward=True)
    assert_same_step(state_of(*fused[:2]), state_of(*plain[:2]), tolerance=1e-15)


def deep(width=256, depth=6):
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers)


def test_gradients_alive_at_once_are_those_of_one_parameter():
    net = deep()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    largest = max(p.nbytes for p in net.parameters())
    storages, alive = [], []

    def watch(parameter):
        storage = parameter.grad.untyped_storage()
        storages.append((weakref.ref(storage), storage.nbytes()))
        alive.append(sum(nbytes for ref, nbytes in storages if ref() is not None))

    loss = net(torch.randn(4, 256)).square().mean()
    with step_in_backward(optimizer, before=watch):
        loss.backward()
    assert len(alive) == 12
    assert max(alive) <= largest + 256 * 4  # a layer's weight and bias come from one operation


def test_the_allocator_holds_that_much_less():
    def step(in_backward):
        net, x = deep(width=512), torch.randn(4, 512)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loss = net(x).square().mean()

        def run():
            if in_backward:
                with step_in_backward(optimizer):
                    loss.backward()
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return allocated_peak_bytes(run), sum(p.nbytes for p in net.parameters())

    plain, parameters = step(in_backward=False)
    fused, _ = step(in_backward=True)
    assert plain > 0.95 * parameters
    assert fused < 1.5 * parameters / 6


def test_the_optimiser_runs_once_per_gradient_and_its_post_hooks_once():
    net, optimizer, schedule = build(OPTIMIZERS['AdamW'])
    before, after = [], []
    optimizer.register_step_pre_hook(lambda *_: before.append(None))
    optimizer.register_step_post_hook(lambda *_: after.append(None))
    take_step(net, optimizer, schedule, 0, in_backward=True)
    with_gradient = len(optimizer.state)
    assert with_gradient == 5
    assert (len(before), len(after)) == (with_gradient + 1, 1)


def test_pre_hooks_that_drop_a_gradient_are_obeyed():
    net, optimizer, schedule = build(OPTIMIZERS['AdamW'])
    first = net.first.weight.clone()

    def freeze(*_):
        net.first.weight.grad = None

    optimizer.register_step_pre_hook(freeze)
    take_step(net, optimizer, schedule, 0, in_backward=True)
    assert torch.equal(net.first.weight, first)
    assert net.first.weight not in optimizer.state and net.first.bias in optimizer.state


def test_nothing_is_left_behind_when_backward_fails():
    net, optimizer, _ = build(OPTIMIZERS['SGD'])
    groups = optimizer.param_groups

    def fail(parameter):
        raise ArithmeticError

    with pytest.raises(ArithmeticError), step_in_backward(optimizer, before=fail):
        net(torch.ones(1, 6).double()).sum().backward()
    assert optimizer.param_groups is groups
    net.zero_grad()
    net(torch.ones(1, 6).double()).sum().backward()
    assert net.first.weight.grad is not None


@pytest.mark.edge(
    'optimizer_in_backward',
    'refused',
    'A parameter that gets a second gradient in a step',
)
def test_a_second_gradient_is_refused():
    net, optimizer, _ = build(OPTIMIZERS['SGD'])
    with step_in_backward(optimizer):
        net(torch.ones(1, 6).double()).sum().backward()
        with pytest.raises(RuntimeError, match=r'shape \(6,.*second gradient.*one backward'):
            net(torch.ones(1, 6).double()).sum().backward()


@pytest.mark.edge(
    'optimizer_in_backward',
    'unnoticed',
    'In plain PyTorch, `clip_grad_norm_` behind backward: it finds no gradients and clips nothing; '
    '`before` clips each',
)
def test_what_clips_behind_backward_clips_nothing():
    moved = []
    for clips_before in (False, True):
        net = nn.Linear(4, 4, bias=False)
        start, optimizer = net.weight.detach().clone(), torch.optim.SGD(net.parameters(), lr=1.0)
        clip = partial(nn.utils.clip_grad_norm_, max_norm=1e-3)
        with step_in_backward(optimizer, before=clip if clips_before else None):
            net(torch.ones(2, 4)).sum().backward()
        assert clip(net.parameters()) == 0
        optimizer.step()
        moved.append((net.weight - start).norm().item())
    assert moved == [pytest.approx(8), pytest.approx(1e-3, rel=1e-2)]


@pytest.mark.parametrize('fused', [False, True])
def test_a_gradient_scaler_ends_in_an_error(fused):
    """As its page says: torch's own, and not before parameters are updated by scaled gradients."""
    net, scaler = nn.Linear(4, 4), torch.amp.GradScaler('cpu')
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
    with step_in_backward(optimizer):
        scaler.scale(net(torch.ones(2, 4)).sum()).backward()
    with pytest.raises(AssertionError, match='No inf checks were recorded'):
        scaler.step(optimizer), scaler.update()


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, as schedule-free optimisers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group['count'] = group.get('count', 0) + 1
        return super().step(closure)


class Spread(torch.optim.SGD):
    """Holds its groups in other optimisers."""

    def __init__(self, params):
        self.inner = torch.optim.SGD(params, lr=0.1)

    @property
    def param_groups(self):
        return self.inner.param_groups


@pytest.mark.edge(
    'optimizer_in_backward',
    'refused',
    'Optimisers that need more than one parameter’s gradient',
)
def test_optimisers_that_need_more_than_one_gradient_are_refused():
    net = nn.Linear(2, 2)
    with (
        pytest.raises(ValueError, match='Lamb: max_grad_norm=1.0 needs all'),
        step_in_backward(Lamb(net.parameters(), lr=0.1)),
    ):
        raise AssertionError('not refused')
    with (
        pytest.raises(TypeError, match='Spread spreads its parameters'),
        step_in_backward(Spread(net.parameters())),
    ):
        raise AssertionError('not refused')
    with (
        pytest.raises(RuntimeError, match=r'Counting keeps state.*\(count\)'),
        step_in_backward(Counting(net.parameters(), lr=0.1)),
    ):
        net(torch.ones(1, 2)).sum().backward()


@pytest.mark.edge(
    'optimizer_in_backward',
    'exact',
    'Backward that reads weights late (Conv-BN eval): before they change',
)
def test_conv_bn_eval_reads_its_weights_before_they_change():
    states = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        model = timm.create_model('resnet18', num_classes=3, stem_width=8, channels=(8, 8, 8, 8))
        model = model.double().train()
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.eval()
        efficient_conv_bn_eval(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for seed in range(3):
            torch.manual_seed(seed)
            loss = model(torch.randn(2, 3, 32, 32).double()).square().mean()
            if in_backward:
                with step_in_backward(optimizer):
                    loss.backward()
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        states.append(dict(model.named_parameters()))
    assert_same_step(states[1], states[0], tolerance=1e-12)


def _sharded_rank(rank, world_size):
    """Parameters after steps with whole gradients, and with each inside backward."""
    runs = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        net = deep(width=16, depth=3).double()
        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        torch.manual_seed(1)
        for x in torch.randn(4, world_size, 2, 16).double():
            loss = net(x[rank]).square().mean()
            if in_backward:
                with step_in_backward(optimizer):
                    loss.backward()
                assert all(p.grad is None for p in net.parameters())
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append({name: p.full_tensor().detach() for name, p in net.named_parameters()})
    return runs


@NEEDS_SHARDING
@pytest.mark.slow
@pytest.mark.parametrize('world_size', [2, 4])
def test_sharded_parameters_are_updated_by_the_reduced_gradient(world_size):
    for plain, fused in run_ranks(world_size, _sharded_rank):
        assert_same_step(fused, plain, tolerance=1e-12)
