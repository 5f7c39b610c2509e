"""One of two ranks runs out of memory, wherever in a step: both repeat it, and neither waits."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from memengine._torch_private.distributed import FORGETS_SHARDED_STEPS
from memengine.engine.optim import AccumulationOptimWrapper, GradCacheOptimWrapper
from memengine.engine.wrappers import (
    DisCoDistributedDataParallel,
    FullyShardedDataParallel,
    MMDistributedDataParallel,
)
from memengine.models import CLIP, Classifier
from memengine.techniques.slices import out_of_memory
from memengine.testing import run_ranks
from tests.engine.test_sliced import data_of, wrap
from tests.marks import NEEDS_SHARDING
from tests.models.toy import build

BUCKET = dict(bucket_cap_mb=0.004)  # so that there are some, the first of them reduced early


def fail(*args):
    raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.')


class Place:
    """Runs out of memory somewhere in a step whose slices are larger than one.

    Args:
        name: ``'no graph'`` or ``'graph'`` (an encoder's forward), ``'loss'`` (between the two
            exchanges of the loss), ``'backward'`` (of the loss, before its exchange),
            ``'encoder'`` (its backward) or ``'reduction'`` (of DDP's gradients, after the first
            buckets).
    """

    def __init__(self, name, wrapper, wrapped):
        self.name, self.wrapper, self.wrapped, self.failures = name, wrapper, wrapped, 0
        model = wrapped.module
        encoder = (model.towers['image'] if isinstance(model, CLIP) else model).backbone.model
        encoder.blocks[1].register_forward_hook(self.after_encoder)
        if name in ('loss', 'backward'):
            model.loss.register_forward_hook(self.after_loss)
        if name == 'reduction':
            first = encoder.patch_embed.proj.weight
            first.register_hook(lambda _: self.at(wrapped.require_backward_grad_sync and name))

    def at(self, place):
        if place == self.name and self.wrapper.size > 1:
            self.failures += 1
            fail()

    def after_encoder(self, layer, inputs, output):
        self.at('graph' if torch.is_grad_enabled() else 'no graph')
        if output.requires_grad:
            output.register_hook(lambda _: self.at('encoder'))

    def after_loss(self, layer, inputs, output):
        self.at('loss')
        output.register_hook(lambda gradient: self.at('backward'))


def prepared(kind, size, sharding=None):
    model = build(kind)
    if sharding is not None:
        wrapped = FullyShardedDataParallel(model, **sharding)
        settings = dict(accumulative_counts=2, accumulate_coupled=True)
        return wrapped, wrap(model, GradCacheOptimWrapper, chunk_size=size, **settings)
    if kind is CLIP:
        wrapped = DisCoDistributedDataParallel(model, **BUCKET)
        return wrapped, wrap(model, GradCacheOptimWrapper, chunk_size=size)
    wrapped = MMDistributedDataParallel(model, broadcast_buffers=False, **BUCKET)
    return wrapped, wrap(model, AccumulationOptimWrapper, micro_batch_size=size)


def train(wrapped, wrapper, kind, rank, sizes=(None, None, None)):
    torch.manual_seed(rank)
    for step, size in enumerate(sizes):
        wrapper.size = size or wrapper.size
        wrapped.train_step(data_of(kind, 10 * step + rank), wrapper)
    return wrapped.module.state_dict()


def _rank(rank, world_size, kind, places):
    """For each place (failures, size, whether weights are those of the smaller slices' run)."""
    expected = train(*prepared(kind, 1), kind, rank)
    found = []
    for name in places:
        wrapped, wrapper = prepared(kind, 2)
        place = Place(name if rank == 1 else None, wrapper, wrapped)
        actual = train(wrapped, wrapper, kind, rank)
        same = all(torch.equal(actual[key], value) for key, value in expected.items())
        found.append((place.failures, wrapper.size, same))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ('kind', 'places'),
    [
        (CLIP, ['no graph', 'graph', 'loss', 'backward', 'reduction']),
        (Classifier, ['graph', 'reduction']),
    ],
)
@pytest.mark.fault(
    'one rank runs out of memory between two exchanges of a step',
    'all ranks repeat the step in smaller slices',
)
def test_a_rank_that_runs_out_anywhere_is_followed_by_the_other(kind, places):
    first, second = run_ranks(2, _rank, kind, places, timeout_s=1200)
    assert first == [(0, 1, True)] * len(places)
    assert second == [(1, 1, True)] * len(places)


SHARDED_PLACES = [
    ({}, ['no graph', 'encoder']),
    (dict(reduce_once=False, prefetch=False), ['graph', 'backward']),
    (dict(free_after='step'), ['loss']),
]


def train_sharded(place, rank, **sharding):
    """Failures, size and weights; the second of two iterations that accumulate runs out."""
    wrapped, wrapper = prepared(CLIP, 1, sharding)
    limit = Place(place if rank == 1 else None, wrapper, wrapped)
    state = train(wrapped, wrapper, CLIP, rank, sizes=[1, 2 if place else 1])
    whole = [v.full_tensor() if isinstance(v, DTensor) else v for v in state.values()]
    return limit.failures, wrapper.size, whole


def _sharded_rank(rank, world_size):
    found = []
    for sharding, places in SHARDED_PLACES if FORGETS_SHARDED_STEPS else ():
        *_, expected = train_sharded(None, rank, **sharding)
        for name in places:
            failures, size, actual = train_sharded(name, rank, **sharding)
            found.append((failures, size, all(map(torch.equal, actual, expected))))
    out_of_memory.FORGETS_SHARDED_STEPS = False
    try:
        train_sharded('graph', rank)
    except torch.OutOfMemoryError as error:
        return found, str(error)


@NEEDS_SHARDING
@pytest.mark.slow
@pytest.mark.fault(
    'one rank of a sharded model runs out of memory in a step',
    'all ranks repeat the step in smaller slices; before torch 2.14 all end with the error',
)
def test_a_step_that_is_sharded():
    (first, words), (second, others) = run_ranks(2, _sharded_rank, timeout_s=1200)
    count = sum(len(places) for _, places in SHARDED_PLACES) if FORGETS_SHARDED_STEPS else 0
    assert first == [(0, 1, True)] * count
    assert second == [(1, 1, True)] * count
    assert all('cannot repeat a step of a model that FSDP shards' in w for w in (words, others))
