"""The step inside backward on sharded models: the steps of the plain wrapper."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from memengine.engine.optim import OptimizerInBackwardOptimWrapper, OptimWrapper
from memengine.engine.wrappers import FullyShardedDataParallel
from memengine.models import CLIP, Classifier
from memengine.testing import assert_same_step, run_ranks
from tests.engine.test_sliced import big_batch, model_and_batch, share
from tests.marks import NEEDS_SHARDING

KINDS = [Classifier, 'DINO', CLIP]
WAYS = [OptimWrapper, OptimizerInBackwardOptimWrapper]


def _rank(rank, world_size):
    """Parameters after steps with whole gradients, and with each inside backward."""
    return {kind: [_train(kind, rank, world_size, way) for way in WAYS] for kind in KINDS}


def _train(kind, rank, world_size, way):
    model, _ = model_and_batch(kind)
    wrapped = FullyShardedDataParallel(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, weight_decay=0.1)  # sees a wrong factor
    optimizer.register_step_pre_hook(lambda *_: model.before_update())
    optimizer.register_step_post_hook(lambda *_: model.after_update())
    wrapper = way(optimizer, clip_grad=dict(type='each_norm', max_norm=0.5))
    for seed in range(3):
        wrapped.train_step(share(big_batch(kind, seed), rank, world_size), wrapper)
        assert all(p.grad is None for p in trained)
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for name, p in model.named_parameters()
    }


@NEEDS_SHARDING
@pytest.mark.slow
@pytest.mark.parametrize('world_size', [2, 4])
def test_a_sharded_run_is_that_of_the_plain_wrapper(world_size):
    for results in run_ranks(world_size, _rank):
        for expected, actual in results.values():
            assert_same_step(actual, expected)
