"""What torch keeps private of tensors without memory, which know shape, type and device only."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    unset_fake_temporarily,
)

__all__ = [
    'ASKS_FOR_THE_DEVICE',
    'FAKE_REFUSES',
    'SHAPE_OF_VALUES',
    'READS_A_NUMBER',
    'FakeTensorMode',
    'is_fake',
    'unset_fake_temporarily',
]

FAKE_REFUSES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
"""What fake tensors raise where shape or control flow depends on values."""

SHAPE_OF_VALUES = DynamicOutputShapeException
"""Of these what is raised by an operator whose result is as large as values say: ``unique``."""

READS_A_NUMBER = torch.ops.aten._local_scalar_dense.default
"""The operator under ``tensor.item()``."""


ASKS_FOR_THE_DEVICE = torch.ops.prim.device.default
"""The operator under ``tensor.device``, which modes see of tensors such as fake ones."""


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no memory behind it."""
    return isinstance(tensor, FakeTensor)
