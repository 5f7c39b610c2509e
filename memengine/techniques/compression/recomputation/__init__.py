"""How a saved tensor is computed again: of which operations (``operations.py``), and from what."""

from memengine.techniques.compression.recomputation.operations import (
    is_recomputable,
    recomputation_of,
)
from memengine.techniques.compression.recomputation.recomputation import (
    Ask,
    Compute,
    ComputedAgain,
    ComputedMemory,
    Derivation,
    FindSource,
    Recomputation,
    RecomputedCode,
    Source,
    Whole,
)

__all__ = [
    'Ask',
    'Compute',
    'ComputedAgain',
    'ComputedMemory',
    'Derivation',
    'FindSource',
    'Recomputation',
    'RecomputedCode',
    'Source',
    'Whole',
    'is_recomputable',
    'recomputation_of',
]
