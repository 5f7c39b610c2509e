"""Conv-BN eval together with autocast, checkpointing, DDP, FSDP, compile and chunked steps."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from timm.layers import BatchNormAct2d, ConvNormAct
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from memengine.losses import NTXentLoss
from memengine.memory import SavedBytes
from memengine.techniques import (
    checkpoint_activations,
    efficient_conv_bn_eval,
    offload_activations,
    recompute_activations,
)
from memengine.techniques.slices.accumulation_within_iteration import additive_step
from memengine.techniques.slices.grad_cache import Tower, cached_step
from memengine.techniques.slices.slicing import split_batch
from memengine.testing import assert_same_step, relative_error, run_ranks
from tests.marks import NEEDS_SHARDING
from tests.techniques.conv_bn.test_conv_bn_eval import OTHER, frozen, images, step

PAIRS = [('blocks.0.0', 'blocks.0.1'), ('blocks.1.0', 'blocks.1.1'), ('blocks.2.0', 'blocks.2.1')]


class Net(nn.Module):
    """Three Conv-BN blocks, with dropout; checkpointed if wanted. [N, 3, 8, 8] to [N, 6]."""

    def __init__(self, checkpointed=False, also=False, dropout=0.3):
        super().__init__()
        self.checkpointed, self.also = checkpointed, also
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, 6, 3, padding=1, bias=False),
                BatchNormAct2d(6, act_layer=nn.SiLU),
                nn.Dropout(dropout),
            )
            for channels in (3, 6, 6)
        )

    def run(self, block, x):
        conv, *rest = block
        y = conv(x)
        for layer in rest:
            x = layer(y if layer is rest[0] else x)
        return x + y if self.also else x

    def forward(self, x):
        for block in self.blocks:
            x = (
                checkpoint(self.run, block, x, use_reentrant=False)
                if self.checkpointed
                else self.run(block, x)
            )
        return x.mean((2, 3))


def test_checkpointing():
    model = frozen(Net(checkpointed=True))
    plain, x = copy.deepcopy(model), images()
    plain.checkpointed = False
    found = efficient_conv_bn_eval(model)
    for _ in range(2):
        assert_same_step(step(model, x)[0], step(plain, x)[0], 1e-10)
    assert found.fused == PAIRS


def test_checkpointing_with_another_user():
    """It is seen while a forward pass is recomputed, which has to go on as it has begun."""
    model = frozen(Net(checkpointed=True, also=True))
    plain, x = copy.deepcopy(model), images()
    found = efficient_conv_bn_eval(model)
    for _ in range(2):
        assert_same_step(step(model, x)[0], step(plain, x)[0], 1e-10)
    assert found.pairs == dict.fromkeys(PAIRS, OTHER)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model = frozen(Net(dropout=0)).float()
    plain, reference = copy.deepcopy(model), copy.deepcopy(model).double()
    efficient_conv_bn_eval(model)
    x, results, kept = images().float(), [], []
    for some in (model, plain):
        with SavedBytes(some, x) as meter, torch.autocast('cpu', dtype):
            out = some(x)
        kept.append(meter.live_bytes)
        out.float().square().mean().backward()
        results.append({name: p.grad for name, p in some.named_parameters()} | {'out': out})
    assert torch.equal(results[0]['out'], results[1]['out'])
    assert kept[0] < 0.6 * kept[1]
    reference(x.double()).square().mean().backward()
    for name, parameter in reference.named_parameters():  # as far from the truth as plain is
        ours, theirs = (relative_error(result[name], parameter.grad) for result in results)
        assert results[0][name].dtype == torch.float32
        assert ours < max(1.5 * theirs, 8 * torch.finfo(dtype).eps), name


def test_compile():
    torch._dynamo.reset()
    model = frozen(Net(dropout=0))
    plain, x = copy.deepcopy(model), images()
    found = efficient_conv_bn_eval(model)
    assert_same_step(
        {
            n.removeprefix('_orig_mod.'): t
            for n, t in step(torch.compile(model, backend='aot_eager'), x)[0].items()
        },
        step(plain, x)[0],
        1e-10,
    )
    assert found.fused == PAIRS
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend='eager', fullgraph=True)(x)


def data(index):
    generator = torch.Generator().manual_seed(index)
    return torch.randn(8, 3, 8, 8, dtype=torch.float64, generator=generator)


def norms(model):
    return [layer for layer in model.modules() if isinstance(layer, BatchNormAct2d)]


def train(model, one_step, shared=slice(None), switches=True):
    """Four optimiser steps; the last BatchNorm may be in training mode in one of them.

    ``shared`` is the part of each batch that ``model`` sees.
    """
    torch.manual_seed(3)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1, momentum=0.9)
    result = {}
    for index in range(4):
        norms(model)[-1].train(switches and index == 2)
        optimizer.zero_grad()
        result[f'loss {index}'] = one_step(model, data(index)[shared]).detach()
        nn.utils.clip_grad_norm_(parameters, 0.1)
        optimizer.step()
    named = model.named_parameters()
    return result | {f'gradient of {name}': p.grad for name, p in named} | model.state_dict()


def plain_step(model, x):
    loss = model(x).square().sum(1).mean()
    loss.backward()
    return loss


def in_chunks(model, x):
    def encode(model, x):
        return F.normalize(model(x), dim=-1)

    tower = Tower(model, split_batch(x, 2), encode)
    return cached_step([tower], lambda z: NTXentLoss(0.1)(*z.chunk(2)))


def in_slices(model, x):
    def loss_of(x):
        return model(x).square().sum(1).mean()

    slices = split_batch(x, 2)
    return additive_step(slices, loss_of, modules=[model], weights=[1 / len(slices)] * len(slices))


@pytest.mark.parametrize('one_step', [plain_step, in_chunks, in_slices])
@pytest.mark.parametrize('checkpointed', [False, True])
def test_several_steps(one_step, checkpointed):
    model = frozen(Net(checkpointed, dropout=0.3))
    plain = copy.deepcopy(model)
    found = efficient_conv_bn_eval(model)
    # The cache freezes running statistics while it runs a slice again, which a checkpoint misses.
    options = dict(switches=not (checkpointed and one_step is in_chunks))
    assert_same_step(train(model, one_step, **options), train(plain, one_step, **options), 1e-9)
    assert found.fused == PAIRS


def _ddp(rank, world_size, static_graph):
    model = frozen(Net(dropout=0))
    model.blocks[1][0].requires_grad_(False)
    plain = copy.deepcopy(model)
    found = efficient_conv_bn_eval(model)
    shared = slice(rank, None, world_size)
    results = []
    for some in (model, plain):
        reduced = []
        wrapped = DistributedDataParallel(some, static_graph=static_graph, broadcast_buffers=False)
        for parameter in filter(lambda p: p.requires_grad, some.parameters()):
            parameter.register_post_accumulate_grad_hook(reduced.append)
        results.append(train(wrapped, plain_step, shared) | {'hooks': torch.tensor(len(reduced))})
    assert_same_step(*results, 1e-9)
    return found.fused, int(results[0]['hooks'])


@pytest.mark.slow
@pytest.mark.parametrize(('world_size', 'static_graph'), [(2, True), (4, False)])
def test_ddp(world_size, static_graph):
    for fused, hooks in run_ranks(world_size, _ddp, static_graph):
        assert fused == PAIRS
        assert hooks == 4 * (9 - 1)  # each parameter once in each step


def _fsdp(rank, world_size):
    results, fused = [], []
    for on in (True, False):
        torch.manual_seed(0)
        model = frozen(Net(dropout=0))
        if on:
            found = efficient_conv_bn_eval(model)
        mesh = torch.distributed.device_mesh.init_device_mesh('cpu', (world_size,))
        fully_shard(model, mesh=mesh)
        gradients = {}
        for index in range(2):
            loss = plain_step(model, data(index)[rank::world_size])
            gradients[f'loss {index}'] = loss.detach()
        for name, parameter in model.named_parameters():
            gradients[name] = parameter.grad.full_tensor()
        results.append(gradients)
        fused = found.fused
    assert_same_step(*results, 1e-10)
    return fused


@NEEDS_SHARDING
@pytest.mark.slow
def test_fsdp():
    assert run_ranks(2, _fsdp) == [PAIRS] * 2


def offload(model):
    offload_activations(model, 'host', min_bytes=0)


@pytest.mark.parametrize('beside', [[], [recompute_activations], [offload]])
def test_a_checkpointed_layer_behind_an_activation_of_another(beside):
    """In its second run it knows nothing of how its input came about, so in its first neither."""
    layers = (ConvNormAct(4, 4, 3, act_layer=nn.SiLU) for _ in range(4))
    plain = frozen(nn.Sequential(*layers))
    model, x = copy.deepcopy(plain), torch.randn(2, 4, 6, 6, dtype=torch.float64)
    efficient_conv_bn_eval(model)
    for apply in [*beside, partial(checkpoint_activations, modules=['1', '3'])]:
        apply(model)
    for one in (model, plain):
        one(x).square().sum().backward()
    assert_same_step(
        *({name: p.grad for name, p in one.named_parameters()} for one in (model, plain))
    )
