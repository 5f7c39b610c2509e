"""Gradient cache with SyncBatchNorm: chunk k of all ranks is normalised together."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memengine.losses import NTXentLoss
from memengine.techniques.layers.sync_batchnorm import SyncedBatchNorm
from memengine.techniques.slices.grad_cache import Tower, cached_step
from memengine.testing import assert_same_step, relative_error, run_ranks
from tests.techniques.toy import Encoder

ROWS, CHUNK = 6, 2


def make():
    torch.manual_seed(0)
    return Encoder(norm=nn.BatchNorm1d(16)).double()


def batch(ranks):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ranks, ROWS, 12, dtype=torch.float64, generator=generator)


def loss(z):
    return NTXentLoss()(*z.chunk(2))


def gradients(module):
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def one_process(ranks):
    """Normalises the chunks of all ranks together; the loss is the mean of the ranks'."""
    model, chunks = make(), batch(ranks).split(CHUNK, dim=1)  # [ranks, CHUNK, 12] each
    z = torch.cat([model(x.flatten(0, 1)).unflatten(0, (ranks, -1)) for x in chunks], dim=1)
    torch.stack([loss(rows) for rows in z]).mean().backward()
    return model


def on_a_rank(rank, world_size, keep_graph):
    model = make()
    assert len(SyncedBatchNorm(model).replaced) == 1
    ddp = DistributedDataParallel(model)
    cached_step(Tower(ddp, batch(world_size)[rank].split(CHUNK)), loss, keep_graph=keep_graph)
    want = one_process(world_size)
    assert_same_step(gradients(model), gradients(want))
    for (name, buffer), (_, expected) in zip(
        model.named_buffers(), want.named_buffers(), strict=True
    ):
        assert relative_error(buffer.double(), expected.double()) < 1e-9, name


@pytest.mark.parametrize(
    ('world_size', 'keep_graph'), [(2, 0), (2, 1), pytest.param(4, 1, marks=pytest.mark.slow)]
)
def test_ranks_are_one_process(world_size, keep_graph):
    run_ranks(world_size, on_a_rank, keep_graph)
