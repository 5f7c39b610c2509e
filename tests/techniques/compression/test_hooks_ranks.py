"""Recomputed, dropped, quantised activations under DDP and sharding: one process's gradient."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from memengine.techniques import (
    drop_activations,
    quantize_activations,
    recompute_activations,
    shard_model,
)
from memengine.testing import assert_same_step, relative_error, run_ranks
from tests.marks import NEEDS_SHARDING


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
            for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class PostNorm(nn.Module):
    """A unit's last result is the next one's first input."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(3))
        )

    def forward(self, x):
        return self.blocks(x)


def model_and_batch(kind=Network):
    torch.manual_seed(0)
    return kind().double(), torch.randn(8, 32, dtype=torch.float64)


def gradients(model, wrapped, x):
    wrapped(x).square().mean().backward()
    return {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).detach()
        for name, p in model.named_parameters()
    }


APPLY = {
    'recomputed': recompute_activations,
    'dropped': lambda model: drop_activations(model, 'block_mink', 0.5, block_size='row'),
    'quantised': lambda model: quantize_activations(model, 8, min_numel=1),
}
WRAP = {
    'ddp': DistributedDataParallel,
    'fsdp': lambda model: (shard_model(model), model)[1],
}


def _rank(rank, world_size, how, wrap):
    model, x = model_and_batch()
    rule = APPLY[how](model)
    wrapped = WRAP[wrap](model)
    found = gradients(model, wrapped, x[rank::world_size])
    return found, rule.kept.before, rule.kept.after


@pytest.mark.parametrize('wrap', ['ddp', pytest.param('fsdp', marks=NEEDS_SHARDING)])
@pytest.mark.parametrize('how', APPLY)
def test_two_ranks_follow_one_process(how, wrap):
    model, x = model_and_batch()
    exact = gradients(model, model, x)
    model, x = model_and_batch()
    APPLY[how](model)
    lossy = gradients(model, model, x)
    is_exact = all(torch.equal(lossy[name], exact[name]) for name in exact)
    assert is_exact == (how == 'recomputed')
    for found, before, after in run_ranks(2, _rank, how, wrap):
        assert after < before
        if how == 'quantised':
            for name in exact:
                assert 0 < relative_error(found[name], exact[name]) < 0.05, name
        else:  # dropped by row, so that it does not matter which rows are together
            assert_same_step(found, lossy)


def _post_norm_rank(rank, world_size, recomputes):
    model, x = model_and_batch(PostNorm)
    if recomputes:
        recompute_activations(model)
    wrapped = WRAP['fsdp'](model)
    steps = range(7)  # of which the third and the last three follow a plan
    return [gradients(model, wrapped, x[rank::world_size]) for _ in steps][-1]


@NEEDS_SHARDING
def test_what_a_unit_gives_another_does_not_need_the_first_ones_weights():
    """In backward the second unit runs before the first is gathered."""
    expected = run_ranks(2, _post_norm_rank, False)
    for found, plain in zip(run_ranks(2, _post_norm_rank, True), expected, strict=True):
        assert all(torch.equal(found[name], plain[name]) for name in plain)
