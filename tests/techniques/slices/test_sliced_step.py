"""A step whose loss has additive and coupled terms: contrast of the codes beside reconstruction."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from memengine.losses import NTXentLoss
from memengine.memory.meter import SavedBytes
from memengine.techniques import Tower, sliced_step, split_batch
from memengine.testing import assert_same_step, run_ranks

BATCH, WIDTH = 12, 10  # rows: two views of six samples


class AutoEncoder(nn.Module):
    def __init__(self, dropout=0.0, hidden=32):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(WIDTH, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, 6)
        )
        self.decoder = nn.Sequential(nn.Linear(6, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))
        self.temperature = nn.Parameter(torch.tensor(0.7))  # of the coupled loss only
        self.log = SimpleNamespace(rows=[])  # a plain list is as in the plain step

    def forward(self, x):
        self.log.rows.append(len(x))
        code = self.encoder(x)
        return {'code': code, 'picture': self.decoder(code)}


def build(dropout=0.0, **kwargs):
    torch.manual_seed(0)
    return AutoEncoder(dropout, **kwargs).double()


def data(seed=0, batch=BATCH):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, WIDTH, dtype=torch.float64, generator=generator)


def contrast(model, codes):
    module = model.module if isinstance(model, DistributedDataParallel) else model
    return {'loss_contrast': NTXentLoss(0.5, tile_size=16)(*(codes * module.temperature).chunk(2))}


def reconstruction(outputs, x, total=BATCH):
    return {
        'loss_picture': (outputs['picture'] - x).square().mean(1).sum() / total,
        'rows': torch.tensor(len(x)),
    }


def step(model, x, size=5, coupled=None, total=BATCH, **options):
    """Both losses in slices; ``coupled`` tells which slices are contrasted."""
    tower = Tower(
        model,
        split_batch(x, size),
        coupled=coupled,
        coupled_part=lambda outputs, piece: outputs['code'],
    )
    losses = sliced_step(
        tower,
        lambda codes: contrast(model, codes),
        lambda outputs, piece: reconstruction(outputs, piece, total),
        **options,
    )
    return {**losses.coupled, **losses.additive}


def plain(model, x, size=BATCH):
    """One backward; with dropout the forward runs in slices, as masks would differ otherwise."""
    parts = [model(piece) for piece in split_batch(x, size)]
    outputs = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    losses = {**contrast(model, outputs['code']), **reconstruction(outputs, x)}
    (losses['loss_contrast'] + losses['loss_picture']).backward()
    return losses


def train(carry, dropout=0.0, **options):
    model = build(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    seen = {}
    for index in range(4):
        optimizer.zero_grad()
        torch.manual_seed(index)
        losses = carry(model, data(index), **options)
        seen |= {f'{name} {index}': value.double() for name, value in losses.items()}
        seen |= {f'gradient {index} of {n}': p.grad.clone() for n, p in model.named_parameters()}
        seen[f'next number {index}'] = torch.rand(())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return seen | model.state_dict()


@pytest.mark.parametrize('keep_graph', [0, 1, 2, 99])
@pytest.mark.parametrize('size', [1, 5, 12])
def test_same_step(size, keep_graph):
    assert_same_step(train(step, size=size, keep_graph=keep_graph), train(plain))


@pytest.mark.parametrize('keep_graph', [0, 1, 99])
def test_same_step_with_dropout(keep_graph):
    expected = train(plain, dropout=0.3, size=5)
    assert_same_step(train(step, dropout=0.3, size=5, keep_graph=keep_graph), expected)


@pytest.mark.parametrize('fault', ['doubled', 'missing', 'zero'])
def test_a_wrong_gradient_fails_the_comparison(fault):
    def faulty(model, x):
        losses = step(model, x)
        bias = model.encoder[0].bias
        bias.grad = {'doubled': 2 * bias.grad, 'missing': None, 'zero': 0 * bias.grad}[fault]
        return losses

    def gradients(carry):
        model = build()
        carry(model, data())
        return {name: p.grad for name, p in model.named_parameters()}

    assert_same_step(gradients(step), gradients(plain))
    with pytest.raises(AssertionError, match=r'encoder\.0\.bias'):
        assert_same_step(gradients(faulty), gradients(plain))


@pytest.mark.parametrize('keep_graph', [0, 1, 2])
def test_slices_that_are_not_contrasted_are_embedded_once(keep_graph):
    model, expected, x = build(), build(), data()
    contrasted = [0, 1]  # of three slices of four

    def is_contrasted(piece):
        return any(torch.equal(piece, x.split(4)[index]) for index in contrasted)

    step(model, x, size=4, coupled=is_contrasted, keep_graph=keep_graph)
    assert model.log.rows == [4] * (len(contrasted) + (len(contrasted) - keep_graph) + 1)
    outputs = expected(x)
    losses = {**contrast(expected, outputs['code'][:8]), **reconstruction(outputs, x)}
    (losses['loss_contrast'] + losses['loss_picture']).backward()
    assert_same_step(
        {name: p.grad for name, p in model.named_parameters()},
        {name: p.grad for name, p in expected.named_parameters()},
    )


def test_a_slice_has_one_backward():
    model, calls = build(), []
    model.encoder[0].weight.register_hook(lambda gradient: calls.append(1))
    step(model, data(), size=5)
    assert len(calls) == 3


def test_bytes_are_those_of_one_slice():
    def peak(batch, size):
        model, x = build(hidden=512), data(batch=batch)
        with SavedBytes(model, x) as meter:
            step(model, x, size, total=batch)
        return meter.peak_bytes

    one = peak(16, 16)
    assert peak(16 * 16, 16) < 1.05 * one
    assert peak(16 * 16, 4) < 0.35 * one


def test_cached_gradients_carry_the_scale_once():
    model, expected = build(), build()
    step(model, data(), backward=lambda loss: (16 * loss).backward())
    plain(expected, data())
    assert_same_step(
        {name: p.grad for name, p in model.named_parameters()},
        {name: 16 * p.grad for name, p in expected.named_parameters()},
    )


def test_a_frozen_encoder_has_additive_losses_too():
    model = build()
    model.encoder.requires_grad_(False)
    step(model, data())
    assert model.encoder[0].weight.grad is None
    assert model.decoder[0].weight.grad is not None and model.temperature.grad is not None


def count_reductions(state, bucket):
    state.append(bucket.index())
    work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return work.then(lambda future: future.value()[0] / dist.get_world_size())


def rank_main(rank, world_size, keep_graph):
    model = build()
    ddp = DistributedDataParallel(model)
    reductions = []
    ddp.register_comm_hook(reductions, count_reductions)
    step(ddp, data(rank), size=5, keep_graph=keep_graph)
    return {name: p.grad for name, p in model.named_parameters()}, reductions


@pytest.mark.parametrize('keep_graph', [0, 99])
def test_ranks_reduce_once(keep_graph):
    model = build()
    for seed in range(2):
        plain(model, data(seed))
    expected = {name: p.grad / 2 for name, p in model.named_parameters()}
    for actual, reductions in run_ranks(2, rank_main, keep_graph):
        assert_same_step(actual, expected)
        assert reductions == [0]


def one_rank_main(rank, world_size):
    ddp = DistributedDataParallel(build(), static_graph=True)
    step(ddp, data(), size=BATCH, keep_graph=1)
    with pytest.raises(ValueError, match='set static_graph=False'):
        step(ddp, data(), size=4)


@pytest.mark.edge('grad_cache', 'refused', 'DDP with `static_graph=True`')
def test_a_static_graph_of_ddp_is_refused_where_it_has_several():
    run_ranks(1, one_rank_main)


def test_a_step_needs_towers_and_slices():
    with pytest.raises(ValueError, match='no encoder'):
        sliced_step([], F.mse_loss)
    with pytest.raises(ValueError, match='no slice for AutoEncoder'):
        sliced_step(Tower(build(), []), lambda codes: codes.sum())
