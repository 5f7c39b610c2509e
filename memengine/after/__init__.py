"""What is done with a model after its training: its features are measured, and written to files.

Each is a loop of MMEngine's kind, built with the runner and run by a command of its own:
``memengine probe`` and ``memengine embed``.
"""

from memengine.after.embed import EmbedLoop
from memengine.after.probe import ProbeLoop

__all__ = ['EmbedLoop', 'ProbeLoop']
