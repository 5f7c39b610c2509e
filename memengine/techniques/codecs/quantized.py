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
from memengine.techniques.codecs.grids import UniformGrid, computing_dtype
from memengine.techniques.codecs.memory_order import (
    Channels,
    MemoryOrder,
    channels_of,
    in_memory_order,
    stride_of_channels,
)
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
        channels: In whose ranges the extremes are shares; None where they are values.
    """

    packed: Tensor
    extremes: Tensor
    order: MemoryOrder
    bits: int
    group_size: int
    part_numel: int
    channels: Channels | None = None

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        nbytes = self.packed.nbytes + self.extremes.nbytes
        return nbytes if self.channels is None else nbytes + self.channels.extremes.nbytes

    def decode(self) -> Tensor:
        """The tensor, a new one each time."""
        channels = self.channels
        how = self.packed, self.extremes, self.order.numel, self.bits, self.group_size
        kind = _of_values(self.extremes, channels), self.bits, self.group_size, channels is not None
        kernels = _gpu_kernels(*kind) if self.part_numel == self.group_size else None
        if kernels is not None:
            return self.order.shaped(kernels.dequantize(*how, channels))
        kernels = _cpu_kernels(*kind)
        to_values = dequantize if kernels is None else kernels.dequantize
        return self.order.shaped(to_values(*how, self.part_numel, channels))


def _of_values(extremes: Tensor, channels: Channels | None) -> Tensor:
    """Extremes that are values: of groups, or of channels."""
    return extremes if channels is None else channels.extremes


def _gpu_kernels(like: Tensor, bits: int, group_size: int, by_channel: bool) -> Any | None:
    """What quantises a tensor and back in one kernel each, where that is to be had."""
    if group_size > _LARGEST_GROUP_OF_KERNELS or like.dtype == torch.float64:
        return None
    return proven_kernels(_KERNELS, like, bits, group_size, by_channel)


def _cpu_kernels(like: Tensor, bits: int, group_size: int, by_channel: bool) -> Any | None:
    """What computes the same as :func:`quantize` and back, where there is a compiler.

    Predictions count what would be used: of a fake tensor it is asked about a real one.
    """
    if group_size > _LARGEST_GROUP_OF_KERNELS or like.dtype not in _DTYPES_ON_CPU:
        return None
    if is_fake(like) and like.is_cpu:
        with without_modes():
            like = torch.empty(0, dtype=like.dtype, device='cpu')
            return _cpu_kernels(like, bits, group_size, by_channel)
    return proven_kernels(_KERNELS_ON_CPU, like, bits, group_size, by_channel, on='cpu')


def quantize(
    flat: Tensor,
    bits: int,
    group_size: int,
    stochastic: bool,
    part_numel: int,
    channels: Channels | None = None,
) -> tuple[Tensor, Tensor]:
    """What :class:`Quantizer` computes, by torch's operations.

    Args:
        flat: ``[n]``.
        bits: 8, 4, 2 or 1.
        group_size: A multiple of 8; the last group may be shorter.
        stochastic: Round up or down at random.
        part_numel: Elements whose levels are packed together.
        channels: In whose ranges groups are taken.

    Returns:
        The levels in bytes, and the extremes, [2, groups].
    """
    generator = private_generator(flat.device) if stochastic else None
    packed, extremes = empty_code(flat, bits, group_size, channels is not None)
    for part in parts(flat.numel(), bits, group_size, part_numel):
        some = flat[part.elements]
        if channels is not None:
            some = channels.shares(some, part.elements.start)
        code = packed[part.bytes], extremes[:, part.groups]
        _quantize_part(some, *code, group_size, bits, generator)
    return packed, extremes


def empty_code(flat: Tensor, bits: int, group_size: int, by_channel: bool) -> tuple[Tensor, Tensor]:
    """Room for the levels in bytes and for the extremes, which are shares by channel."""
    numel = flat.numel()
    packed = flat.new_empty(packed_numel(numel, bits), dtype=torch.uint8)
    dtype = computing_dtype(flat.dtype) if by_channel else flat.dtype
    return packed, flat.new_empty(2, -(-numel // group_size), dtype=dtype)


def empty_values(extremes: Tensor, numel: int, channels: Channels | None) -> Tensor:
    """Room for what is decoded, in the dtype that had been coded."""
    return _of_values(extremes, channels).new_empty(numel)


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
    packed: Tensor,
    extremes: Tensor,
    numel: int,
    bits: int,
    group_size: int,
    part_numel: int,
    channels: Channels | None = None,
) -> Tensor:
    """What :func:`quantize` gave for ``[n]``, in the dtype of extremes that are values."""
    flat = empty_values(extremes, numel, channels)
    grid = _grid(extremes, bits)
    for part in parts(numel, bits, group_size, part_numel):
        out = flat[part.elements]
        levels = packed[part.bytes]
        if bits < 8:
            levels = unpack_bits(levels, bits, out.numel())
        is_room = out.dtype == grid.low.dtype and out.numel() % group_size == 0
        scratch = out.view(-1, group_size) if is_room else None
        values = grid.of_ranges(part.groups).values(_in_rows(levels, group_size), scratch)
        values = values.view(-1)[: out.numel()]
        if channels is not None:
            channels.put_back_(values, part.elements.start)
        if scratch is None:
            out.copy_(values)
    return flat


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


class Case(NamedTuple):
    """A small case on which kernels prove themselves."""

    flat: Tensor
    channels: Channels | None


def cases_to_compare(like: Tensor, group_size: int, by_channel: bool) -> list[Case]:
    """A few groups, where `like` lies and in its dtype: equal, huge and infinite numbers, and NaN.

    By channel of finite numbers alone, with channels beside each other and one after another.
    """
    numel = 9 * group_size + (24 if by_channel else 11)
    flat = torch.arange(numel, device=like.device).mul(0.37).sin().to(like.dtype)
    flat[group_size : 2 * group_size] = 0.3
    if by_channel:
        tensors = flat.view(-1, 3), flat.view(-1, 3, 8)
        return [Case(flat, channels_of(tensor, tensor.stride(1))) for tensor in tensors]
    flat[2 * group_size + 5], flat[3 * group_size + 1] = float('nan'), float('inf')
    flat[4 * group_size], flat[4 * group_size + 2] = (torch.finfo(like.dtype).max, -100)
    return [Case(flat, None)]


@dataclass(frozen=True)
class Quantizer:
    """Codec: each group of neighbours in memory on a uniform grid between its extremes.

    Args:
        bits: 8, 4, 2 or 1 for each element.
        group_size: Elements of a group, a multiple of 8; the last one may be shorter.
        stochastic: Round up or down at random, so that ``decode()`` has the mean of the tensor.
            False rounds to the nearer level: half the largest error, but biased.
        by_channel: Take each element's share of the range of its channel, the second dimension, and
            groups of these: for what is divided by its channel's spread, such as a BatchNorm's
            input. Tensors of one dimension or channel, or of less than 8 elements for each, go
            without.

    Raises:
        ValueError: For other bits or sizes.
        TypeError: When called with a tensor of integers, booleans or complex numbers.

    Bytes: ``numel * bits / 8``, and two elements of the tensor's dtype for each group, which are
    its extremes, exactly; by channel two for each channel, and float32 (float64) for each group.
    Of a float32 tensor, in groups of 256, 0.258, 0.133, 0.070 and 0.039 for 8, 4, 2 and 1 bits; of
    one in half precision 0.508, 0.258, 0.133 and 0.070. While it runs, at
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
    kept as it is. By channel, so does a group with any element of a channel that holds one, or
    whose range overflows; a range below normal numbers comes back as its lowest value.

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
    by_channel: bool = False

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
        stride = stride_of_channels(order) if self.by_channel else None
        how = flat, self.bits, self.group_size, self.stochastic
        kind = flat, self.bits, self.group_size, stride is not None
        kernels = _gpu_kernels(*kind)
        if kernels is not None:
            at_once = self.group_size
            channels = None if stride is None else kernels.channels_of(flat, order.shape[1], stride)
            packed, extremes = kernels.quantize(*how, channels=channels)
        else:
            at_once = self._part_numel(flat, stride is not None)
            channels = None if stride is None else channels_of(tensor, stride)
            kernels = _cpu_kernels(*kind)
            to_levels = quantize if kernels is None else kernels.quantize
            packed, extremes = to_levels(*how, at_once, channels)
        return QuantizedCode(packed, extremes, order, self.bits, self.group_size, at_once, channels)

    def _part_numel(self, flat: Tensor, by_channel: bool) -> int:
        """Elements whose ranges are found at once, and below 8 bits packed together."""
        if not flat.is_cpu:
            itemsize = computing_dtype(flat.dtype).itemsize
            return part_numel(flat.device, 2 * itemsize if by_channel else itemsize)
        return self.group_size * _PART_GROUPS_ON_CPU if self.bits == 8 else _PART_NUMEL_ON_CPU
