"""What is done with a model after its training: it is measured, and written to files.

Each is a loop of MMEngine's kind, built with the runner and run by a command of its own:
``memengine probe``, ``embed``, ``zeroshot``, ``retrieve``, ``look`` and
``export``.
"""

from memengine.evaluation.after_training.embed import EmbedLoop
from memengine.evaluation.after_training.export import ExportLoop
from memengine.evaluation.after_training.look import LookLoop
from memengine.evaluation.after_training.probe import ProbeLoop
from memengine.evaluation.after_training.retrieve import RetrieveLoop
from memengine.evaluation.after_training.zeroshot import ZeroShotLoop

__all__ = ['EmbedLoop', 'ExportLoop', 'LookLoop', 'ProbeLoop', 'RetrieveLoop', 'ZeroShotLoop']
