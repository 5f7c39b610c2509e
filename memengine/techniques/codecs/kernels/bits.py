"""One bit for each element, what a test says of it, and back to two values: a kernel each way.

They lie in bytes as ``codecs/bit_packing.py`` puts them: a byte holds one of each eighth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memengine.techniques.codecs.bit_packing import pack_truths, packed_numel
from memengine.techniques.codecs.lossless import INTEGER_OF_SIZE, Within, of_two_values

__all__ = ['compare_with_eager', 'pack_within', 'select']

_BLOCK = 256  # bytes of a program


def pack_within(flat: Tensor, test: Within) -> Tensor:
    """What ``pack_truths(flat, test)`` gives, for ``[n]`` of booleans or at most 32 bits each."""
    packed = flat.new_empty(packed_numel(flat.numel(), 1), dtype=torch.uint8)
    if packed.numel():
        elements = flat.view(torch.uint8) if flat.dtype == torch.bool else flat
        high = 0.0 if test.high is None else test.high
        with torch.cuda.device_of(flat):
            _pack_within[triton.cdiv(packed.numel(), _BLOCK),](
                elements,
                packed,
                flat.numel(),
                float(test.low),
                float(high),
                bounded=test.high is not None,
                nan=test.nan,
                block=_BLOCK,
            )
    return packed


def select(packed: Tensor, numel: int, off: int, on: int, integer: torch.dtype) -> Tensor:
    """What ``of_two_values`` gives: for each bit one of two integers, ``[n]``."""
    chosen = packed.new_empty(numel, dtype=integer)
    if numel:
        with torch.cuda.device_of(packed):
            _select[triton.cdiv(packed.numel(), _BLOCK),](
                packed, chosen, numel, off, on, block=_BLOCK
            )
    return chosen


def compare_with_eager(like: Tensor, dtype: torch.dtype) -> None:
    """Compare with the eager form on a few bytes, where `like` lies, for elements of a dtype.

    Raises:
        ArithmeticError: When a bit or a value is another.
    """
    numel = 8 * _BLOCK + 8 * 5 + 3
    flat = torch.arange(numel, device=like.device).mul(0.37).sin().mul(4)
    flat[5:9], flat[9], flat[10], flat[11] = 0, float('nan'), float('inf'), -float('inf')
    flat[12:20], flat[20:30], flat[30:40] = 2, -1, 1
    flat = flat > 0 if dtype == torch.bool else flat.to(dtype)
    tests = (Within(0), Within(0, nan=False), Within(-1, 2), Within(0.1, 0.7))
    for test in tests[:2] if dtype == torch.bool else tests:
        if not torch.equal(pack_within(flat, test), pack_truths(flat, test)):
            raise ArithmeticError(f'bits of {dtype} are not what they were to be')
    integer = INTEGER_OF_SIZE[dtype.itemsize]
    bits = pack_truths(flat, tests[0])
    for two in [(0, 1), (torch.iinfo(integer).max, torch.iinfo(integer).max // 3)]:
        if not torch.equal(
            select(bits, numel, *two, integer), of_two_values(bits, numel, *two, integer)
        ):
            raise ArithmeticError(f'values of {dtype} for bits are not what they were to be')


@triton.jit(do_not_specialize=['numel'])
def _pack_within(
    flat: tl.tensor,
    packed: tl.tensor,
    numel: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    bounded: tl.constexpr,
    nan: tl.constexpr,
    block: tl.constexpr,
) -> None:
    size = (numel + 7) // 8
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    byte = tl.zeros((block,), tl.int32)
    for plane in tl.static_range(8):
        element = place + plane * size
        is_element = (place < size) & (element < numel)
        value = tl.load(flat + element, mask=is_element, other=0).to(tl.float32)
        within = value > low
        if bounded:
            within = within & (value < high)
        if nan:
            within = within | (value != value)
        byte |= (within & is_element).to(tl.int32) << plane
    tl.store(packed + place, byte.to(tl.uint8), mask=place < size)


@triton.jit(do_not_specialize=['numel', 'off', 'on'])
def _select(
    packed: tl.tensor,
    chosen: tl.tensor,
    numel: tl.tensor,
    off: tl.tensor,
    on: tl.tensor,
    block: tl.constexpr,
) -> None:
    size = (numel + 7) // 8
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    byte = tl.load(packed + place, mask=place < size, other=0).to(tl.int32)
    for plane in tl.static_range(8):
        element = place + plane * size
        value = tl.where((byte >> plane) & 1 != 0, on, off).to(chosen.dtype.element_ty)
        tl.store(chosen + element, value, mask=(place < size) & (element < numel))
