"""Saved tensors in 8, 4, 2 or 1 bits, by groups, rounded stochastically."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memengine._torch_private.triton_kernels import proven_kernels
from memengine.techniques.codecs.bit_packing import (
    PACKED_BITS,
    pack_bits,
    packed_numel,
    unpack_bits,
)
from memengine.techniques.codecs.grids import UniformGrid, computing_dtype
from memengine.techniques.codecs.memory_order import MemoryOrder, in_memory_order
from memengine.techniques.modules.private_random import private_generator

__all__ = ['QuantizedCode', 'Quantizer', 'check_floating_point']

# A part of a tensor at a time: one that stays in a CPU's cache; one that fills a GPU, and hardly
# counts at the peak.
_PART_NUMEL = {'cpu': 2**17}
_PART_NUMEL_ELSEWHERE = 2**20
_KERNELS = 'memengine.techniques.codecs.kernels'
_LARGEST_GROUP_OF_KERNELS = 2**13  # of which a GPU's multiprocessor holds several


def check_floating_point(tensor: Tensor) -> None:
    """Raise TypeError for a tensor of integers, booleans or complex numbers."""
    if not tensor.is_floating_point():
        raise TypeError(
            f'only floating-point tensors are quantised, got {tensor.dtype}: keep it as it is, or '
            'use a code of memengine.techniques.codecs.lossless'
        )


class _Part(NamedTuple):
    """What is computed at once: full groups, or the last, shorter one."""

    elements: slice
    groups: slice
    bytes: slice
    group_size: int

    def rows(self, elements: Tensor) -> Tensor:
        return elements.view(-1, self.group_size)  # [groups, group_size]


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
        how = self.packed, self.extremes, self.order.numel, self.bits, self.group_size
        by_groups = self.part_numel == self.group_size
        kernels = _kernels(self.extremes, self.bits, self.group_size) if by_groups else None
        if kernels is None:
            return self.order.shaped(dequantize(*how, self.part_numel))
        return self.order.shaped(kernels.dequantize(*how))


def _kernels(like: Tensor, bits: int, group_size: int) -> Any | None:
    """What quantises a tensor and back in one kernel each, where that is to be had."""
    if group_size > _LARGEST_GROUP_OF_KERNELS or like.dtype == torch.float64:
        return None
    return proven_kernels(f'{_KERNELS}.quantizing', like, bits, group_size)


def quantize(
    flat: Tensor, bits: int, group_size: int, stochastic: bool, part_numel: int
) -> tuple[Tensor, Tensor]:
    """What :class:`Quantizer` computes, by torch's operations.

    Args:
        flat: ``[n]``.
        bits: 8, 4, 2 or 1.
        group_size: A multiple of 8; the last group may be shorter.
        stochastic: Round up or down at random.
        part_numel: Elements whose levels are packed together.

    Returns:
        The levels in bytes, and the extremes, [2, groups].
    """
    generator = private_generator(flat.device) if stochastic else None
    packed = flat.new_empty(packed_numel(flat.numel(), bits), dtype=torch.uint8)
    extremes = _extremes(flat, group_size)
    dtype, grid = computing_dtype(flat.dtype), _grid(extremes, bits)
    for part in _parts(flat.numel(), bits, group_size, part_numel):
        rows = part.rows(flat[part.elements]).to(dtype)
        levels = grid.of_ranges(part.groups).levels(rows, generator)
        pack_bits(levels, bits, out=packed[part.bytes])
    return packed, extremes


def dequantize(
    packed: Tensor, extremes: Tensor, numel: int, bits: int, group_size: int, part_numel: int
) -> Tensor:
    """What :func:`quantize` gave for ``[n]``, in the dtype of the extremes."""
    flat = extremes.new_empty(numel)
    dtype, grid = computing_dtype(flat.dtype), _grid(extremes, bits)
    for part in _parts(numel, bits, group_size, part_numel):
        target = part.rows(flat[part.elements])
        levels = unpack_bits(packed[part.bytes], bits, target.numel())
        room = target if target.dtype == dtype else None
        values = grid.of_ranges(part.groups).values(part.rows(levels), room)
        if room is None:
            target.copy_(values)
    return flat


def _grid(extremes: Tensor, bits: int) -> UniformGrid:
    """Where the levels of each group lie."""
    low, high = extremes[..., None]  # [groups, 1]
    return UniformGrid.between(low, high, bits)


def _parts(numel: int, bits: int, group_size: int, part_numel: int) -> Iterator[_Part]:
    """What is computed at once, in turn."""

    def part(start: int, stop: int, size: int) -> _Part:
        first = start // group_size
        return _Part(
            slice(start, stop),
            slice(first, first + (stop - start) // size),
            slice(start * bits // 8, packed_numel(stop, bits)),
            size,
        )

    full = numel - numel % group_size
    length = max(part_numel - part_numel % group_size, group_size)
    for start in range(0, full, length):
        yield part(start, min(start + length, full), group_size)
    if full < numel:
        yield part(full, numel, numel - full)


def _extremes(flat: Tensor, group_size: int) -> Tensor:
    full = flat.numel() - flat.numel() % group_size
    groups = [flat[:full].view(-1, group_size)]
    if full < flat.numel():
        groups.append(flat[None, full:])
    return torch.stack(
        [
            torch.cat([group.amin(-1) for group in groups]),
            torch.cat([group.amax(-1) for group in groups]),
        ]
    )


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
    bytes for each element of a part of the tensor: 1.3 MB on CPU, at most 11 MB elsewhere.

    Cost: two passes over the tensor for the extremes, nine over a part of it in the cache, and 8
    random bits for each element; to decode, four passes. On a GPU one kernel each way, where
    Triton compiles them and they agree with these passes there (:func:`proven_kernels`); groups
    above 8,192 elements and float64 go without.

    Error: less than a step of ``(max - min) / (2 ** bits - 1)`` of the group (half of it without
    `stochastic`). The mean is exact to ``2 ** -16`` of a step and the rounding of float32. In half
    precision, what is decoded is rounded to the nearest besides, by at most half a unit in the
    last place, and not at random. A group's minimum and a group of equal values come back exactly,
    so the zeros of a ReLU do. A group that holds a NaN or an infinity comes back as NaN and
    infinities throughout: an attention mask of ``-inf`` has to be kept as it is.

    Shape, dtype, device and strides come back (see ``in_memory_order``). float64 is computed in
    float64, every other dtype in float32.

    Random state: noise comes from :func:`private_generator`, that of a kernel from its seed and
    the element's place (:func:`private_seed`): other numbers than without the kernel, equally
    good, and the same whenever a step is repeated. The global generators are untouched.
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
        kernels = _kernels(flat, self.bits, self.group_size)
        how = flat, self.bits, self.group_size, self.stochastic
        if kernels is None:
            part_numel = _PART_NUMEL.get(flat.device.type, _PART_NUMEL_ELSEWHERE)
            packed, extremes = quantize(*how, part_numel)
        else:
            part_numel = self.group_size
            packed, extremes = kernels.quantize(*how)
        return QuantizedCode(packed, extremes, order, self.bits, self.group_size, part_numel)
