"""Model wrappers: how a model is spread over processes."""

from memengine.engine.wrappers.ddp import MMDistributedDataParallel

__all__ = ['MMDistributedDataParallel']
