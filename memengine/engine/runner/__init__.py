"""The Runner and its loops: what builds a run from a config, and carries it out."""

from memengine.engine.runner.loops import EpochBasedTrainLoop, IterBasedTrainLoop
from memengine.engine.runner.runner import Runner

__all__ = ['EpochBasedTrainLoop', 'IterBasedTrainLoop', 'Runner']
