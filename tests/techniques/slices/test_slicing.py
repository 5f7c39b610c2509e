"""Additive losses slice by slice: the same step, in the bytes of a slice, at no price."""

from __future__ import annotations

import copy
from collections import UserDict
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from memengine.memory.meter import SavedBytes
from memengine.techniques.slices.accumulation_within_iteration import additive_step
from memengine.techniques.slices.sliced_step import SyncOnce, synchronising, total_loss
from memengine.techniques.slices.slicing import join_slices, split_batch
from memengine.testing import assert_same_step, relative_error, run_ranks

BATCH = 10


class Classifier(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.calls = 0
        self.layers = nn.Sequential(
            nn.Linear(12, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 5)
        )

    def forward(self, x):
        self.calls += 1
        return self.layers(x)


def data(batch=BATCH):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 12, dtype=torch.float64, generator=generator)
    return {'x': x, 'labels': torch.randint(5, (batch,), generator=generator)}


def losses_of(model, piece):
    logits = model(piece['x'])
    return {
        'loss_class': F.cross_entropy(logits, piece['labels']),
        'loss_size': logits.square().mean(),
        'accuracy': (logits.argmax(1) == piece['labels']).double().mean(),
    }


def sliced(model, batch, size):
    slices = split_batch(batch, size)
    weights = [len(piece['x']) / len(batch['x']) for piece in slices]
    return additive_step(slices, lambda piece: losses_of(model, piece), weights=weights)


def plain(model, batch, size=None):
    """The plain step; with dropout its forward runs in slices, as masks would differ otherwise."""
    slices = split_batch(batch, size or len(batch['x']))
    parts = [losses_of(model, piece) for piece in slices]
    shares = [len(piece['x']) / len(batch['x']) for piece in slices]
    losses = {
        name: sum(share * part[name] for share, part in zip(shares, parts, strict=True))
        for name in parts[0]
    }
    total_loss(losses).backward()
    return losses


def train(step, dropout, size):
    torch.manual_seed(0)
    model = Classifier(dropout).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    result = {}
    for index in range(5):
        optimizer.zero_grad()
        losses = step(model, data(), size)
        result |= {f'{name} {index}': value for name, value in losses.items()}
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    result |= {f'gradient of {name}': p.grad for name, p in model.named_parameters()}
    return result | model.state_dict()


@pytest.mark.parametrize('size', [1, 4, 10, 99])
@pytest.mark.parametrize('dropout', [0.0, 0.3])
def test_same_step(size, dropout):
    expected = train(plain, dropout, size if dropout else None)
    assert_same_step(train(sliced, dropout, size), expected)


@pytest.mark.parametrize('fault', ['doubled', 'missing', 'zero'])
def test_a_wrong_gradient_fails_the_comparison(fault):
    def faulty(model, batch, size):
        losses = sliced(model, batch, size)
        bias = model.layers[0].bias
        bias.grad = {'doubled': 2 * bias.grad, 'missing': None, 'zero': 0 * bias.grad}[fault]
        return losses

    with pytest.raises(AssertionError, match=r'layers\.0\.bias'):
        assert_same_step(train(faulty, 0.0, 4), train(plain, 0.0, None))


def test_bytes_are_those_of_one_slice_and_there_is_no_extra_forward():
    torch.manual_seed(0)
    model, batch = Classifier().double(), data(64)

    def peak(size):
        with SavedBytes(model, *batch.values()) as meter:
            sliced(model, batch, size)
        return meter.peak_bytes

    whole = peak(64)
    model.calls = 0
    assert peak(16) < 0.26 * whole
    assert model.calls == 4
    assert peak(4) < 0.07 * whole


def test_a_sum_needs_no_weights():
    model, expected = (Classifier().double() for _ in range(2))
    expected.load_state_dict(model.state_dict())
    x = data()['x']
    loss = additive_step(x.split(3), lambda piece: model(piece).exp().sum())
    want = expected(x).exp().sum()
    want.backward()
    assert relative_error(loss, want) < 1e-12
    assert not loss.requires_grad
    assert relative_error(model.layers[0].weight.grad, expected.layers[0].weight.grad) < 1e-12


def test_precision_and_scaler_are_the_callers():
    model, x = nn.Linear(12, 4), torch.randn(8, 12)
    expected, seen = copy.deepcopy(model), []

    def loss_fn(piece):
        out = model(piece)
        seen.append(out.dtype)
        return out.float().sum()

    additive_step(
        x.split(3),
        loss_fn,
        context=lambda: torch.autocast('cpu', torch.bfloat16),
        backward=lambda loss: (16 * loss).backward(),
    )
    expected(x).sum().backward()
    assert seen == [torch.bfloat16] * 3
    assert relative_error(model.weight.grad, 16 * expected.weight.grad) < 0.01


def count_reductions(state, bucket):
    state.append(bucket.index())
    work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return work.then(lambda future: future.value()[0] / dist.get_world_size())


def rank_main(rank, world_size):
    torch.manual_seed(0)
    plain_model = Classifier().double()
    model = DistributedDataParallel(plain_model)
    reductions = []
    model.register_comm_hook(reductions, count_reductions)
    x = data()['x'].view(world_size, -1, 12)[rank]
    additive_step(
        x.split(2),
        lambda piece: model(piece).exp().mean(),
        modules=[model],
        weights=[len(piece) / len(x) for piece in x.split(2)],
    )
    return {n: p.grad for n, p in plain_model.named_parameters()}, reductions


def test_ranks_follow_one_process_and_reduce_once():
    torch.manual_seed(0)
    model = Classifier().double()
    model(data()['x']).exp().mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for actual, reductions in run_ranks(2, rank_main):
        assert_same_step(actual, expected)
        assert reductions == [0]


def test_modules_that_cannot_wait_need_not():
    sync = SyncOnce([nn.Linear(1, 1)])
    with sync.next_graph(nn.Linear(1, 1)) as last, sync.shared_backward():
        assert not last


def test_what_torch_compile_gives_back_can_wait_as_its_module_can():
    class Waiting(nn.Linear):
        def no_sync(self):
            return nullcontext()

    module = Waiting(1, 1)
    assert synchronising(torch.compile(module, backend='eager')) == [module]
    assert synchronising(nn.ModuleList([nn.Linear(1, 1), module])) == [module]
    assert synchronising(nn.Linear(1, 1)) == []


@pytest.mark.parametrize('size', [1, 3, 7, 20])
def test_split_and_join(size):
    batch = {
        'x': torch.arange(14).view(7, 2),
        'rest': [torch.arange(7), (torch.arange(7.0), None)],
        'flag': True,
    }
    slices = split_batch(batch, size)
    assert [len(piece['x']) for piece in slices] == [
        min(size, 7 - start) for start in range(0, 7, size)
    ]
    assert all(piece['flag'] is True and piece['rest'][1][1] is None for piece in slices)
    assert slices[0]['x'].data_ptr() == batch['x'].data_ptr()  # no copy
    whole = join_slices(slices)
    assert torch.equal(whole['x'], batch['x'])
    assert torch.equal(whole['rest'][1][0], batch['rest'][1][0])
    assert whole['flag'] is True


def test_split_takes_any_mapping():
    (piece,) = split_batch(UserDict(x=torch.ones(2)), 4)
    assert torch.equal(piece['x'], torch.ones(2))


@pytest.mark.parametrize(
    ('batch', 'size', 'error', 'message'),
    [
        (torch.ones(3), 0, ValueError, 'at least 1 sample, got 0'),
        (torch.ones(3), -1, ValueError, 'at least 1 sample, got -1'),
        ([], 1, ValueError, 'holds no tensor'),
        ([torch.ones(3), torch.ones(4)], 1, ValueError, r'\[\(3,\), \(4,\)\]'),
        ([torch.ones(3), torch.tensor(1)], 1, ValueError, 'same samples in dimension 0'),
        ({'x': torch.ones(3), 'names': ['a', 'b', 'c']}, 1, TypeError, 'a str in the batch'),
    ],
)
def test_batches_that_cannot_be_split(batch, size, error, message):
    with pytest.raises(error, match=message):
        split_batch(batch, size)


def test_slices_that_cannot_be_joined():
    with pytest.raises(TypeError, match='slices with a str'):
        join_slices([['a'], ['b']])


def test_errors_of_the_step():
    with pytest.raises(ValueError, match='no slice'):
        additive_step([], torch.sum)
    with pytest.raises(ValueError, match='one weight per slice, got 1 for 2'):
        additive_step([1, 2], torch.sum, weights=[1.0])
    with pytest.raises(ValueError, match=r'loss must be a scalar tensor, got \(2,\)'):
        additive_step([torch.ones(2)], lambda x: x)


class WritesItsInput(nn.Module):
    """Adds to its input, in place, what it computes of it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x):
        y = self.layer(x.exp())
        x.add_(y)
        return y


def test_a_graph_that_is_written_into_one_slice_is_not_anothers():
    torch.manual_seed(0)
    model, x = WritesItsInput(), torch.randn(4, 3, dtype=torch.float64)
    model(x.clone()).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    additive_step(split_batch(x, 2), lambda piece: model(piece).square().sum(), modules=[model])
    assert_same_step({name: p.grad for name, p in model.named_parameters()}, expected)
