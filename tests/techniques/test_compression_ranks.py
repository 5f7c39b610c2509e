"""Dropped and quantised activations under DDP and sharding: the gradient of one process."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from memengine.techniques import drop_activations, quantize_activations, shard_model
from memengine.testing import assert_same_step, relative_error, run_ranks


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


def model_and_batch():
    torch.manual_seed(0)
    return Network().double(), torch.randn(8, 32, dtype=torch.float64)


def gradients(model, wrapped, x):
    wrapped(x).square().mean().backward()
    return {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).detach()
        for name, p in model.named_parameters()
    }


APPLY = {
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


@pytest.mark.parametrize('wrap', WRAP)
@pytest.mark.parametrize('how', APPLY)
def test_two_ranks_follow_one_process(how, wrap):
    model, x = model_and_batch()
    exact = gradients(model, model, x)
    model, x = model_and_batch()
    APPLY[how](model)
    lossy = gradients(model, model, x)
    assert not all(torch.equal(lossy[name], exact[name]) for name in exact)
    for found, before, after in run_ranks(2, _rank, how, wrap):
        assert after < before
        if how == 'dropped':  # by row, so that it does not matter which rows are together
            assert_same_step(found, lossy)
        else:
            for name in exact:
                assert 0 < relative_error(found[name], exact[name]) < 0.05, name
