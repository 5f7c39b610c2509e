"""Hooks: what happens around a step."""

from memengine.engine.faults.finite_state import NonFiniteError
from memengine.engine.faults.nonfinite import NonFiniteHook
from memengine.engine.hooks.algorithm import AlgorithmHook
from memengine.engine.hooks.checkpoint import CheckpointHook
from memengine.engine.hooks.collapse import CollapseHook
from memengine.engine.hooks.ema import EMAHook
from memengine.engine.hooks.evaluate_first import EvaluateFirstHook
from memengine.engine.hooks.exactness import ExactnessError, ExactnessHook
from memengine.engine.hooks.memory import MemoryHook
from memengine.engine.hooks.progress import ProgressHook
from memengine.engine.hooks.random_state import RandomStateHook
from memengine.engine.hooks.report import ReportHook
from memengine.engine.hooks.technique import TechniqueHook, register_hooks

_HOOKS_OF_TECHNIQUES = register_hooks()
globals().update(_HOOKS_OF_TECHNIQUES)

__all__ = [
    'AlgorithmHook',
    'CheckpointHook',
    'CollapseHook',
    'EMAHook',
    'EvaluateFirstHook',
    'ExactnessError',
    'ExactnessHook',
    'MemoryHook',
    'NonFiniteError',
    'NonFiniteHook',
    'ProgressHook',
    'RandomStateHook',
    'ReportHook',
    'TechniqueHook',
    *_HOOKS_OF_TECHNIQUES,
]
