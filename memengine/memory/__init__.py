"""What a step costs in memory; plain torch."""

from memengine.memory.headroom import headroom_bytes
from memengine.memory.meter import SavedBytes, hidden_bytes, saved_bytes
from memengine.memory.process import cuda_peak_mib, peak_rss_mib, rss_mib

__all__ = [
    'SavedBytes',
    'cuda_peak_mib',
    'headroom_bytes',
    'hidden_bytes',
    'peak_rss_mib',
    'rss_mib',
    'saved_bytes',
]
