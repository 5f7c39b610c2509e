"""What a step costs in memory; plain torch."""

from memengine.memory.headroom import headroom_bytes, room_bytes
from memengine.memory.measuring import Measured, map_blocks_singly, measure, write_snapshot
from memengine.memory.meter import SavedBytes, hidden_bytes, saved_bytes
from memengine.memory.prediction import Prediction, UnpredictableError, predict
from memengine.memory.process import cuda_figures, cuda_peak_mib, held_bytes, peak_rss_mib, rss_mib
from memengine.memory.timeline import LiveTensor, Timeline, timeline
from memengine.memory.training_step import TrainingStep

__all__ = [
    'LiveTensor',
    'Measured',
    'UnpredictableError',
    'Prediction',
    'SavedBytes',
    'Timeline',
    'TrainingStep',
    'cuda_figures',
    'cuda_peak_mib',
    'headroom_bytes',
    'held_bytes',
    'hidden_bytes',
    'map_blocks_singly',
    'measure',
    'peak_rss_mib',
    'predict',
    'room_bytes',
    'rss_mib',
    'saved_bytes',
    'timeline',
    'write_snapshot',
]
