"""How a saved tensor is kept until backward: a codec gives its code, a code gives it back.

A codec is chosen per operation by what its derivative needs (see ``backward_needs.py``). Codecs
nest: the values that a sparse code keeps may themselves be quantised. A codec leaves
no graph behind, though it is called while gradients are on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from memengine.memory.ledger import tensors_in


class Code(Protocol):
    """A saved tensor in another form. What it holds are its attributes, so that meters see it."""

    def decode(self) -> Tensor:
        """The tensor: its shape, dtype, device and strides; its values as near as the code is.

        Called once for each use in backward; the code stays as it is.
        """


Codec = Callable[[Tensor], Code]


def nbytes_of(code: Code) -> int:
    """Bytes of the tensors that a code holds; those that are made most often say it themselves."""
    nbytes: int | None = getattr(code, 'nbytes', None)
    if nbytes is None:
        nbytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(code))
    return nbytes
