"""Checkpointing, offload and compiled blocks with steps in slices, DDP and FSDP."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from memengine.techniques.activation_checkpointing.checkpoint_activations import (
    checkpoint_activations,
)
from memengine.techniques.activation_offload import offload_activations
from memengine.techniques.compiling import compile_blocks
from memengine.techniques.slices.accumulation_within_iteration import additive_step
from memengine.techniques.slices.grad_cache import Tower, cached_step
from memengine.techniques.slices.slicing import split_batch
from memengine.testing import assert_same_step, run_ranks
from tests.marks import NEEDS_SHARDING
from tests.techniques.activation_checkpointing.test_checkpoint_activations import make, resnet, vit

FSDP = pytest.param('fsdp', marks=NEEDS_SHARDING)
WAYS = {
    'all': lambda model: checkpoint_activations(model),
    'selective': lambda model: checkpoint_activations(model, keep=['matmuls', 'attention']),
    'budget': lambda model: checkpoint_activations(model, budget=0.4),
    'offload': lambda model: offload_activations(model, 'host', min_bytes=64),
    'both': lambda model: (
        checkpoint_activations(model),
        offload_activations(model, 'disk', min_bytes=64),
    ),
    'compiled': lambda model: compile_blocks(model, backend='aot_eager'),
}
EAGER = [way for way in WAYS if way != 'compiled']


def state(model):
    gradients = {f'gradient of {name}': p.grad for name, p in model.named_parameters()}
    return {**gradients, **{name: value.clone() for name, value in model.state_dict().items()}}


def coupled(embeddings):
    return torch.logsumexp(embeddings @ embeddings.t(), dim=1).mean()


@pytest.mark.parametrize('options', [{}, dict(keep='matmuls'), dict(budget=0.5)])
def test_a_tensor_that_is_given_three_times_is_one_when_moved_and_repeated(options):
    """By which attention knows that it is self-attention."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
    plain, x = copy.deepcopy(model), torch.randn(3, 5, 8, dtype=torch.float64)
    checkpoint_activations(model, ['layers.*.self_attn'], **options)
    offload_activations(model, 'host', min_bytes=64)
    for each in (model, plain):
        for _ in range(2):
            each(x).square().sum().backward()
    assert_same_step(state(model), state(plain), tolerance=1e-12)


@pytest.mark.parametrize('reentrant', [False, True])
@pytest.mark.parametrize('options', [{}, dict(keep='matmuls'), dict(budget=0.5)])
def test_within_a_checkpoint_of_the_models_own(options, reentrant):
    """Such as `gradient_checkpointing_enable()` puts around each block."""
    model = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))
    plain = copy.deepcopy(model.double())
    checkpoint_activations(model, ['0', '1', '2'], **options)
    x = torch.randn(6, 8).double().requires_grad_()
    for blocks in (model, plain):
        for _ in range(2):  # what a budget lets them keep is known in the second
            y = x
            for block in blocks:
                y = checkpoint(block, y, use_reentrant=reentrant)
            y.square().sum().backward()
    assert_same_step(state(model), state(plain))


@pytest.mark.parametrize('name', ['vit', 'resnet'])
@pytest.mark.parametrize('way', EAGER)
def test_gradient_cache(way, name):
    """With dropout and BatchNorm: against the same slices without checkpointing."""
    results = []
    for wrapped in (True, False):
        model = make(name)
        if wrapped:
            WAYS[way](model)
        for seed in range(2):
            torch.manual_seed(seed)
            images = torch.randn(6, 3, 32, 32).double()
            cached_step([Tower(model, split_batch(images, 2))], coupled, keep_graph=1)
        results.append(state(model))
    assert_same_step(*results)


@pytest.mark.parametrize('way', EAGER)
def test_additive_slices(way):
    results = []
    for wrapped in (True, False):
        model = make('vit')
        if wrapped:
            WAYS[way](model)
        torch.manual_seed(0)
        images = torch.randn(6, 3, 32, 32).double()
        additive_step(split_batch(images, 2), lambda x, m=model: m(x).square().sum())
        results.append(state(model))
    assert_same_step(*results)


# ------------------------------------------------------------------ several ranks


def batches():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(3, 8, 3, 32, 32, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 4, (3, 8), generator=generator)
    return zip(images, labels, strict=True)


def network(name):
    torch.manual_seed(0)
    return (vit(depth=2) if name == 'vit' else resnet()).double().eval()


def steps(model, part):
    """Three steps of AdamW on a part of the batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for images, labels in batches():
        optimizer.zero_grad()
        cross_entropy(model(images[part]), labels[part]).backward()
        optimizer.step()


def _rank(rank, world_size, way, kind, name):
    torch._dynamo.config.suppress_errors = False
    model = network(name)
    part = slice(rank, None, world_size)
    if kind in ('fsdp', 'fsdp of layers'):
        layers = [each for each in model.modules() if list(each.parameters(recurse=False))]
        for unit in model.blocks if kind == 'fsdp' else layers:
            fully_shard(unit)
        fully_shard(model)
        WAYS[way](model)
        steps(model, part)
        return {
            key: value.full_tensor() if isinstance(value, DTensor) else value
            for key, value in model.state_dict().items()
        }
    wrapped = DistributedDataParallel(model, static_graph=kind == 'static')
    WAYS[way](model)
    steps(wrapped, part)
    return model.state_dict()


@pytest.mark.parametrize('kind', ['ddp', 'static', FSDP])
@pytest.mark.parametrize('way', ['all', 'selective', 'budget', 'both'])
def test_two_ranks_follow_one(way, kind):
    expected = network('vit')
    steps(expected, slice(None))
    for state_dict in run_ranks(2, _rank, way, kind, 'vit'):
        assert_same_step(state_dict, expected.state_dict())


@NEEDS_SHARDING
@pytest.mark.parametrize('way', ['selective', 'budget'])
def test_layers_may_be_gathered_by_themselves_within_what_is_checkpointed(way):
    """In forward and when it is repeated, each time by other calls of operators."""
    expected = network('resnet')
    steps(expected, slice(None))
    for state_dict in run_ranks(2, _rank, way, 'fsdp of layers', 'resnet'):
        assert_same_step(state_dict, expected.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['ddp', FSDP])
@pytest.mark.parametrize('way', ['all', 'compiled'])
def test_four_ranks_follow_one(way, kind):
    expected = network('vit')
    steps(expected, slice(None))
    for state_dict in run_ranks(4, _rank, way, kind, 'vit'):
        assert_same_step(state_dict, expected.state_dict())


def _statistics(rank, world_size):
    model = resnet().double()
    checkpoint_activations(model)
    wrapped = DistributedDataParallel(model)
    for images, labels in batches():
        cross_entropy(wrapped(images), labels).backward()
    assert dist.get_world_size() == world_size
    return model.bn1.num_batches_tracked, model.layer1[0].bn1.num_batches_tracked


def test_statistics_count_once_under_ddp():
    for counts in run_ranks(2, _statistics):
        assert counts == (3, 3)


def test_a_copy_for_an_average_is_independent():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    checkpoint_activations(model, '0')
    average = copy.deepcopy(model)
    with torch.no_grad():
        model[0].weight.zero_()
    assert average(torch.ones(1, 4)).abs().sum() > 0
    assert average[0].forward.module is average[0]
