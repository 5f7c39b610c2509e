"""Numbers as levels of a uniform grid between two bounds: what the quantisers share.

Shapes: `values` and `levels` [..., N]; what belongs to a range [..., 1], broadcast.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ['UniformGrid', 'computing_dtype', 'random_bytes']

_FEW_ULPS = 2**-20  # of float32, with room to spare


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision in which numbers of `dtype` are put on a grid: float32, or float64."""
    return torch.promote_types(dtype, torch.float32)


def random_bytes(numel: int, generator: torch.Generator) -> Tensor:
    """Uniform uint8, eight of them from each number that is drawn.

    On CPU this takes a quarter of the time of drawing bytes, a sixth of that of floats.
    """
    words = torch.empty(-(-numel // 8), dtype=torch.int64, device=generator.device)
    return words.random_(-(2**63), None, generator=generator).view(torch.uint8)[:numel]


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
    def between(cls, lows: Tensor, highs: Tensor, bits: int) -> UniformGrid:
        """``2 ** bits`` levels from `lows` to `highs`.

        Args:
            lows: Lowest values, on level 0 exactly.
            highs: Highest values. Where ``low == high``, all values are that one, exactly.
            bits: Of a level.
        """
        top = 2**bits - 1
        dtype = computing_dtype(lows.dtype)
        numbers = torch.finfo(dtype)
        low, high = lows.to(dtype), highs.to(dtype)
        shrink = None
        if _may_be_huge(low, high):
            huge = torch.maximum(low.neg(), high) > numbers.max / 2
            shrink = torch.ones_like(low).masked_fill_(huge, 0.25)  # exact: a power of two
            low, high = low * shrink, high * shrink
        span = high - low
        per_unit = (top / span).clamp_(max=numbers.max)
        # No rounding may carry the highest value above the top level, into the neighbour's bits ...
        too_many = span * per_unit > top
        per_unit = torch.where(too_many, per_unit.nextafter(torch.zeros_like(span)), per_unit)
        return cls(low, per_unit, shrink, top)

    def of_ranges(self, ranges: slice) -> UniformGrid:
        """The grid of some of the ranges."""
        shrink = None if self.shrink is None else self.shrink[ranges]
        return UniformGrid(self.low[ranges], self.per_unit[ranges], shrink, self.top)

    def levels(self, values: Tensor, generator: torch.Generator | None) -> Tensor:
        """The level of each value, which must lie within its range.

        Args:
            values: In the computing dtype.
            generator: For stochastic rounding: of the two levels around a value each is taken with
                the probability that makes the mean the value, to within ``2 ** -16`` of a step.
                None rounds to the nearer one.

        Returns:
            uint8 of `values`' shape.
        """
        if self.shrink is None:
            steps = torch.sub(values, self.low)
        else:
            steps = torch.mul(values, self.shrink).sub_(self.low)
        steps.mul_(self.per_unit)
        on_cpu = steps.device.type == 'cpu'
        if generator is None:
            steps.add_(0.5)
        else:
            # 16 random bits: eight for each value, and below them eight that a row shares.
            rows = values.shape[:-1].numel()
            noise = random_bytes(values.numel() + rows, generator)
            own = noise[rows:].view(values.shape)
            steps.add_(own.to(steps.dtype) if on_cpu else own, alpha=2**-8)
            steps.add_(noise[:rows].view(*values.shape[:-1], 1) * 2**-16)
        # To bytes a CPU converts in a third of the time by way of 16 bits.
        levels = (steps.to(torch.int16) if on_cpu else steps).to(torch.uint8)
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
        values = torch.mul(levels, step, out=out).add_(self.low)
        return values if self.shrink is None else values.div_(self.shrink)


def _may_be_huge(low: Tensor, high: Tensor) -> bool:
    """Whether a range may overflow. An accelerator would be waited for, and is not asked."""
    if low.device.type != 'cpu' or not low.numel():
        return True
    half = torch.finfo(low.dtype).max / 2
    return not (float(high.max()) <= half and float(low.min()) >= -half)
