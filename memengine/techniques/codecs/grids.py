"""Numbers as levels of a uniform grid between two bounds: what the quantisers share.

Shapes: `values` and `levels` [..., N]; what belongs to a range [..., 1], broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ['Scratch', 'UniformGrid', 'computing_dtype', 'random_bytes']

_FEW_ULPS = 2**-20  # of float32, with room to spare
_BITS_OF_256 = 0x43800000  # as float32; its last 15 bits are worth less than one


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision in which numbers of `dtype` are put on a grid: float32, or float64."""
    return torch.promote_types(dtype, torch.float32)


def random_bytes(numel: int, generator: torch.Generator) -> Tensor:
    """Uniform uint8, eight of them from each number that is drawn.

    On CPU this takes a quarter of the time of drawing bytes, a sixth of that of floats.
    """
    words = torch.empty(-(-numel // 8), dtype=torch.int64, device=generator.device)
    return words.random_(-(2**63), None, generator=generator).view(torch.uint8)[:numel]


def _noise(like: Tensor, out: Tensor | None, generator: torch.Generator) -> Tensor:
    """Numbers from 256 to below 257 in float32, of which any two are independent.

    Each is made of 15 bits that its row has drawn and 15 that its column has drawn. Sums of errors
    thus vary as if each had been drawn by itself, in a tenth of the time.

    Args:
        like: Of their shape, two dimensions or more.
        out: int32 of this shape; its memory is the result's. None for new memory.
        generator: Draws them.
    """
    rows = like.new_empty((*like.shape[:-1], 1), dtype=torch.int32)
    columns = like.new_empty(like.shape[-1:], dtype=torch.int32)
    rows.random_(0, 2**15, generator=generator)
    columns.random_(_BITS_OF_256, _BITS_OF_256 + 2**15, generator=generator)
    return torch.bitwise_xor(rows, columns, out=out).view(torch.float32)


class Scratch(NamedTuple):
    """Memory in which :meth:`UniformGrid.levels` computes; of its own, in two pieces.

    New memory for each of many parts of a tensor costs a CPU more than the computing.
    """

    steps: Tensor  # in the computing dtype
    noise: Tensor  # int32
    whole: Tensor  # int16, where the noise is
    levels: Tensor  # uint8, where the steps are

    @classmethod
    def like(cls, shape: Sequence[int], values: Tensor) -> Scratch:
        """For values of a shape, of the device and computing dtype of others."""
        pieces = values.new_empty(2, math.prod(shape))

        def seen_as(piece: Tensor, dtype: torch.dtype) -> Tensor:
            return piece.view(dtype)[: piece.numel()].view(shape)

        steps, noise = pieces
        return cls(
            steps.view(shape),
            seen_as(noise, torch.int32),
            seen_as(noise, torch.int16),
            seen_as(steps, torch.uint8),
        )

    def for_rows(self, number: int) -> Scratch:
        """For fewer rows."""
        return self if len(self.steps) == number else Scratch(*(piece[:number] for piece in self))


class UniformGrid(NamedTuple):
    """Levels between two bounds, for each of many ranges; made by :meth:`between`.

    A range with a NaN or an infinity decodes to NaN or infinity throughout. One of huge numbers is
    computed at a quarter of its size, so that it does not overflow; `shrink` is None where it is
    known that there is none.
    """

    low: Tensor
    per_unit: Tensor
    shrink: Tensor | None
    top: int

    @classmethod
    def between(cls, bounds: Tensor, bits: int) -> UniformGrid:
        """``2 ** bits`` levels from the lowest to the highest value of each range.

        Args:
            bounds: [2, ..., 1]. Lowest values, on level 0 exactly, and highest. Where both are
                equal, all values are that one, exactly.
            bits: Of a level.
        """
        top = 2**bits - 1
        dtype = computing_dtype(bounds.dtype)
        numbers = torch.finfo(dtype)
        bounds = bounds.to(dtype)
        low, high = bounds.unbind()
        shrink = None
        if _may_be_huge(bounds):
            huge = torch.maximum(low.neg(), high) > numbers.max / 2
            shrink = torch.ones_like(low).masked_fill_(huge, 0.25)  # exact: a power of two
            low, high = low * shrink, high * shrink
        # No rounding may carry the highest value above the top level, into the neighbour's bits ...
        just_below_top = top * (1 - 2 * numbers.eps)
        per_unit = (high - low).reciprocal_().mul_(just_below_top).clamp_(max=numbers.max)
        return cls(low, per_unit, shrink, top)

    def of_ranges(self, ranges: slice) -> UniformGrid:
        """The grid of some of the ranges."""
        shrink = None if self.shrink is None else self.shrink[ranges]
        return UniformGrid(self.low[ranges], self.per_unit[ranges], shrink, self.top)

    def levels(
        self,
        values: Tensor,
        generator: torch.Generator | None,
        scratch: Scratch | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The level of each value, which must lie within its range.

        Args:
            values: In the computing dtype, or one that it holds.
            generator: For stochastic rounding: of the two levels around a value each is taken with
                the probability that makes the mean the value, to within ``2 ** -16`` of a step.
                Any two values are rounded independently. None rounds to the nearer one.
            scratch: For values of this shape, written to.
            out: uint8 of this shape, written to.

        Returns:
            uint8 of `values`' shape: `out`, or in `scratch`, or new.
        """
        steps = None if scratch is None else scratch.steps
        if self.shrink is None:
            steps = torch.sub(values, self.low, out=steps)
        else:
            steps = torch.mul(values, self.shrink, out=steps).sub_(self.low)
        if generator is None:
            steps.mul_(self.per_unit).add_(0.5)
        else:
            # The 256 in it leaves no trace in a byte. Sums in float32 are rounded to what noise is
            # made of, those in float64 are cut off to it.
            noise = _noise(steps, None if scratch is None else scratch.noise, generator)
            noise = noise if steps.dtype == noise.dtype else noise.double().add_(2**-16)
            torch.addcmul(noise, steps, self.per_unit, out=steps)
        if steps.is_cpu:  # which converts to bytes in half the time by way of 16 bits
            steps = steps.to(torch.int16) if scratch is None else scratch.whole.copy_(steps)
            out = scratch.levels if out is None and scratch is not None else out
        levels = steps.to(torch.uint8) if out is None else out.copy_(steps)
        # What NaN becomes is any byte, which must not reach into its neighbours' bits.
        return levels if self.top == 255 else levels.bitwise_and_(self.top)

    def values(self, levels: Tensor, out: Tensor | None = None) -> Tensor:
        """The value of each level, in the computing dtype.

        Args:
            levels: From :meth:`levels`.
            out: Of `levels`' shape, in the computing dtype, written to.
        """
        step = self.per_unit.reciprocal()
        if self.shrink is not None:  # ... nor the top level above the largest number
            step.mul_(1 - _FEW_ULPS * (self.shrink < 1))
        values = levels.to(step.dtype) if out is None else out.copy_(levels)
        values.mul_(step).add_(self.low)
        return values if self.shrink is None else values.div_(self.shrink)


def _may_be_huge(bounds: Tensor) -> bool:
    """Whether a range may overflow. An accelerator would be waited for, and is not asked."""
    if bounds.device.type != 'cpu' or not bounds.numel():
        return True
    half = torch.finfo(bounds.dtype).max / 2
    lowest, highest = bounds.aminmax()  # NaN where there is one
    return not (highest.item() <= half and lowest.item() >= -half)
