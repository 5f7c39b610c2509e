"""Activation offload: what autograd saves waits outside the device's memory until backward.

In pinned host memory, copied on a stream of its own, or in a file. Tensors come back shortly
before backward asks for them, in the reverse of the order in which they were saved.

``offload_activations.py`` is the technique, ``moving.py`` what becomes of a saved tensor, and
``stores.py`` where its bytes wait.
"""

from memengine.techniques.activation_offload.moving import is_offloading, offload_tensor
from memengine.techniques.activation_offload.offload_activations import (
    ActivationOffload,
    ActivationOffloadSettings,
    offload_activations,
)

__all__ = [
    'ActivationOffload',
    'ActivationOffloadSettings',
    'is_offloading',
    'offload_activations',
    'offload_tensor',
]
