"""Saved tensors in 8, 4, 2 or 1 bits, by groups, rounded stochastically."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memengine._torch_private.compiled_kernels import proven_kernels
from memengine._torch_private.fake import is_fake, without_modes
from memengine.techniques.codecs.bit_packing import (
    PACKED_BITS,
    pack_bits,
    packed_numel,
    unpack_bits,
)
from memengine.techniques.codecs.grids import UniformGrid
from memengine.techniques.codecs.memory_order import MemoryOrder, in_memory_order
from memengine.techniques.codecs.top_k import part_numel
from memengine.techniques.modules.private_random import private_generator

__all__ = ['QuantizedCode', 'Quantizer', 'check_floating_point']

_MOST_FILLED_UP = 2**18  # elements of one part with a shorter last group, of which that is a copy
_PART_NUMEL_ON_CPU = 2**18  # below 8 bits
_PART_GROUPS_ON_CPU = 2**14  # of 8 bits, which need not be packed: only their ranges are at once
_DTYPES_ON_CPU = (torch.float32, torch.bfloat16)  # that kernels know
_KERNELS = 'memengine.techniques.codecs.kernels.quantizing'
_KERNELS_ON_CPU = f'{_KERNELS}_on_cpu'
_LARGEST_GROUP_OF_KERNELS = 2**13  # a GPU's multiprocessor holds several, a CPU's cache many


def check_floating_point(tensor: Tensor) -> None:
    """Raise TypeError for a tensor of integers, booleans or complex numbers."""
    if not tensor.is_floating_point():
        raise TypeError(
            f'only floating-point tensors are quantised, got {tensor.dtype}: keep it as it is, or '
            'use a code of memengine.techniques.codecs.lossless'
        )


class Part(NamedTuple):
    """What is computed at once: full groups, and in the last part a shorter one.

    In 8 bits, where parts may be large, that is a part of its own: it is filled up in a copy.
    """

    elements: slice
    groups: slice
    bytes: slice


def _in_rows(flat: Tensor, group_size: int) -> Tensor:
    """Elements as [groups, group_size]; the last one fills up a shorter group."""
    missing = -flat.numel() % group_size
    if missing:
        flat = torch.cat([flat, flat[-1:].expand(missing)])
    return flat.view(-1, group_size)


@dataclass(slots=True)
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

    @property
    def nbytes(self) -> int:
        """Of both tensors."""
        return self.packed.nbytes + self.extremes.nbytes

    def decode(self) -> Tensor:
        """The tensor, a new one each time."""
        how = self.packed, self.extremes, self.order.numel, self.bits, self.group_size
        by_groups = self.part_numel == self.group_size
        kernels = _gpu_kernels(self.extremes, self.bits, self.group_size) if by_groups else None
        if kernels is not None:
            return self.order.shaped(kernels.dequantize(*how))
        kernels = _cpu_kernels(self.extremes, self.bits, self.group_size)
        to_values = dequantize if kernels is None else kernels.dequantize
        return self.order.shaped(to_values(*how, self.part_numel))


def _gpu_kernels(like: Tensor, bits: int, group_size: int) -> Any | None:
    """What quantises a tensor and back in one kernel each, where that is to be had."""
    if group_size > _LARGEST_GROUP_OF_KERNELS or like.dtype == torch.float64:
        return None
    return proven_kernels(_KERNELS, like, bits, group_size)


def _cpu_kernels(like: Tensor, bits: int, group_size: int) -> Any | None:
    """What computes the same as :func:`quantize` and back, where there is a compiler.

    Predictions count what would be used: of a fake tensor it is asked about a real one.
    """
    if group_size > _LARGEST_GROUP_OF_KERNELS or like.dtype not in _DTYPES_ON_CPU:
        return None
    if is_fake(like) and like.is_cpu:
        with without_modes():
            return _cpu_kernels(torch.empty(0, dtype=like.dtype, device='cpu'), bits, group_size)
    return proven_kernels(_KERNELS_ON_CPU, like, bits, group_size, on='cpu')


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
    packed, extremes = empty_code(flat, bits, group_size)
    for part in parts(flat.numel(), bits, group_size, part_numel):
        some = flat[part.elements], packed[part.bytes], extremes[:, part.groups]
        _quantize_part(*some, group_size, bits, generator)
    return packed, extremes


def empty_code(flat: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Room for the levels in bytes and for the extremes."""
    numel = flat.numel()
    packed = flat.new_empty(packed_numel(numel, bits), dtype=torch.uint8)
    return packed, flat.new_empty(2, -(-numel // group_size))


def _quantize_part(
    flat: Tensor,
    packed: Tensor,
    extremes: Tensor,
    group_size: int,
    bits: int,
    generator: torch.Generator | None,
) -> None:
    """Write the levels and the extremes of ``[n]``."""
    rows = _in_rows(flat, group_size)
    low, high = extremes.unbind()
    torch.amin(rows, -1, out=low)
    torch.amax(rows, -1, out=high)
    grid = _grid(extremes, bits)
    if bits == 8 and rows.numel() == flat.numel():
        grid.levels(rows, generator, out=packed.view(rows.shape))
    else:
        levels = grid.levels(rows, generator).view(-1)
        pack_bits(levels[: flat.numel()], bits, out=packed)


def dequantize(
    packed: Tensor, extremes: Tensor, numel: int, bits: int, group_size: int, part_numel: int
) -> Tensor:
    """What :func:`quantize` gave for ``[n]``, in the dtype of the extremes."""
    flat = extremes.new_empty(numel)
    grid = _grid(extremes, bits)
    for part in parts(numel, bits, group_size, part_numel):
        some = packed[part.bytes], group_size, bits, flat[part.elements]
        _put_values(grid.of_ranges(part.groups), *some)
    return flat


def _put_values(grid: UniformGrid, packed: Tensor, group_size: int, bits: int, out: Tensor) -> None:
    """Write what was packed of ``[n]``."""
    levels = packed if bits == 8 else unpack_bits(packed, bits, out.numel())
    is_room = out.dtype == grid.low.dtype and out.numel() % group_size == 0
    scratch = out.view(-1, group_size) if is_room else None
    values = grid.values(_in_rows(levels, group_size), scratch)
    if scratch is None:
        out.copy_(values.view(-1)[: out.numel()])


def _grid(extremes: Tensor, bits: int) -> UniformGrid:
    """Where the levels of each group lie."""
    return UniformGrid.between(extremes.unsqueeze(-1), bits)


def parts(numel: int, bits: int, group_size: int, part_numel: int) -> list[Part]:
    """What is computed at once, in turn."""
    length = max(part_numel // group_size, 1) * group_size  # of full groups, as many as fit
    if numel <= min(length, _MOST_FILLED_UP):  # all, a shorter last group with the others
        starts = [0]
    else:
        whole = numel - numel % group_size if bits == 8 else numel
        starts = [*range(0, whole, length), *range(whole, numel, group_size)]
    return [
        Part(
            slice(start, stop),
            slice(start // group_size, -(-stop // group_size)),
            slice(start * bits // 8, packed_numel(stop, bits)),
        )
        for start, stop in zip(starts, [*starts[1:], numel], strict=True)
    ]


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
    8, 4, 2 and 1 bits; of one in half precision 0.508, 0.258, 0.133 and 0.070. While it runs, at
    most 2 MB on CPU, 4 MB in float64; elsewhere 9 to 14 bytes for each element of a part of the
    tensor, 11 MB.

    Cost: three passes over the tensor, six over a block of it in the cache, and random bits for
    each group and each place in a group; to decode, three passes, five below 8 bits. Where they
    can be compiled and agree with these passes (:func:`proven_kernels`), kernels do it in one pass
    each way: Triton's on a GPU; on a CPU, of float32 and bfloat16, what a compiler of C makes, bit
    for bit the same in a quarter of the time. Groups above 8,192 elements and float64 go without.

    Error: less than a step of ``(max - min) / (2 ** bits - 1)`` of the group (half of it without
    `stochastic`), and independent for any two elements. The mean is exact to ``2 ** -16`` of a
    step and the rounding of float32. In half precision, what is decoded is rounded to the nearest
    besides, by at most half a unit in the last place, and not at random. A group's minimum and a
    group of equal values come back exactly, so the zeros of a ReLU do. A group that holds a NaN or
    an infinity comes back as NaN and infinities throughout: an attention mask of ``-inf`` has to be
    kept as it is.

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

    def __call__(self, tensor: Tensor) -> QuantizedCode:
        """The tensor in few bits."""
        check_floating_point(tensor)
        flat, order = in_memory_order(tensor)
        how = flat, self.bits, self.group_size, self.stochastic
        kernels = _gpu_kernels(flat, self.bits, self.group_size)
        if kernels is not None:
            at_once = self.group_size
            packed, extremes = kernels.quantize(*how)
        else:
            at_once = self._part_numel(flat)
            kernels = _cpu_kernels(flat, self.bits, self.group_size)
            to_levels = quantize if kernels is None else kernels.quantize
            packed, extremes = to_levels(*how, at_once)
        return QuantizedCode(packed, extremes, order, self.bits, self.group_size, at_once)

    def _part_numel(self, flat: Tensor) -> int:
        """Elements whose ranges are found at once, and below 8 bits packed together."""
        if not flat.is_cpu:
            return part_numel(flat.device, flat.itemsize)
        return self.group_size * _PART_GROUPS_ON_CPU if self.bits == 8 else _PART_NUMEL_ON_CPU
