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
    computed at a quarter of its size, so that it does not overflow.
    """

    low: Tensor
    shrink: Tensor
    per_unit: Tensor
    step: Tensor
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
        largest = torch.finfo(dtype).max
        low, high = lows.to(dtype), highs.to(dtype)
        huge = torch.maximum(low.abs(), high.abs()) > largest / 2
        shrink = torch.ones_like(low).masked_fill_(huge, 0.25)  # exact: a power of two
        low = low * shrink
        span = high * shrink - low
        per_unit = (top / span).clamp_(max=largest)
        # No rounding may carry the highest value above the top level, into the neighbour's bits ...
        too_many = span * per_unit > top
        per_unit = torch.where(too_many, per_unit.nextafter(torch.zeros_like(span)), per_unit)
        # ... nor the top level above the largest number.
        step = per_unit.reciprocal().mul_(1 - _FEW_ULPS * huge)
        return cls(low, shrink, per_unit, step, top)

    def of_ranges(self, ranges: slice) -> UniformGrid:
        """The grid of some of the ranges."""
        low, shrink, per_unit, step = (tensor[ranges] for tensor in self[:-1])
        return UniformGrid(low, shrink, per_unit, step, self.top)

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
        steps = torch.mul(values, self.shrink).sub_(self.low).mul_(self.per_unit)
        if generator is None:
            steps.add_(0.5)
        else:
            # 16 random bits: eight for each value, and below them eight that a row shares.
            rows = values.shape[:-1].numel()
            noise = random_bytes(values.numel() + rows, generator)
            steps.add_(noise[rows:].view(values.shape), alpha=2**-8)
            steps.add_(noise[:rows].view(*values.shape[:-1], 1) * 2**-16)
        # What NaN becomes is any byte, which must not reach into its neighbours' bits.
        return steps.to(torch.uint8).bitwise_and_(self.top)

    def values(self, levels: Tensor, out: Tensor | None = None) -> Tensor:
        """The value of each level, in the computing dtype.

        Args:
            levels: From :meth:`levels`.
            out: Of `levels`' shape, in the computing dtype, written to.
        """
        return torch.mul(levels, self.step, out=out).add_(self.low).div_(self.shrink)
