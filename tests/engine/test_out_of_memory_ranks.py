"""One of two ranks runs out of memory, wherever in a step: both repeat it, and neither waits."""

import pytest
import torch

from memengine.engine.optim import AccumulationOptimWrapper, GradCacheOptimWrapper
from memengine.engine.step import run_step
from memengine.engine.wrappers import DisCoDistributedDataParallel, MMDistributedDataParallel
from memengine.models import CLIP, Classifier
from memengine.testing import run_ranks
from tests.engine.test_sliced import data_of, wrap
from tests.models.toy import build

BUCKET = dict(bucket_cap_mb=0.004)  # so that there are some, the first of them reduced early


def fail(*args):
    raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.')


class Place:
    """Runs out of memory somewhere in a step whose slices are larger than one.

    Args:
        name: ``'no graph'`` or ``'graph'`` (an encoder's forward), ``'loss'`` (between the two
            exchanges of the loss), ``'backward'`` (of the loss, before its exchange),
            ``'reduction'`` (of gradients, after the first buckets) or ``'collective'``.
    """

    def __init__(self, name, wrapper, wrapped):
        self.name, self.wrapper, self.wrapped, self.failures = name, wrapper, wrapped, 0
        model = wrapped.module
        encoder = (model.towers['image'] if isinstance(model, CLIP) else model).backbone.model
        encoder.blocks[1].register_forward_hook(self.after_encoder)
        if name in ('loss', 'backward'):
            model.loss.register_forward_hook(self.after_loss)
        first = encoder.patch_embed.proj.weight
        first.register_hook(
            lambda gradient: self.at(wrapped.require_backward_grad_sync and 'reduction')
        )

    def at(self, place):
        if place == self.name and self.wrapper.size > 1:
            self.failures += 1
            fail()

    def after_encoder(self, layer, inputs, output):
        self.at('graph' if torch.is_grad_enabled() else 'no graph')

    def before_its_gradient(self, gradient):
        if self.wrapped.require_backward_grad_sync:
            self.at('reduction')

    def after_loss(self, layer, inputs, output):
        self.at('loss')
        output.register_hook(lambda gradient: self.at('backward'))


def prepared(kind, size):
    model = build(kind)
    if kind is CLIP:
        wrapped = DisCoDistributedDataParallel(model, **BUCKET)
        return wrapped, wrap(model, GradCacheOptimWrapper, chunk_size=size)
    wrapped = MMDistributedDataParallel(model, broadcast_buffers=False, **BUCKET)
    return wrapped, wrap(model, AccumulationOptimWrapper, micro_batch_size=size)


def train(wrapped, wrapper, kind, rank):
    torch.manual_seed(rank)
    for step in range(3):
        run_step(wrapped, data_of(kind, 10 * step + rank), wrapper)
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
