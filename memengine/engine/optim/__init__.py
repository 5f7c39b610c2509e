"""Optimisers, their wrappers and their schedules."""

from timm.optim import Lars

from memengine.engine.optim.constructor import DefaultOptimWrapperConstructor
from memengine.engine.optim.in_backward import OptimizerInBackwardOptimWrapper
from memengine.engine.optim.optim_wrapper import AmpOptimWrapper, OptimWrapper
from memengine.engine.optim.precision import Precision
from memengine.engine.optim.schedulers import CosineWeightDecay
from memengine.engine.optim.sliced import AccumulationOptimWrapper, GradCacheOptimWrapper
from memengine.registry import OPTIMIZERS

OPTIMIZERS.register_module(name='LARS', module=Lars)

__all__ = [
    'AccumulationOptimWrapper',
    'AmpOptimWrapper',
    'CosineWeightDecay',
    'DefaultOptimWrapperConstructor',
    'GradCacheOptimWrapper',
    'OptimWrapper',
    'OptimizerInBackwardOptimWrapper',
    'Precision',
]
