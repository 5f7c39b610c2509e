"""What is done with a model after its training: its features are measured, and written to files.

Each is a loop of MMEngine's kind, built with the runner and run by a command of its own:
``memengine probe`` and ``memengine embed``.
"""

from memengine.evaluation.after_training.embed import EmbedLoop
from memengine.evaluation.after_training.probe import ProbeLoop

__all__ = ['EmbedLoop', 'ProbeLoop']
