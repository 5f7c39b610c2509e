"""Adapters between MMEngine and the techniques: runner, loops, step, wrappers, hooks."""

from memengine.engine.loops import EpochBasedTrainLoop, IterBasedTrainLoop
from memengine.engine.runner import Runner
from memengine.engine.step import Progress, run_step

__all__ = ['EpochBasedTrainLoop', 'IterBasedTrainLoop', 'Progress', 'Runner', 'run_step']
