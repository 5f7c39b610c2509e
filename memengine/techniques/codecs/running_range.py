"""Saved tensors in 8 bits, on ranges that follow the tensors of earlier steps.

Shapes: B what is before the groups' dimension, G groups, N elements of a group in one of B.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from memengine.techniques.codecs.grids import UniformGrid, computing_dtype
from memengine.techniques.codecs.quantized import check_floating_point
from memengine.techniques.modules.private_random import private_generator

_BITS = 8
_PART_NUMEL = 2**19  # of elements that are computed at once, of float64 half
_DECAY = 0.9  # how much of the running extremes each tensor leaves
running_ranges: WeakSet[RunningRangeQuantizer] = WeakSet()
"""All that are in use, for a step that is undone."""


@dataclass(frozen=True)
class RunningRangeCode:
    """A tensor as levels between the bounds of its groups.

    Args:
        levels: uint8 [B, G, N].
        bounds: [2, G], lowest and highest values.
        shape: The tensor's.
        stride: The tensor's, if it was dense.
        dtype: The tensor's.
    """

    levels: Tensor
    bounds: Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @torch.no_grad()
    def decode(self) -> Tensor:
        """The tensor, a new one each time."""
        grid = UniformGrid.between(self.bounds[..., None], _BITS)
        decoded = torch.empty_strided(
            self.shape, self.stride, dtype=self.dtype, device=self.levels.device
        )
        for levels, part in _parts(self.levels, decoded):
            part.copy_(grid.values(levels).view(part.shape))
        return decoded


def _parts(levels: Tensor, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Levels [B, G, N] and the tensor that they are of, some at a time, of all groups each."""
    first = tensor.shape[0] if tensor.ndim else 1
    before = len(levels) // first if first else 0
    most = _PART_NUMEL // max(1, tensor.itemsize // 4)
    if levels.numel() <= most:
        yield levels, tensor
    elif len(levels) % first:  # the groups' dimension comes first, or has been passed
        dim = 1 if levels.shape[1] == first else 0
        if dim == tensor.ndim:
            yield levels, tensor
            return
        inner = levels.shape[2] // tensor.shape[dim]
        some = max(1, most // (levels.shape[1] * inner))
        yield from zip(levels.split(some * inner, dim=2), tensor.split(some, dim), strict=True)
    elif levels.numel() // first > most:
        for part, row in zip(levels.split(before), tensor, strict=True):
            yield from _parts(part, row)
    else:
        rows = most // (levels.numel() // first)
        yield from zip(levels.split(rows * before), tensor.split(rows), strict=True)


class RunningRangeQuantizer:
    """Codec: one range for each head or channel, averaged over the steps. It clips, so is biased.

    Each tensor's extremes enter the running ones before it is put on their grid; the first sets
    them. What lies outside is clipped to the range, and no rounding makes up for that:
    the mean of ``decode()`` is the clipped tensor. :class:`Quantizer` is unbiased.

    One instance serves one place of use, as in ``quantizers[layer]``: what it saw there is its
    state.

    Args:
        dim: The dimension whose indices are the groups: 1 for heads of [batch, heads, tokens,
            width].

    Attributes:
        bounds: The running extremes, [2, G] in float32 (float64 for such tensors); None before the
            first tensor, NaN for groups that have not been finite yet.

    Raises:
        ValueError: When called with a tensor that lacks the dimension, or has other groups than
            before.
        TypeError: When called with a tensor of integers, booleans or complex numbers.

    Bytes: one for each element, and ``8 * G``. While it runs, 10 to 14 for each element of a part
    of half a million.

    A group that holds a NaN or an infinity comes back as such throughout, and leaves the running
    extremes alone, so a step that a GradScaler skips does no harm. Shape, dtype, device and strides
    come back; what was expanded or had gaps comes back dense.

    Random state: noise comes from :func:`private_generator`. AMP: any floating-point dtype. DDP:
    each rank keeps its own ranges. A forward pass that is computed again counts as one more tensor.

    Source: Pan et al., Mesa: A Memory-saving Training Framework for Transformers (2021).
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> RunningRangeQuantizer:
        """One more, also when it is copied or unpickled."""
        one = super().__new__(cls)
        running_ranges.add(one)
        return one

    def __init__(self, dim: int = 1) -> None:
        self.dim = dim
        self.bounds: Tensor | None = None

    @torch.no_grad()
    def __call__(self, tensor: Tensor) -> RunningRangeCode:
        """The tensor in few bits, on ranges that it has moved."""
        check_floating_point(tensor)
        if not -tensor.ndim <= self.dim < tensor.ndim:
            raise ValueError(
                f'dim={self.dim} is no dimension of a tensor of shape {tuple(tensor.shape)}'
            )
        dim = self.dim % tensor.ndim
        grouped = prod(tensor.shape[:dim]), tensor.shape[dim], prod(tensor.shape[dim + 1 :])
        levels = torch.empty(grouped, dtype=torch.uint8, device=tensor.device)

        def parts() -> Iterator[tuple[Tensor, Tensor]]:
            for rows, part in _parts(levels, tensor.detach()):
                yield rows, part.to(computing_dtype(tensor.dtype)).reshape(rows.shape)

        bounds = self._moved_bounds(_extremes(parts()), grouped[1])
        ranges = bounds[..., None]  # [2, G, 1]
        low, high = ranges
        grid = UniformGrid.between(ranges, _BITS)
        generator = private_generator(tensor.device)
        for rows, values in parts():
            clipped = torch.maximum(values, low)  # these two take a third of clamp's time on CPU
            torch.minimum(clipped, high, out=clipped)
            rows.copy_(grid.levels(clipped, generator))
        stride = torch.empty_like(tensor, device='meta').stride()
        return RunningRangeCode(levels, bounds, tensor.shape, stride, tensor.dtype)

    def _moved_bounds(self, seen: Tensor, groups: int) -> Tensor:
        """The bounds for a tensor of these extremes; the running ones move where all is finite."""
        if self.bounds is not None and self.bounds.shape[1] != groups:
            raise ValueError(
                f'this RunningRangeQuantizer has ranges of {self.bounds.shape[1]} groups, got a '
                f'tensor with {groups}: use one instance for each place'
            )
        if not seen.numel():
            return seen.new_zeros(2, groups)
        finite = seen.isfinite().all(0)
        bounds = torch.full_like(seen, torch.nan) if self.bounds is None else self.bounds.to(seen)
        moved = torch.where(bounds.isnan(), seen, bounds.lerp(seen, 1 - _DECAY))
        self.bounds = torch.where(finite, moved, bounds)
        return torch.where(finite, moved, torch.nan)


def _extremes(parts: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Lowest and highest of each group over all parts, [2, G]; empty where there is nothing."""
    found = []
    for _, values in parts:
        if not values.numel():
            return values.new_empty(0)
        found.append(torch.stack([values.amin((0, 2)), values.amax((0, 2))]))
    lows, highs = torch.stack(found, dim=1)  # [parts, G]
    return torch.stack([lows.amin(0), highs.amax(0)])
