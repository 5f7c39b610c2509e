"""Model wrappers: how a model is spread over processes."""

from memengine.engine.wrappers.ddp import MMDistributedDataParallel
from memengine.engine.wrappers.disco import DisCoDistributedDataParallel
from memengine.engine.wrappers.fsdp import FullyShardedDataParallel, MMFullyShardedDataParallel

__all__ = [
    'DisCoDistributedDataParallel',
    'FullyShardedDataParallel',
    'MMDistributedDataParallel',
    'MMFullyShardedDataParallel',
]
