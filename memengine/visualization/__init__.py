"""What a training looked like: curves and attention maps."""

from memengine.visualization.attention import (
    NoAttentionError,
    attention_maps,
    save_attention_figure,
)
from memengine.visualization.local_backend import LocalVisBackend
from memengine.visualization.report import write_report

__all__ = [
    'LocalVisBackend',
    'NoAttentionError',
    'attention_maps',
    'save_attention_figure',
    'write_report',
]
