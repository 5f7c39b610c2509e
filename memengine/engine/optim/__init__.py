"""Optimisers, their wrappers and their schedules."""

from timm.optim import Lars

from memengine.engine.optim.constructor import DefaultOptimWrapperConstructor
from memengine.engine.optim.in_backward import OptimizerInBackwardOptimWrapper
from memengine.engine.optim.optim_wrapper import AmpOptimWrapper, OptimWrapper, Precision
from memengine.engine.optim.schedulers import CosineWeightDecay
from memengine.engine.optim.sliced import AccumulationOptimWrapper, GradCacheOptimWrapper
from memengine.engine.optim.torchao_optimizers import AdamW4bit, AdamW8bit, CPUOffloadOptimizer
from memengine.registry import OPTIMIZERS
from memengine.techniques.optimizer.adamw_bf16 import AdamWBf16

OPTIMIZERS.register_module(name='LARS', module=Lars)
OPTIMIZERS.register_module(module=AdamWBf16)

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
