"""A tensor's elements as they lie in memory, and the way back to its shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class MemoryOrder:
    """How a tensor's shape lies over a run of memory without gaps.

    Args:
        shape: The tensor's.
        stride: Of each dimension, in elements; 0 where it was expanded.
        dtype: The tensor's.
        device: The tensor's.
        numel: Elements in memory: what is expanded counts once.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    numel: int

    def shaped(self, flat: Tensor) -> Tensor:
        """The run of memory `flat`, of any dtype, in the tensor's shape. No copy."""
        return flat.as_strided(self.shape, self.stride)


def in_memory_order(tensor: Tensor) -> tuple[Tensor, MemoryOrder]:
    """The elements in the order in which they lie in memory, each once.

    Args:
        tensor: Of any shape and strides: channels_last, transposed, expanded, a slice.

    Returns:
        A flat view, detached, and the way back. Strides come back as they were, but for tensors
        with gaps or overlaps (slices, unfolded windows): those are copied, and come back dense,
        with their dimensions in the same order.
    """
    once = tensor.detach() if tensor.requires_grad else tensor
    numel = tensor.numel()
    if numel and tensor.is_contiguous():  # as most are, which need no more questions
        order = MemoryOrder(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, numel)
        return once.view(-1), order
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[dim] > 1:
            once = once.narrow(dim, 0, 1)
    if not is_dense(once):
        once = once.clone()
    stride = tuple(
        step if kept == size else 0
        for step, kept, size in zip(once.stride(), once.shape, tensor.shape, strict=True)
    )
    order = MemoryOrder(tensor.shape, stride, tensor.dtype, tensor.device, once.numel())
    return once.as_strided((once.numel(),), (1,)), order


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a run of memory without gaps or overlaps."""
    # Of a dense tensor, and of no other, torch takes over the strides.
    return (
        tensor.is_contiguous()
        or tensor.stride() == torch.empty_like(tensor, device='meta').stride()
    )
