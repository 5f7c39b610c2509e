"""torchao's optimisers under this engine; without torchao, what is said."""

import contextlib
import io
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from memengine.engine.checkpoint.sharded import read_sharded
from memengine.engine.optim import OptimWrapper
from memengine.memory.ledger import blocks_of
from memengine.registry import OPTIMIZERS
from memengine.techniques.optimizer_memory.in_backward import step_in_backward
from memengine.testing import assert_same_step, relative_error
from tests.engine.toy import Losses, ToyModel, toy_runner

NAMES = ['AdamW8bit', 'AdamW4bit', 'CPUOffloadOptimizer']


@pytest.mark.parametrize('name', NAMES[:2])
def test_without_torchao_the_error_says_what_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, 'torchao.optim', None)
    from memengine.techniques.optimizer_memory import adamw_low_bit

    adamw_low_bit._low_bit.cache_clear()
    with pytest.raises(ImportError, match=f"type='{name}' needs torchao: pip install torchao"):
        OPTIMIZERS.get(name)(nn.Linear(2, 2).parameters())


def network(width=128):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 64))


def train(name, steps, net=None, optimizer=None, in_backward=False, start=0):
    net = net or network()
    optimizer = optimizer or OPTIMIZERS.get(name)(net.parameters(), lr=1e-3)
    for seed in range(start, start + steps):
        torch.manual_seed(seed)
        x = torch.randn(32, 64)
        loss = (net(x) - x.roll(1, 1)).square().mean()
        if in_backward:
            with step_in_backward(optimizer):
                loss.backward()
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def moved(net):
    pairs = zip(net.parameters(), network().parameters(), strict=True)
    return torch.cat([(now - first).flatten() for now, first in pairs]).detach()


def state_bytes(optimizer):
    """Bytes of the averages."""
    tensors = [v for s in optimizer.state.values() for k, v in s.items() if k != 'step']
    blocks = {block.key: block.nbytes for tensor in tensors for block in blocks_of(tensor)}
    return sum(blocks.values())


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize(
    ('name', 'bits', 'block', 'table'), [('AdamW8bit', 8, 256, 256), ('AdamW4bit', 4, 128, 16)]
)
def test_bytes_of_the_state(name, bits, block, table):
    net, optimizer = train(name, steps=1)
    large = [p.numel() for p in net.parameters() if p.numel() >= 4096]
    small = [p.numel() for p in net.parameters() if p.numel() < 4096]
    quantised = sum(n * bits // 8 + n // block * 4 + table * 4 for n in large)
    assert len(large) == 2
    assert state_bytes(optimizer) == 2 * (quantised + 4 * sum(small))


@pytest.mark.parametrize(
    ('name', 'least', 'most'), [('AdamW8bit', 1e-3, 0.05), ('AdamW4bit', 0.05, 0.5)]
)
def test_distance_from_adamw_after_twenty_steps(name, least, most):
    far = relative_error(moved(train(name, 20)[0]), moved(train('AdamW', 20)[0]))
    assert least < far < most


def test_it_goes_on_exactly_from_a_checkpoint():
    whole, _ = train('AdamW8bit', 6)
    half, first = train('AdamW8bit', 3)
    optimizer = OPTIMIZERS.get('AdamW8bit')(half.parameters(), lr=1e-3)
    optimizer.load_state_dict(through_a_file(first.state_dict()))
    net, _ = train('AdamW8bit', 3, half, optimizer, start=3)
    assert_same_step(dict(net.named_parameters()), dict(whole.named_parameters()), 0.0)


def test_the_state_of_adamw_is_quantised_when_it_is_loaded():
    net, plain = train('AdamW', 3)
    optimizer = OPTIMIZERS.get('AdamW8bit')(net.parameters(), lr=1e-3)
    optimizer.load_state_dict(through_a_file(plain.state_dict()))
    assert state_bytes(optimizer) < state_bytes(plain) / 3
    for parameter in net.parameters():
        want = plain.state[parameter]['exp_avg']
        got = optimizer.state[parameter]['exp_avg']
        got = (
            got.dequantize()
            if hasattr(got, 'dequantize') and type(got) is not torch.Tensor
            else got
        )
        assert relative_error(got, want) < 0.03


def test_inside_backward_it_steps_alike():
    plain, fused = train('AdamW8bit', 4), train('AdamW8bit', 4, in_backward=True)
    assert_same_step(dict(fused[0].named_parameters()), dict(plain[0].named_parameters()), 0.0)


def test_hooks_of_its_step_run_once():
    import torchao.optim

    torchao.optim.AdamW8bit(network().parameters())  # its class is given hooks by torch
    net, optimizer = train('AdamW8bit', 1)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(None))
    train('AdamW8bit', 1, net, optimizer)
    assert len(calls) == 1


def test_a_run_with_schedules_resumes_exactly(tmp_path):
    settings = dict(optim_wrapper=dict(optimizer=dict(type='AdamW8bit', lr=0.05)))
    whole, first, second = Losses(), Losses(), Losses()
    toy_runner(tmp_path / 'whole', whole, **settings).train()
    stop = dict(by_epoch=True, max_epochs=3, stop_at_iter=7)
    toy_runner(tmp_path / 'parts', first, train_cfg=stop, **settings).train()
    runner = toy_runner(tmp_path / 'parts', second, resume=True, **settings)
    runner.train()
    assert first.seen + second.seen == whole.seen
    assert isinstance(runner.optim_wrapper.get_lr()['lr'][0], float)


class Wide(ToyModel):
    """A model with a weight that is large enough for a state in few bits."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 1))


@pytest.mark.parametrize('name', NAMES[:2])
@pytest.mark.parametrize('asynchronous', [False, True])
def test_a_run_with_a_state_in_few_bits_resumes_exactly_from_shards(tmp_path, name, asynchronous):
    def train(folder, seen, stop=None, **resume):
        return toy_runner(
            tmp_path / folder,
            seen,
            dict(by_epoch=True, max_epochs=3, stop_at_iter=stop),
            model=seeded(Wide),
            optim_wrapper=dict(optimizer=dict(type=name, lr=0.05)),
            default_hooks=dict(checkpoint=dict(sharded=True, asynchronous=asynchronous)),
            **resume,
        ).train()

    whole, first, second = Losses(), Losses(), Losses()
    train('whole', whole)
    train('parts', first, 7)
    train('parts', second, resume=True)
    assert first.seen + second.seen == whole.seen
    saved = read_sharded(tmp_path / 'parts/iter_7.dcp')['optimizer']['state']
    assert type(saved['net.2.weight']['exp_avg']) is not torch.Tensor


def seeded(kind):
    torch.manual_seed(0)
    return kind()


# ------------------------------------------------------------------ host memory


@pytest.mark.edge('optimizer_offload', 'refused', 'Parameters that are on no GPU')
@pytest.mark.parametrize('groups', [False, True])
def test_offloading_without_a_gpu_is_refused(groups):
    net = network()
    given = [dict(params=net.parameters())] if groups else net.parameters()
    with pytest.raises(ValueError, match="CPUOffloadOptimizer.*use optimizer.type='AdamW'"):
        OPTIMIZERS.get('CPUOffloadOptimizer')(given, lr=0.1)


def test_gradients_that_are_gone_before_the_step_are_refused():
    given = dict(lr=0.1, offload_gradients=True)
    with pytest.raises(ValueError, match='leave offload_gradients out'):
        OPTIMIZERS.get('CPUOffloadOptimizer')(network().parameters(), **given)


@pytest.fixture
def offloading(monkeypatch):
    """The optimiser with a host in the place of the GPU; streams wait for nothing."""
    from torchao.optim import cpu_offload

    from memengine.techniques.optimizer_memory import states_on_host

    class Stream:
        def wait_stream(self, other):
            pass

        def synchronize(self):
            pass

        def record_event(self):
            return SimpleNamespace(synchronize=lambda: None)

    def on_host(like, device=None, pin_memory=False):
        return torch.zeros(like.shape, dtype=like.dtype)

    gpu = SimpleNamespace(
        Stream=Stream, current_stream=Stream, stream=lambda _: contextlib.nullcontext()
    )
    pretended = SimpleNamespace(
        **{name: getattr(torch, name) for name in ('optim', 'no_grad')},
        cuda=gpu,
        empty_like=on_host,
    )
    monkeypatch.setattr(cpu_offload, 'torch', pretended)
    monkeypatch.setattr(cpu_offload, 'get_available_devices', lambda: ['cpu', 'cuda'])

    def make(params, **settings):
        return states_on_host._offload_class()(
            [dict(params=list(params))], torch.optim.AdamW, **settings
        )

    return make


def offloaded_and_plain(offloading, **settings):
    for make in (
        offloading,
        lambda params, **kwargs: torch.optim.AdamW(params, fused=True, **kwargs),
    ):
        net = network()
        optimizer = make(net.parameters(), lr=1e-2)
        net.load_state_dict(
            network().state_dict() | {'0.bias': torch.ones(128)}
        )  # after it is built
        yield net, OptimWrapper(optimizer, **settings)


@pytest.mark.edge(
    'optimizer_offload',
    'exact',
    'The update: it is that of the optimiser on the host',
)
@pytest.mark.parametrize(
    'settings', [dict(), dict(clip_grad=dict(max_norm=0.01)), dict(accumulative_counts=2)]
)
def test_offloaded_steps_are_those_of_the_optimiser(offloading, settings):
    results = []
    for net, wrapper in offloaded_and_plain(offloading, **settings):
        for seed in range(4):
            torch.manual_seed(seed)
            for group in wrapper.optimizer.param_groups:
                group['lr'] = 1e-2 / (1 + seed)
            wrapper.update_params(net(torch.randn(8, 64)).square().mean())
        results.append(dict(net.named_parameters()))
    assert_same_step(*results, tolerance=0.0)


def test_offloading_obeys_hooks_and_resumes(offloading):
    (net, wrapper), _ = offloaded_and_plain(offloading)
    optimizer, calls = wrapper.optimizer, []

    def freeze(*_):
        net[0].weight.grad = None

    handle = optimizer.register_step_pre_hook(freeze)
    optimizer.register_step_post_hook(lambda *_: calls.append(None))
    before = net[0].weight.clone()
    wrapper.update_params(net(torch.ones(8, 64)).square().mean())
    assert torch.equal(net[0].weight, before) and len(calls) == 1
    assert optimizer.defaults['lr'] == 1e-2

    handle.remove()
    state, weights = through_a_file(wrapper.state_dict()), through_a_file(net.state_dict())
    wrapper.update_params(net(torch.ones(8, 64)).square().mean())
    again = network()
    resumed = OptimWrapper(offloading(again.parameters(), lr=1e-2))
    resumed.load_state_dict(state)
    again.load_state_dict(weights)
    resumed.update_params(again(torch.ones(8, 64)).square().mean())
    assert_same_step(dict(again.named_parameters()), dict(net.named_parameters()), 0.0)


def test_offloading_cannot_step_inside_backward(offloading):
    optimizer = offloading(network().parameters(), lr=1e-2)
    with (
        pytest.raises(TypeError, match='CPUOffloadOptimizer spreads its parameters'),
        step_in_backward(optimizer),
    ):
        raise AssertionError('not refused')


@pytest.mark.gpu
def test_offloading_on_a_gpu_is_the_optimiser_on_the_host():
    results = []
    for name in ('CPUOffloadOptimizer', 'AdamW'):
        net = network().cuda()
        optimizer = OPTIMIZERS.get(name)(net.parameters(), lr=1e-2)
        net.load_state_dict(network().state_dict())
        wrapper = OptimWrapper(optimizer, clip_grad=dict(max_norm=0.01))
        for _ in range(3):
            wrapper.update_params(net(torch.ones(8, 64, device='cuda')).square().mean())
        results.append(dict(net.named_parameters()))
    assert_same_step(*results, tolerance=1e-5)


@pytest.mark.gpu
def test_a_run_whose_states_are_on_the_host_saves_and_goes_on(tmp_path):
    pytest.importorskip('torchao.optim')

    def weights(folder, **kwargs):
        runner = toy_runner(
            folder,
            optim_wrapper=dict(optimizer=dict(type='CPUOffloadOptimizer', lr=0.05)),
            custom_hooks=[dict(type='EMAHook')],
            **kwargs,
        )
        runner.train()
        return runner, dict(runner.model.state_dict())

    runner, expected = weights(tmp_path / 'whole')
    names = {p: name for name, p in runner.model.named_parameters()}
    state = runner.optim_wrapper.optimizer.state
    assert {names[p] for p in state} == set(names.values())
    assert all(state[p]['exp_avg'].shape == p.shape for p in names)
    weights(tmp_path / 'cut', train_cfg=dict(by_epoch=True, max_epochs=3, stop_at_iter=7))
    _, found = weights(tmp_path / 'cut', resume=True)
    assert_same_step(found, expected, tolerance=0.0)
