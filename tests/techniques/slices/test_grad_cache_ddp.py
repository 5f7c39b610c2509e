"""Gradient cache on several ranks: one reduction, and the gradient of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memengine.losses import ClipLoss, NTXentLoss
from memengine.techniques.slices.grad_cache import Tower, cached_step
from memengine.testing import assert_same_step, run_ranks
from tests.techniques.toy import Encoder

PER_RANK = 6


class Clip(nn.Module):
    """Two towers and the loss's scale in one module, as an algorithm holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Encoder(), Encoder()
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image=None, text=None):
        return self.image(image) if text is None else self.text(text)


def make(kind):
    torch.manual_seed(0)
    return (Encoder(norm=nn.BatchNorm1d(16)) if kind == 'simclr' else Clip()).double()


def batch(kind, world_size):
    generator = torch.Generator().manual_seed(1)
    towers = 1 if kind == 'simclr' else 2
    return [
        torch.randn(world_size, PER_RANK, 12, dtype=torch.float64, generator=generator)
        for _ in range(towers)
    ]


def step(kind, model, plain, inputs, keep_graph=0):
    """A rank's step on its own mean loss."""
    if kind != 'simclr':
        inner = kind == 'inner towers'  # those of a module that a trainer has wrapped
        towers = [
            Tower(
                plain.get_submodule(name) if inner else model,
                [{name: piece} for piece in x.split(2)],
                lambda _, piece: model(**piece),
                within=model if inner else None,
            )
            for name, x in zip(('image', 'text'), inputs, strict=True)
        ]
        return cached_step(
            towers,
            lambda a, b: ClipLoss()(a, b, plain.logit_scale.exp()),
            keep_graph=keep_graph,
        )
    return cached_step(
        Tower(model, inputs[0].split(2)),
        lambda z: NTXentLoss()(*z.chunk(2)),
        keep_graph=keep_graph,
    )


def gradients(module):
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def count_reductions(state, bucket):
    state.append(bucket.index())
    work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return work.then(lambda future: future.value()[0] / dist.get_world_size())


KINDS = ('simclr', 'clip', 'inner towers')
CASES = [
    (kind, keep_graph, find_unused)
    for kind in KINDS
    for keep_graph in (0, 1, 99)
    for find_unused in (False, True)
    if kind == 'simclr' or (keep_graph, find_unused) != (99, True)  # refused
]


def rank_main(rank, world_size):
    """All cases in one go, as starting ranks takes longest."""
    results = []
    for kind, keep_graph, find_unused in CASES:
        plain = make(kind)
        model = DistributedDataParallel(plain, find_unused_parameters=find_unused)
        reductions: list[int] = []
        model.register_comm_hook(reductions, count_reductions)
        inputs = [x[rank] for x in batch(kind, world_size)]
        for _ in range(2):  # DDP complains about an unfinished reduction one step later
            plain.zero_grad()
            reductions.clear()
            loss = step(kind, model, plain, inputs, keep_graph)
            results.append((kind, loss, gradients(plain), list(reductions)))
    model = DistributedDataParallel(make('clip'), find_unused_parameters=True)
    for kind in KINDS[1:]:
        with pytest.raises(ValueError, match='find_unused_parameters=True; set it to False'):
            step(kind, model, model.module, [x[rank] for x in batch(kind, world_size)], 99)
    return results


@pytest.mark.parametrize('world_size', [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_follow_one_process_and_reduce_once(world_size):
    ranks = run_ranks(world_size, rank_main)
    losses, mean = {}, {}
    for kind in KINDS:
        expected = make(kind)
        inputs = batch(kind, world_size)
        losses[kind] = [
            step(kind, expected, expected, [x[rank] for x in inputs]) for rank in range(world_size)
        ]
        mean[kind] = {name: g / world_size for name, g in gradients(expected).items()}
    for rank, results in enumerate(ranks):
        assert len(results) == 2 * len(CASES)
        for kind, loss, actual, reductions in results:
            assert loss.item() == pytest.approx(losses[kind][rank].item(), rel=1e-12)
            assert_same_step(actual, mean[kind])
            assert reductions == [0]  # one bucket, once


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 6)
        self.register_buffer('scale', torch.ones(6))

    def forward(self, x):
        return self.linear(x) * self.scale


def buffers_that_are_sent(rank, world_size):
    """Gradients where each forward begins with rank 0's buffers: without the cache, and with it."""
    found = []
    for way in ('plain', 'cached'):
        torch.manual_seed(0)
        model = DistributedDataParallel(Scaled().double())
        model.module.scale.fill_(1 + rank)
        x = torch.randn(6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        loss_fn = lambda z: (z.sum(0) ** 3).sum()  # noqa: E731
        if way == 'plain':
            loss_fn(model(x)).backward()
        else:
            cached_step(Tower(model, x.split(2)), loss_fn)
        found.append(gradients(model))
    return found


def test_buffers_that_ddp_sends_are_what_every_pass_reads():
    for expected, found in run_ranks(2, buffers_that_are_sent):
        assert_same_step(found, expected)


def thawed_on_a_rank(rank, world_size):
    """Gradients where a part is thawed, or what is said: frozen after DDP was made, or before."""
    inputs = [x[rank] for x in batch('simclr', world_size)]
    found = []
    for is_frozen in (False, True):
        plain = make('simclr')
        plain.layers.requires_grad_(not is_frozen)
        model = DistributedDataParallel(plain)
        plain.layers.requires_grad_(False).requires_grad_(True)
        try:
            step('simclr', model, plain, inputs)
            found.append(gradients(plain))
        except ValueError as error:
            found.append(str(error))
    return found


def test_what_ddp_took_for_frozen_is_refused_once_it_is_thawed():
    (first, said), (second, said_too) = run_ranks(2, thawed_on_a_rank)
    assert said == said_too
    assert '4 of its 6 trained parameters were frozen when it was wrapped' in said
    assert_same_step(first, second)
