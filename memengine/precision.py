"""Where a step leaves the precision that autocast chose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

__all__ = ['at_least_fp32', 'autocast_off']


@contextmanager
def autocast_off(*device_types: str) -> Iterator[None]:
    """Run without autocast on these device types, on return as before.

    For a sum that must not be rounded to half precision, and for a backward pass inside
    somebody's autocast region (autocast belongs around forward passes only).

    Args:
        *device_types: Such as ``'cpu'`` and ``'cuda'``.
    """
    with ExitStack() as stack:
        for device_type in set(device_types):
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def at_least_fp32(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in one common type, which is fp32 or wider.

    Returns:
        The same tensors when nothing is to be cast; gradients come back in the original types.
    """
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)
