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
    'is_recomputable',
    'recomputation_of',
]
