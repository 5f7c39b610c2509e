"""Optimisers, their wrappers and their schedules."""

from memengine.engine.optim.constructor import DefaultOptimWrapperConstructor
from memengine.engine.optim.in_backward_wrapper import OptimizerInBackwardOptimWrapper
from memengine.engine.optim.optim_wrapper import AmpOptimWrapper, OptimWrapper, Precision
from memengine.engine.optim.optimizers import AdamW4bit, AdamW8bit, AdamWBf16, CPUOffloadOptimizer
from memengine.engine.optim.schedulers import CosineWeightDecay
from memengine.engine.optim.sliced import AccumulationOptimWrapper, GradCacheOptimWrapper

__all__ = [
    'AccumulationOptimWrapper',
    'AdamW4bit',
    'AdamW8bit',
    'AdamWBf16',
    'AmpOptimWrapper',
    'CPUOffloadOptimizer',
    'CosineWeightDecay',
    'DefaultOptimWrapperConstructor',
    'GradCacheOptimWrapper',
    'OptimWrapper',
    'OptimizerInBackwardOptimWrapper',
    'Precision',
]
