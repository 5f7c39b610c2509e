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
from memengine.techniques.codecs.bit_packing import packed_numel
from memengine.techniques.modules.private_random import private_seed

__all__ = ['compare_with_eager', 'dequantize', 'quantize']

_TILE_NUMEL = 2048


def quantize(
    flat: Tensor, bits: int, group_size: int, stochastic: bool, seed: int | None = None
) -> tuple[Tensor, Tensor]:
    """Levels of each group between its extremes, packed group by group.

    Args:
        flat: ``[n]``, of float32, bfloat16 or float16.
        bits: 8, 4, 2 or 1.
        group_size: A multiple of 8; the last group may be shorter.
        stochastic: Round up or down at random, by 16 bits of Philox for each element. They are a
            function of the seed and of the element's place.
        seed: By default the next of the techniques' own.

    Returns:
        The levels in bytes, and the extremes, [2, groups].

    Cost: one kernel, which reads the tensor once.
    """
    groups = -(-flat.numel() // group_size)
    packed = flat.new_empty(packed_numel(flat.numel(), bits), dtype=torch.uint8)
    extremes = flat.new_empty(2, groups)
    if groups:
        seed = (private_seed(flat.device) if seed is None else seed) if stochastic else 2**62
        tile = _tile(bits, group_size)
        with torch.cuda.device_of(flat):
            _quantize[triton.cdiv(groups, tile['rows']),](
                flat, packed, extremes, flat.numel(), seed, stochastic=stochastic, **tile
            )
    return packed, extremes


def dequantize(packed: Tensor, extremes: Tensor, numel: int, bits: int, group_size: int) -> Tensor:
    """What :func:`quantize` packed, ``[n]`` in the dtype of the extremes; one kernel."""
    flat = extremes.new_empty(numel)
    if numel:
        tile = _tile(bits, group_size)
        with torch.cuda.device_of(flat):
            _dequantize[triton.cdiv(extremes.shape[1], tile['rows']),](
                packed, extremes, flat, numel, **tile
            )
    return flat


def compare_with_eager(like: Tensor, bits: int, group_size: int) -> None:
    """Compare with the eager form on a few groups, where `like` lies and in its dtype.

    Raises:
        ArithmeticError: When a kernel gives what the eager form does not.
    """
    numel = 9 * group_size + 11
    flat = torch.arange(numel, device=like.device).mul(0.37).sin().to(like.dtype)
    flat[group_size : 2 * group_size] = 0.3
    flat[2 * group_size + 5], flat[3 * group_size + 1] = float('nan'), float('inf')
    flat[4 * group_size], flat[4 * group_size + 2] = (torch.finfo(like.dtype).max, -100)
    expected, extremes = quantized.quantize(flat, bits, group_size, False, group_size)
    of_codes = quantized.dequantize(expected, extremes, numel, bits, group_size, group_size)
    finite = of_codes.isfinite()
    span = (extremes[1].double() - extremes[0].double()).repeat_interleave(group_size)[:numel]
    step = span[finite] / (2**bits - 1)
    rounding = of_codes[finite].double().abs() * torch.finfo(like.dtype).eps + span[finite] * 2**-20

    def check(decoded: Tensor, other: Tensor, tolerance: Tensor, what: str) -> None:
        error = (decoded[finite].double() - other[finite].double()).abs()
        if not bool((decoded.isfinite() == finite).all() & (error <= tolerance).all()):
            raise ArithmeticError(f'{what} in {bits} bits of {like.dtype} is not what it was to be')

    check(dequantize(expected, extremes, numel, bits, group_size), of_codes, rounding, 'decoding')
    nearest, found = quantize(flat, bits, group_size, stochastic=False)
    if not torch.equal(found.nan_to_num(), extremes.nan_to_num()):
        raise ArithmeticError(f'the extremes of {like.dtype} are not what they were to be')
    decoded = quantized.dequantize(nearest, found, numel, bits, group_size, group_size)
    check(decoded, flat, step * (0.5 + 2**-10) + rounding, 'rounding to the nearest')
    drawn = [quantize(flat, bits, group_size, stochastic=True, seed=2**62 + 1) for _ in range(2)]
    decoded = quantized.dequantize(drawn[0][0], found, numel, bits, group_size, group_size)
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


@triton.jit(do_not_specialize=['numel', 'seed'])
def _quantize(
    flat: tl.tensor,
    packed: tl.tensor,
    extremes: tl.tensor,
    numel: tl.tensor,
    seed: tl.tensor,
    stochastic: tl.constexpr,
    bits: tl.constexpr,
    group_size: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    top: tl.constexpr = 2**bits - 1
    groups, elements, is_element, bytes_, is_byte = _places(numel, bits, group_size, rows, columns)
    values = tl.load(flat + elements, mask=is_element, other=0).to(tl.float32)
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


@triton.jit(do_not_specialize=['numel'])
def _dequantize(
    packed: tl.tensor,
    extremes: tl.tensor,
    flat: tl.tensor,
    numel: tl.tensor,
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
    tl.store(flat + elements, values, mask=is_element)
