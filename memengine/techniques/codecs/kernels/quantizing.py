"""Quantise and pack, unpack and dequantise: what ``codecs/quantized.py`` does, in a kernel each.

A group is a row of a tile and is packed by itself, so that its bytes are written by whoever has
its extremes. Legend: G groups of a program, P values of a byte, C bytes of a group (rounded up to
a power of two), so that a tile is [G, P, C].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memengine.techniques.codecs import quantized
from memengine.techniques.codecs.memory_order import Channels
from memengine.techniques.codecs.quantized import Case
from memengine.techniques.modules.private_random import private_seed

__all__ = ['channels_of', 'compare_with_eager', 'dequantize', 'quantize']

_TILE_NUMEL = 2048
_COLUMNS_AT_ONCE = 4096  # of a channel
_LEAST_NORMAL = tl.constexpr(torch.finfo(torch.float32).tiny)


def channels_of(flat: Tensor, number: int, stride: int) -> Channels:
    """The channels of a tensor in memory order; one kernel, which reads it once."""
    extremes = flat.new_empty(2, number)
    if stride == 1:
        low, high = extremes.unbind()
        torch.aminmax(flat.view(-1, number), dim=0, out=(low, high))
    else:
        with torch.cuda.device_of(flat):
            _extremes_of_channels[number,](
                flat, extremes, number, stride, flat.numel() // number, at_once=_COLUMNS_AT_ONCE
            )
    return Channels(extremes, stride)


def quantize(
    flat: Tensor,
    bits: int,
    group_size: int,
    stochastic: bool,
    seed: int | None = None,
    channels: Channels | None = None,
) -> tuple[Tensor, Tensor]:
    """Levels of each group between its extremes, packed group by group.

    Args:
        flat: ``[n]``, of float32, bfloat16 or float16.
        bits: 8, 4, 2 or 1.
        group_size: A multiple of 8; the last group may be shorter.
        stochastic: Round up or down at random, by 16 bits of Philox for each element. They are a
            function of the seed and of the element's place.
        seed: By default the next of the techniques' own.
        channels: In whose ranges groups are taken.

    Returns:
        The levels in bytes, and the extremes, [2, groups].

    Cost: one kernel, which reads the tensor once.
    """
    packed, extremes = quantized.empty_code(flat, bits, group_size, channels is not None)
    groups = extremes.shape[1]
    if groups:
        seed = (private_seed(flat.device) if seed is None else seed) if stochastic else 2**62
        tile = _tile(bits, group_size)
        with torch.cuda.device_of(flat):
            _quantize[triton.cdiv(groups, tile['rows']),](
                *(flat, packed, extremes, *_of_channels(channels, flat), flat.numel(), seed),
                **dict(by_channel=channels is not None, stochastic=stochastic, **tile),
            )
    return packed, extremes


def dequantize(
    packed: Tensor,
    extremes: Tensor,
    numel: int,
    bits: int,
    group_size: int,
    channels: Channels | None = None,
) -> Tensor:
    """What :func:`quantize` packed, ``[n]`` in the dtype that had been coded; one kernel."""
    flat = quantized.empty_values(extremes, numel, channels)
    if numel:
        tile = _tile(bits, group_size)
        with torch.cuda.device_of(flat):
            _dequantize[triton.cdiv(extremes.shape[1], tile['rows']),](
                *(packed, extremes, *_of_channels(channels, flat), flat, numel),
                **dict(by_channel=channels is not None, **tile),
            )
    return flat


def _of_channels(channels: Channels | None, flat: Tensor) -> tuple[Tensor, int, int]:
    """Extremes, number and stride as kernels take them; without channels they read none."""
    if channels is None:
        return flat, 1, 1
    return channels.extremes, channels.extremes.shape[1], channels.stride


def compare_with_eager(like: Tensor, bits: int, group_size: int, by_channel: bool) -> None:
    """Compare with the eager form on a few groups, where `like` lies and in its dtype.

    Raises:
        ArithmeticError: When a kernel gives what the eager form does not.
    """
    for case in quantized.cases_to_compare(like, group_size, by_channel):
        _compare_case(case, bits, group_size)


def _compare_case(case: Case, bits: int, group_size: int) -> None:
    flat, channels = case
    numel, dtype = flat.numel(), flat.dtype
    if channels is not None:
        ours = channels_of(flat, channels.extremes.shape[1], channels.stride)
        if not torch.equal(ours.extremes, channels.extremes):
            raise ArithmeticError(f"the channels' extremes of {dtype} are not what they were to be")
    how = bits, group_size, group_size, channels
    expected, extremes = quantized.quantize(flat, bits, group_size, False, group_size, channels)
    of_codes = quantized.dequantize(expected, extremes, numel, *how)
    finite = of_codes.isfinite()
    span = (extremes[1].double() - extremes[0].double()).repeat_interleave(group_size)[:numel]
    range_ = span
    if channels is not None:
        range_ = channels.low_and_span_of(flat, 0)[1].double()
        span = span * range_
    step = span[finite] / (2**bits - 1)
    rounding = of_codes[finite].double().abs() * torch.finfo(dtype).eps + range_[finite] * 2**-20

    def check(decoded: Tensor, other: Tensor, tolerance: Tensor, what: str) -> None:
        error = (decoded[finite].double() - other[finite].double()).abs()
        if not bool((decoded.isfinite() == finite).all() & (error <= tolerance).all()):
            raise ArithmeticError(f'{what} in {bits} bits of {dtype} is not what it was to be')

    decoded = dequantize(expected, extremes, numel, bits, group_size, channels)
    check(decoded, of_codes, rounding, 'decoding')
    nearest, found = quantize(flat, bits, group_size, stochastic=False, channels=channels)
    if not torch.equal(found.nan_to_num(), extremes.nan_to_num()):
        raise ArithmeticError(f'the extremes of {dtype} are not what they were to be')
    decoded = quantized.dequantize(nearest, found, numel, *how)
    check(decoded, flat, step * (0.5 + 2**-10) + rounding, 'rounding to the nearest')
    at_random = flat, bits, group_size, True, 2**62 + 1, channels
    drawn = [quantize(*at_random) for _ in range(2)]
    decoded = quantized.dequantize(drawn[0][0], found, numel, *how)
    check(decoded, flat, step * (1 + 2**-10) + rounding, 'rounding at random')
    if torch.equal(drawn[0][0], nearest) or not torch.equal(drawn[0][0], drawn[1][0]):
        raise ArithmeticError('random rounding is not random, or not a function of its seed')


def _tile(bits: int, group_size: int) -> dict[str, int]:
    columns = triton.next_power_of_2(group_size * bits // 8)
    rows = max(1, _TILE_NUMEL // (columns * 8 // bits))
    return dict(bits=bits, group_size=group_size, rows=rows, columns=columns)


@triton.jit
def _bounds(low: tl.tensor, high: tl.tensor, bits: tl.constexpr) -> tuple[tl.tensor, ...]:
    """What UniformGrid.between computes, [G, 1, 1]: low, shrink, levels per unit, step."""
    huge = tl.maximum(tl.abs(low), tl.abs(high)) > 1.7014117331926443e38
    shrink = tl.where(huge, 0.25, 1.0)
    low = low * shrink
    span = high * shrink - low
    per_unit = tl.minimum(
        tl.div_rn(tl.zeros_like(span) + (2**bits - 1), span), 3.4028234663852886e38
    )
    step = tl.div_rn(tl.where(huge, 1 - 2**-20, 1.0), per_unit)
    return low[:, None, None], shrink[:, None, None], per_unit[:, None, None], step[:, None, None]


@triton.jit
def _places(
    numel: tl.tensor,
    bits: tl.constexpr,
    group_size: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Groups [G] and their first elements, places in them [G, P, C] and in their bytes [G, C]."""
    groups = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    first = groups * group_size
    size = tl.minimum(tl.maximum(numel - first, 0), group_size).to(tl.int32)
    in_bytes = (size * bits + 7) // 8
    column = tl.arange(0, columns)[None, :]
    is_byte = column < in_bytes[:, None]
    places = tl.arange(0, 8 // bits)[None, :, None] * in_bytes[:, None, None] + column[:, None, :]
    is_element = is_byte[:, None, :] & (places < size[:, None, None])
    elements = first[:, None, None] + places
    bytes_ = (first * bits // 8)[:, None] + column
    return groups, elements, is_element, bytes_, is_byte


@triton.jit
def _noise(
    seed: tl.tensor, rows: tl.constexpr, planes: tl.constexpr, columns: tl.constexpr
) -> tl.tensor:
    """Sixteen random bits for each element of a tile; eight elements share a counter."""
    count: tl.constexpr = rows * planes * columns // 8
    a, b, c, d = tl.randint4x(seed, tl.program_id(0) * count + tl.arange(0, count))
    words = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (count * 4,))
    halves = tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF)
    return tl.reshape(halves, (rows, planes, columns)).to(tl.float32) * (2.0**-16)


@triton.jit(do_not_specialize=['number', 'stride', 'count'])
def _extremes_of_channels(
    flat: tl.tensor,
    extremes: tl.tensor,
    number: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
    at_once: tl.constexpr,
) -> None:
    """Those of one channel, of which there are `count` elements."""
    channel = tl.program_id(0).to(tl.int64)
    low = tl.full((at_once,), float('inf'), tl.float32)
    high = tl.full((at_once,), float('-inf'), tl.float32)
    nans = tl.zeros((at_once,), tl.int32)
    for start in range(0, count, at_once):
        at = start + tl.arange(0, at_once)
        is_element = at < count
        place = (at // stride * number + channel) * stride + at % stride
        values = tl.load(flat + place, mask=is_element, other=0).to(tl.float32)
        low = tl.minimum(low, tl.where(is_element, values, float('inf')))
        high = tl.maximum(high, tl.where(is_element, values, float('-inf')))
        nans += (values != values).to(tl.int32)
    is_nan = tl.sum(nans, axis=0) > 0
    tl.store(extremes + channel, tl.where(is_nan, float('nan'), tl.min(low, axis=0)))
    tl.store(extremes + number + channel, tl.where(is_nan, float('nan'), tl.max(high, axis=0)))


@triton.jit
def _low_and_span(
    of_channels: tl.tensor,
    number: tl.tensor,
    stride: tl.tensor,
    groups: tl.tensor,
    elements: tl.tensor,
    group_size: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Of each element's channel, [G, P, C]."""
    first = groups * group_size
    in_group = (elements - first[:, None, None]).to(tl.int32)
    in_period = (first % (number * stride)).to(tl.int32)[:, None, None] + in_group
    channels = in_period // stride % number
    low = tl.load(of_channels + channels).to(tl.float32)
    return low, tl.load(of_channels + number + channels).to(tl.float32) - low


@triton.jit(do_not_specialize=['number', 'stride', 'numel', 'seed'])
def _quantize(
    flat: tl.tensor,
    packed: tl.tensor,
    extremes: tl.tensor,
    of_channels: tl.tensor,
    number: tl.tensor,
    stride: tl.tensor,
    numel: tl.tensor,
    seed: tl.tensor,
    by_channel: tl.constexpr,
    stochastic: tl.constexpr,
    bits: tl.constexpr,
    group_size: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    top: tl.constexpr = 2**bits - 1
    groups, elements, is_element, bytes_, is_byte = _places(numel, bits, group_size, rows, columns)
    values = tl.load(flat + elements, mask=is_element, other=0).to(tl.float32)
    if by_channel:
        low, span = _low_and_span(of_channels, number, stride, groups, elements, group_size)
        per_unit = tl.div_rn(tl.full(span.shape, 1.0, tl.float32), span)
        values = (values - low) * tl.where(span < _LEAST_NORMAL, 0.0, per_unit)
    low = tl.min(tl.min(tl.where(is_element, values, float('inf')), axis=2), axis=1)
    high = tl.max(tl.max(tl.where(is_element, values, float('-inf')), axis=2), axis=1)
    nans = tl.sum(tl.sum((values != values).to(tl.int32), axis=2), axis=1)
    low = tl.where(nans > 0, float('nan'), low)
    high = tl.where(nans > 0, float('nan'), high)
    count = tl.cdiv(numel, group_size)
    tl.store(extremes + groups, low, mask=groups < count)
    tl.store(extremes + count + groups, high, mask=groups < count)
    low, shrink, per_unit, _ = _bounds(low, high, bits)
    steps = (values * shrink - low) * per_unit
    if stochastic:
        steps += _noise(seed, rows, 8 // bits, columns)
    else:
        steps += 0.5
    levels = tl.where(steps < top, steps, top).to(tl.int32)  # NaN becomes the top
    levels = tl.where(is_element, levels, 0) << (tl.arange(0, 8 // bits) * bits)[None, :, None]
    tl.store(packed + bytes_, tl.sum(levels, axis=1).to(tl.uint8), mask=is_byte)


@triton.jit(do_not_specialize=['number', 'stride', 'numel'])
def _dequantize(
    packed: tl.tensor,
    extremes: tl.tensor,
    of_channels: tl.tensor,
    number: tl.tensor,
    stride: tl.tensor,
    flat: tl.tensor,
    numel: tl.tensor,
    by_channel: tl.constexpr,
    bits: tl.constexpr,
    group_size: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    groups, elements, is_element, bytes_, is_byte = _places(numel, bits, group_size, rows, columns)
    count = tl.cdiv(numel, group_size)
    low = tl.load(extremes + groups, mask=groups < count, other=0).to(tl.float32)
    high = tl.load(extremes + count + groups, mask=groups < count, other=0).to(tl.float32)
    low, shrink, _, step = _bounds(low, high, bits)
    packed_levels = tl.load(packed + bytes_, mask=is_byte, other=0).to(tl.int32)
    levels = packed_levels[:, None, :] >> (tl.arange(0, 8 // bits) * bits)[None, :, None]
    values = ((levels & (2**bits - 1)).to(tl.float32) * step + low) / shrink
    if by_channel:
        low, span = _low_and_span(of_channels, number, stride, groups, elements, group_size)
        values = values * span + low
    tl.store(flat + elements, values, mask=is_element)
