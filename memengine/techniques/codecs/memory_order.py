"""A tensor's elements as they lie in memory, the way back to its shape, and their channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from memengine.techniques.codecs.grids import computing_dtype

_LEAST_OF_A_CHANNEL = 8  # elements, beside which its two extremes are little
_MOST_OF_A_PERIOD = 2**30  # elements of all channels once; kernels count them in 32 bits


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


class Channels(NamedTuple):
    """The channels of a tensor, which are its second dimension, and the range of each.

    Attributes:
        extremes: [2, C], lowest and highest values, in the tensor's dtype.
        stride: Elements from one channel to the next, in memory.
    """

    extremes: Tensor
    stride: int

    def low_and_span(self) -> tuple[Tensor, Tensor]:
        """Of each channel, [C] each, in the computing dtype."""
        low, high = self.extremes.to(computing_dtype(self.extremes.dtype))
        return low, high - low

    def shares(self, some: Tensor, start: int) -> Tensor:
        """Where in the ranges of their channels elements lie, from 0 to 1.

        Args:
            some: [n], which lie next to each other in memory.
            start: The place of their first.
        """
        low, span = self.low_and_span_of(some, start)
        # What is below normal numbers has no reciprocal, and is nothing beside a norm's epsilon.
        per_unit = span.reciprocal().masked_fill_(span < torch.finfo(span.dtype).tiny, 0)
        return per_unit.mul_(torch.sub(some, low, out=low))

    def put_back_(self, shares: Tensor, start: int) -> Tensor:
        """The elements that have these shares, in their place."""
        low, span = self.low_and_span_of(shares, start)
        return shares.mul_(span).add_(low)

    def low_and_span_of(self, some: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Of the channel of each element, [n] each."""
        places = torch.arange(start, start + some.numel(), device=some.device)
        channels = places.floor_divide_(self.stride).remainder_(self.extremes.shape[1])
        low, span = self.low_and_span()
        return low.index_select(0, channels), span.index_select(0, channels)


def stride_of_channels(order: MemoryOrder) -> int | None:
    """Elements from one channel to the next; None where ranges of channels are not worth while."""
    if len(order.shape) < 2 or order.stride[1] == 0:
        return None
    number, stride = order.shape[1], order.stride[1]
    is_worth_while = 1 < number <= order.numel // _LEAST_OF_A_CHANNEL
    return stride if is_worth_while and number * stride < _MOST_OF_A_PERIOD else None


def channels_of(tensor: Tensor, stride: int) -> Channels:
    """The channels of a tensor, so many elements of memory apart; two passes over it."""
    tensor = tensor.detach()
    others = [dim for dim in range(tensor.ndim) if dim != 1]
    extremes = tensor.new_empty(2, tensor.shape[1])
    torch.amin(tensor, others, out=extremes[0])
    torch.amax(tensor, others, out=extremes[1])
    return Channels(extremes, stride)
