"""Model wrappers: how a model is spread over processes."""

from memengine.engine.wrappers.ddp import MMDistributedDataParallel
from memengine.engine.wrappers.disco import DisCoDistributedDataParallel

__all__ = ['DisCoDistributedDataParallel', 'MMDistributedDataParallel']
