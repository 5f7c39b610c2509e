"""Saved tensors in 8, 4, 2 or 1 bits, by groups, rounded stochastically."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from memengine.techniques.codecs.bit_packing import (
    PACKED_BITS,
    pack_bits,
    packed_numel,
    unpack_bits,
)
from memengine.techniques.codecs.grids import UniformGrid, computing_dtype
from memengine.techniques.codecs.memory_order import MemoryOrder, in_memory_order
from memengine.techniques.modules.random_state import private_generator

__all__ = ['QuantizedCode', 'Quantizer', 'check_floating_point']

# A part of a tensor at a time: one that stays in a CPU's cache; one that fills a GPU, and hardly
# counts at the peak.
_PART_NUMEL = {'cpu': 2**18}
_PART_NUMEL_ELSEWHERE = 2**20


def check_floating_point(tensor: Tensor) -> None:
    """Raise TypeError for a tensor of integers, booleans or complex numbers."""
    if not tensor.is_floating_point():
        raise TypeError(
            f'only floating-point tensors are quantised, got {tensor.dtype}: keep it as it is, or '
            'use a code of memengine.techniques.codecs.lossless'
        )


class _Part(NamedTuple):
    """What is computed at once: full groups, and in the last part a shorter one."""

    elements: slice
    groups: slice
    bytes: slice

    @property
    def numel(self) -> int:
        return int(self.elements.stop - self.elements.start)


def _in_rows(flat: Tensor, group_size: int) -> Tensor:
    """Elements as [groups, group_size]; the last one fills up a shorter group."""
    missing = -flat.numel() % group_size
    if missing:
        flat = torch.cat([flat, flat[-1:].expand(missing)])
    return flat.view(-1, group_size)


@dataclass(frozen=True)
class QuantizedCode:
    """A tensor as levels between the extremes of its groups.

    Args:
        packed: The levels, in bytes.
        extremes: [2, groups], lowest and highest values.
        order: The way back to the tensor's shape.
        bits: Of a level.
        group_size: Elements of a group.
        part_numel: Elements whose levels are packed together.
    """

    packed: Tensor
    extremes: Tensor
    order: MemoryOrder
    bits: int
    group_size: int
    part_numel: int

    @torch.no_grad()
    def decode(self) -> Tensor:
        """The tensor, a new one each time."""
        flat = self.extremes.new_empty(self.order.numel)
        dtype, grid = computing_dtype(flat.dtype), self.grid()
        for part in self.parts():
            target, packed = flat[part.elements], self.packed[part.bytes]
            levels = packed if self.bits == 8 else unpack_bits(packed, self.bits, target.numel())
            is_room = target.dtype == dtype and target.numel() % self.group_size == 0
            room = target.view(-1, self.group_size) if is_room else None
            values = grid.of_ranges(part.groups).values(_in_rows(levels, self.group_size), room)
            if room is None:
                target.copy_(values.view(-1)[: target.numel()])
        return self.order.shaped(flat)

    def grid(self, groups: slice = slice(None)) -> UniformGrid:
        """Where the levels of groups lie."""
        low, high = self.extremes[:, groups, None]  # [groups, 1]
        return UniformGrid.between(low, high, self.bits)

    def parts(self) -> Iterator[_Part]:
        """What is computed at once, in turn."""
        size, numel = self.group_size, self.order.numel
        length = max(self.part_numel - self.part_numel % size, size)
        for start in range(0, numel, length):
            stop = min(start + length, numel)
            yield _Part(
                slice(start, stop),
                slice(start // size, -(-stop // size)),
                slice(start * self.bits // 8, packed_numel(stop, self.bits)),
            )


def _put_extremes(rows: Tensor, extremes: Tensor) -> None:
    """Write the lowest and highest of each row [groups, group_size] into [2, groups]."""
    torch.amin(rows, -1, out=extremes[0])
    torch.amax(rows, -1, out=extremes[1])


@dataclass(frozen=True)
class Quantizer:
    """Codec: each group of neighbours in memory on a uniform grid between its extremes.

    Args:
        bits: 8, 4, 2 or 1 for each element.
        group_size: Elements of a group, a multiple of 8; the last one may be shorter.
        stochastic: Round up or down at random, so that ``decode()`` has the mean of the tensor.
            False rounds to the nearer level: half the largest error, but biased.

    Raises:
        ValueError: For other bits or sizes.
        TypeError: When called with a tensor of integers, booleans or complex numbers.

    Bytes: ``numel * bits / 8``, and two elements of the tensor's dtype for each group, which are
    its extremes, exactly. Of a float32 tensor, in groups of 256, 0.258, 0.133, 0.070 and 0.039 for
    8, 4, 2 and 1 bits; of one in half precision 0.508, 0.258, 0.133 and 0.070. While it runs, 10
    to 14 bytes for each element of a part of the tensor: at most 4 MB on CPU, 11 MB elsewhere.

    Cost: one pass over the tensor (on an accelerator three), ten over a part of it in the cache,
    and 8 random bits for each element; to decode, two passes, four below 8 bits.

    Error: less than a step of ``(max - min) / (2 ** bits - 1)`` of the group (half of it without
    `stochastic`). The mean is exact to ``2 ** -16`` of a step and the rounding of float32. In half
    precision, what is decoded is rounded to the nearest besides, by at most half a unit in the
    last place, and not at random. A group's minimum and a group of equal values come back exactly,
    so the zeros of a ReLU do. A group that holds a NaN or an infinity comes back as NaN and
    infinities throughout: an attention mask of ``-inf`` has to be kept as it is.

    Shape, dtype, device and strides come back (see ``in_memory_order``). float64 is computed in
    float64, every other dtype in float32.

    Random state: noise comes from :func:`private_generator`; the global generators are untouched.
    AMP and DDP: a tensor in the dtype of autocast is quantised in it; each rank rounds by
    itself. Nothing waits for the device.

    Source: Chen et al., ActNN: Reducing Training Memory Footprint via 2-Bit Activation Compressed
    Training (2021), and Liu et al., GACT: Activation Compressed Training for Generic Network
    Architectures (2022): per-group extremes, stochastic rounding.
    """

    bits: int = 8
    group_size: int = 256
    stochastic: bool = True

    def __post_init__(self) -> None:
        if self.bits not in PACKED_BITS:
            raise ValueError(f'bits must be one of {PACKED_BITS}, got {self.bits!r}')
        if self.group_size < 8 or self.group_size % 8:
            raise ValueError(
                f'group_size must be a positive multiple of 8, got {self.group_size!r}'
            )

    @torch.no_grad()
    def __call__(self, tensor: Tensor) -> QuantizedCode:
        """The tensor in few bits."""
        check_floating_point(tensor)
        flat, order = in_memory_order(tensor)
        numel, bits = flat.numel(), self.bits
        part_numel = _PART_NUMEL.get(flat.device.type, _PART_NUMEL_ELSEWHERE)
        generator = private_generator(flat.device) if self.stochastic else None
        packed = flat.new_empty(packed_numel(numel, bits), dtype=torch.uint8)
        extremes = flat.new_empty(2, -(-numel // self.group_size))
        code = QuantizedCode(packed, extremes, order, bits, self.group_size, part_numel)
        dtype, grid = computing_dtype(flat.dtype), None
        if flat.device.type != 'cpu':  # each kernel costs a launch: all ranges are found at once
            full = numel // self.group_size
            head, rest = flat.split([full * self.group_size, numel % self.group_size])
            _put_extremes(head.view(-1, self.group_size), extremes[:, :full])
            if rest.numel():
                _put_extremes(rest[None], extremes[:, full:])
            grid = code.grid()
        for part in code.parts():
            rows = _in_rows(flat[part.elements], self.group_size)
            if grid is None:  # what is read for its extremes is in the cache then
                _put_extremes(rows, extremes[:, part.groups])
                ranges = code.grid(part.groups)
            else:
                ranges = grid.of_ranges(part.groups)
            levels = ranges.levels(rows.to(dtype), generator).view(-1)
            pack_bits(levels[: part.numel], bits, out=packed[part.bytes])
        return code
