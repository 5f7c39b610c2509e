"""AdamW with averages in bfloat16: half the state, close to AdamW, exact to resume."""

import copy

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard

from memengine.techniques.optimizer_memory.adamw_bf16 import AdamWBf16, stochastically_rounded
from memengine.techniques.optimizer_memory.in_backward import step_in_backward
from memengine.testing import assert_same_step, relative_error, run_ranks
from tests.marks import NEEDS_SHARDING


def test_rounding_goes_to_the_neighbours_with_the_value_as_mean():
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    value = torch.tensor([1 + 2**-9, -(1 + 2**-9), 3.0, 0.0, 1e-30, float('inf'), float('nan')])
    rounded = stochastically_rounded(value.repeat(20_000, 1), generator).float()
    assert {*rounded[:, 0].tolist()} == {1.0, 1 + 2**-7}
    assert {*rounded[:, 1].tolist()} == {-1.0, -(1 + 2**-7)}
    # a quarter goes up; three standard errors are a quarter of 3 * sqrt(3 / 20,000) of a gap
    assert rounded[:, :2].mean(0).tolist() == pytest.approx(value[:2].tolist(), abs=2**-7 * 0.01)
    assert torch.equal(rounded[:, 2:4], value[2:4].expand(20_000, 2))
    assert rounded[:, 4].double().mean().item() == pytest.approx(1e-30, rel=1e-3)
    assert rounded[:, 5].isinf().all() and rounded[:, 6].isnan().all()


def network(dtype=torch.float32):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 10))
    return net.to(dtype)


def digits():
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 8 - 1
    return images, torch.tensor(data.target)


def train(make, steps=20, net=None, optimizer=None, in_backward=False, start=0):
    net = net or network()
    optimizer = optimizer or make(net.parameters())
    images, labels = digits()
    for seed in range(start, start + steps):
        torch.manual_seed(seed)
        chosen = torch.randint(1200, (64,))
        loss = nn.functional.cross_entropy(net(images[chosen]), labels[chosen])
        if in_backward:
            with step_in_backward(optimizer):
                loss.backward()
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-3)


def bf16(params):
    return AdamWBf16(params, lr=1e-3)


def averages_of(optimizer):
    return [s[key] for s in optimizer.state.values() for key in ('exp_avg', 'exp_avg_sq')]


def moved(net):
    """The way of all parameters from where they began."""
    pairs = zip(net.parameters(), network().parameters(), strict=True)
    return torch.cat([(now - first).flatten() for now, first in pairs]).detach()


@pytest.mark.edge('adamw_bf16', 'exact', 'NaN and infinity of any bits: they stay what they are')
@pytest.mark.parametrize('bits', [0x7FFFFFFF, 0x7FC00000, -1, 0x7F800000])
def test_what_is_not_finite_stays_so(bits):
    value = torch.full((1000,), bits, dtype=torch.int32).view(torch.float32)
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    rounded = stochastically_rounded(value, generator).float()
    torch.testing.assert_close(rounded, value, equal_nan=True)


def test_state_takes_half_the_bytes():
    net, plain = train(adamw, steps=1)
    _, ours = train(bf16, steps=1)
    numbers = sum(p.numel() for p in net.parameters())
    assert sum(average.nbytes for average in averages_of(plain)) == 8 * numbers
    assert sum(average.nbytes for average in averages_of(ours)) == 4 * numbers


def test_first_step_is_that_of_adamw():
    plain, ours = train(adamw, steps=1)[0], train(bf16, steps=1)[0]
    assert_same_step(dict(ours.named_parameters()), dict(plain.named_parameters()), 1e-7)


def test_twenty_steps_stay_near_adamw():
    far = relative_error(moved(train(bf16)[0]), moved(train(adamw)[0]))
    assert 1e-4 < far < 0.01


@pytest.mark.parametrize('stochastic', [True, False])
def test_the_second_average_follows_only_when_rounded_stochastically(stochastic, monkeypatch):
    if not stochastic:
        name = 'memengine.techniques.optimizer_memory.adamw_bf16._rounded_by'
        monkeypatch.setattr(name, lambda value, noise: value.bfloat16())
    weight = nn.Parameter(torch.zeros(4096))
    optimizer = AdamWBf16([weight], lr=0.0)
    optimizer.state[weight] = {
        'step': torch.tensor(1000.0),
        'exp_avg': torch.zeros(4096, dtype=torch.bfloat16),
        'exp_avg_sq': torch.ones(4096, dtype=torch.bfloat16),
    }
    for _ in range(1000):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    mean = optimizer.state[weight]['exp_avg_sq'].double().mean().item()
    assert (mean == pytest.approx(0.999**1000, rel=0.01)) == stochastic


def accuracy(net):
    images, labels = digits()
    net.eval()
    return (net(images[1200:]).argmax(1) == labels[1200:]).double().mean().item()


def test_it_learns_the_digits_as_adamw_does():
    untrained, plain, ours = (
        accuracy(net) for net in (network(), train(adamw, 300)[0], train(bf16, 300)[0])
    )
    assert untrained < 0.2 < 0.85 < plain
    assert ours == pytest.approx(plain, abs=0.015)


def test_it_goes_on_exactly_from_a_checkpoint_and_keeps_its_precision():
    whole, expected = train(bf16, steps=6)
    half, first = train(bf16, steps=3)
    optimizer = bf16(half.parameters())
    optimizer.load_state_dict(copy.deepcopy(first.state_dict()))
    assert {average.dtype for average in averages_of(optimizer)} == {torch.bfloat16}
    net, optimizer = train(bf16, steps=3, net=half, optimizer=optimizer, start=3)
    assert_same_step(dict(net.named_parameters()), dict(whole.named_parameters()), 0.0)
    for got, want in zip(averages_of(optimizer), averages_of(expected), strict=True):
        assert torch.equal(got, want)


def test_adamw_and_it_load_the_state_of_the_other():
    net, plain = train(adamw, steps=3)
    ours = bf16(net.parameters())
    ours.load_state_dict(copy.deepcopy(plain.state_dict()))
    for got, want in zip(averages_of(ours), averages_of(plain), strict=True):
        assert torch.equal(got, want.bfloat16())
    back = adamw(net.parameters())
    back.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert {average.dtype for average in averages_of(back)} == {torch.float32}
    train(adamw, steps=1, net=net, optimizer=back)
    other = torch.optim.AdamW(net.parameters(), amsgrad=True)
    with pytest.raises(ValueError, match='amsgrad=True, which AdamWBf16 has not'):
        ours.load_state_dict(other.state_dict())


def test_the_random_state_of_training_is_not_touched():
    train(bf16, steps=1)
    after = torch.rand(3)
    train(adamw, steps=1)
    assert torch.equal(torch.rand(3), after)


def test_inside_backward_it_rounds_alike():
    plain, fused = train(bf16, steps=4), train(bf16, steps=4, in_backward=True)
    assert_same_step(dict(fused[0].named_parameters()), dict(plain[0].named_parameters()), 0.0)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_parameters_in_half_precision_are_refused(dtype):
    with pytest.raises(TypeError, match=f'float32, got {dtype}; use AdamW'):
        bf16(network(dtype).parameters())


def _ranks(rank, world_size):
    """What DDP and sharded ranks hold after three steps."""
    ddp = nn.parallel.DistributedDataParallel(network())
    sharded = network()
    fully_shard(sharded)
    results = []
    for net in (ddp, sharded):
        optimizer = bf16(net.parameters())
        torch.manual_seed(rank)
        for _ in range(3):
            net(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        full = [p.full_tensor() if hasattr(p, 'full_tensor') else p for p in net.parameters()]
        dtypes = {average.dtype for average in averages_of(optimizer)}
        results.append((dtypes, [p.detach() for p in full]))
    return results


@NEEDS_SHARDING
@pytest.mark.slow
def test_ranks_stay_alike():
    results = run_ranks(2, _ranks)
    for first, second in zip(*results, strict=True):
        assert first[0] == {torch.bfloat16}
        assert all(map(torch.equal, first[1], second[1]))
    (_, ddp), (_, sharded) = results[0]
    # shards draw other noise; the step from equal gradients is the same but for it
    assert (
        relative_error(
            torch.cat([p.flatten() for p in sharded]), torch.cat([p.flatten() for p in ddp])
        )
        < 1e-3
    )
