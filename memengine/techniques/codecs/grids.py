"""Numbers as levels of a uniform grid between two bounds: what the quantisers share.

Shapes: `values` and `levels` [..., N]; what belongs to a range [..., 1], broadcast.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

# At a time, which stay in its cache with what is computed of them.
_CODED_AT_ONCE_ON_CPU, _DECODED_AT_ONCE_ON_CPU = 2**16, 2**18
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


def noise_bits(number: int, generator: torch.Generator) -> Tensor:
    """So many times 15 bits, int32."""
    bits = torch.empty(number, dtype=torch.int32, device=generator.device)
    return bits.random_(0, 2**15, generator=generator)


def _of_rows_and_columns(values: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """What makes noise for values: for each row, [..., 1], and for each column, [N], int32.

    Each number of noise is made of 15 bits that its row has drawn and 15 that its column has drawn,
    so any two are independent. Sums of errors thus vary as if each had been drawn by itself, in a
    tenth of the time.
    """
    length = values.shape[-1]
    bits = noise_bits(values[..., 0].numel() + length, generator)
    return bits[:-length].view(*values.shape[:-1], 1), bits[-length:] + _BITS_OF_256


class _Scratch(NamedTuple):
    """Memory in which levels are computed, in two pieces; all None for new memory.

    New memory for each of many blocks of a tensor costs a CPU more than the computing.
    """

    steps: Tensor | None = None  # in the computing dtype
    noise: Tensor | None = None  # int32
    whole: Tensor | None = None  # int16, where the noise is

    @classmethod
    def of_rows(cls, number: int, length: int, like: Tensor) -> _Scratch:
        """For rows of a length, of the device and dtype of another tensor."""
        steps, noise = like.new_empty(2, number * length)
        pieces = steps, noise.view(torch.int32), noise.view(torch.int16)
        return cls(*(piece[: number * length].view(number, length) for piece in pieces))

    def for_rows(self, number: int) -> _Scratch:
        """For fewer rows."""
        if self.steps is None or len(self.steps) == number:
            return self
        return _Scratch(*(piece[:number] for piece in self if piece is not None))


_NO_SCRATCH = _Scratch()


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
        self, values: Tensor, generator: torch.Generator | None, out: Tensor | None = None
    ) -> Tensor:
        """The level of each value, which must lie within its range.

        Args:
            values: In the computing dtype, or one that it holds.
            generator: For stochastic rounding: of the two levels around a value each is taken with
                the probability that makes the mean the value, to within ``2 ** -16`` of a step.
                Any two values are rounded independently. None rounds to the nearer one.
            out: uint8 of this shape, written to.

        Returns:
            uint8 of `values`' shape: `out`, or new.
        """
        rows = columns = None
        if generator is not None:
            rows, columns = _of_rows_and_columns(values, generator)
        number = self._rows_at_once(values, _CODED_AT_ONCE_ON_CPU)
        if number is None:
            return self._levels_of_block(values, rows, columns, out)
        out = values.new_empty(values.shape, dtype=torch.uint8) if out is None else out
        scratch = _Scratch.of_rows(number, values.shape[-1], self.low)
        every = self.low, self.per_unit, self.shrink, values, rows, out
        for low, per_unit, shrink, some, bits, levels in _blocks(number, *every):
            block = UniformGrid(low, per_unit, shrink, self.top)
            block._levels_of_block(some, bits, columns, levels, scratch.for_rows(len(some)))
        return out

    def values(self, levels: Tensor, out: Tensor | None = None) -> Tensor:
        """The value of each level, in the computing dtype.

        Args:
            levels: From :meth:`levels`.
            out: Of `levels`' shape, in the computing dtype, written to.
        """
        step = self.per_unit.reciprocal()
        if self.shrink is not None:  # ... nor the top level above the largest number
            step.mul_(1 - _FEW_ULPS * (self.shrink < 1))
        out = levels.new_empty(levels.shape, dtype=step.dtype) if out is None else out
        number = self._rows_at_once(levels, _DECODED_AT_ONCE_ON_CPU)
        every = levels, out, step, self.low, self.shrink
        blocks = [every] if number is None else _blocks(number, *every)
        for some, values, its_step, low, shrink in blocks:
            values.copy_(some).mul_(its_step).add_(low)
            if shrink is not None:
                values.div_(shrink)
        return out

    def _rows_at_once(self, values: Tensor, most: int) -> int | None:
        """Rows of a block, where a CPU's cache is to hold what is computed; None for all."""
        if values.numel() <= most or not values.is_cpu:
            return None
        if values.shape[:-1] != self.low.shape[:-1]:
            return None
        return max(most // values.shape[-1], 1)

    def _levels_of_block(
        self,
        values: Tensor,
        rows: Tensor | None,
        columns: Tensor | None,
        out: Tensor | None,
        scratch: _Scratch = _NO_SCRATCH,
    ) -> Tensor:
        """The levels of values that are all of this grid's, with bits for noise, if any."""
        if self.shrink is None:
            steps = torch.sub(values, self.low, out=scratch.steps)
        else:
            steps = torch.mul(values, self.shrink, out=scratch.steps).sub_(self.low)
        if rows is None or columns is None:
            steps.mul_(self.per_unit).add_(0.5)
        else:
            # Numbers from 256 to below 257: the 256 leaves no trace in a byte. Sums in float32 are
            # rounded to what noise is made of, those in float64 are cut off to it.
            noise = torch.bitwise_xor(rows, columns, out=scratch.noise).view(torch.float32)
            noise = noise if steps.dtype == noise.dtype else noise.double().add_(2**-16)
            torch.addcmul(noise, steps, self.per_unit, out=steps)
        if steps.is_cpu:  # which converts to bytes in half the time by way of 16 bits
            whole = scratch.whole
            steps = steps.to(torch.int16) if whole is None else whole.copy_(steps)
        levels = steps.to(torch.uint8) if out is None else out.copy_(steps)
        # What NaN becomes is any byte, which must not reach into its neighbours' bits.
        return levels if self.top == 255 else levels.bitwise_and_(self.top)


def _blocks(number: int, *tensors: Tensor | None) -> Iterable[tuple[Any, ...]]:
    """So many rows of each tensor at a time; None goes with every block."""
    split = (repeat(None) if tensor is None else tensor.split(number) for tensor in tensors)
    return zip(*split, strict=False)


def _may_be_huge(bounds: Tensor) -> bool:
    """Whether a range may overflow. An accelerator would be waited for, and is not asked."""
    if bounds.device.type != 'cpu' or not bounds.numel():
        return True
    half = torch.finfo(bounds.dtype).max / 2
    lowest, highest = bounds.aminmax()  # NaN where there is one
    return not (highest.item() <= half and lowest.item() >= -half)
