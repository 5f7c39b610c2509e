"""What a training looked like: curves, attention maps, the page of a run."""

from memengine.visualization.attention import (
    NoAttentionError,
    attention_maps,
    save_attention_figure,
)
from memengine.visualization.local_backend import LocalVisBackend
from memengine.visualization.page import write_page
from memengine.visualization.report import write_report

__all__ = [
    'LocalVisBackend',
    'NoAttentionError',
    'attention_maps',
    'save_attention_figure',
    'write_page',
    'write_report',
]
