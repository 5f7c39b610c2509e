"""Quantise and pack, unpack and dequantise on a CPU: what ``codecs/quantized.py`` does, in C.

Bit for bit the same, noise included, in a quarter of the time or less.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memengine._torch_private.fake import is_fake
from memengine.techniques.codecs import quantized
from memengine.techniques.codecs.grids import noise_bits
from memengine.techniques.codecs.kernels.compile_c import compiled
from memengine.techniques.codecs.memory_order import Channels
from memengine.techniques.codecs.quantized import Case
from memengine.techniques.modules.private_random import private_generator

__all__ = ['compare_with_eager', 'dequantize', 'quantize']

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_PARTS = ctypes.POINTER(_LONG), _LONG
_CHANNELS = _POINTER, _POINTER, _LONG, _LONG
_THREADS = _INT, _POINTER


@cache
def _library() -> ctypes.CDLL:
    library = compiled(Path(__file__).with_suffix('.c'))
    library.quantize.argtypes = [
        *(_POINTER, _INT, _LONG, *_PARTS, _LONG, _INT),
        *(_POINTER, _POINTER, _POINTER, *_CHANNELS, *_THREADS),
    ]
    library.dequantize.argtypes = [
        *(_POINTER, _POINTER, _INT, _LONG, *_PARTS, _LONG, _INT, _POINTER, *_CHANNELS, *_THREADS)
    ]
    library.quantize.restype = library.dequantize.restype = None
    return library


@cache
def _team() -> int | None:
    """The address of what starts torch's threads; None where they are not those of OpenMP."""
    start = getattr(ctypes.CDLL(None), 'GOMP_parallel', None)
    return None if start is None else ctypes.cast(start, _POINTER).value


def quantize(
    flat: Tensor,
    bits: int,
    group_size: int,
    stochastic: bool,
    part_numel: int,
    channels: Channels | None = None,
) -> tuple[Tensor, Tensor]:
    """What :func:`memengine.techniques.codecs.quantized.quantize` gives, of float32 or bfloat16.

    Cost: reads the tensor once, in torch's threads.
    """
    numel = flat.numel()
    packed, extremes = quantized.empty_code(flat, bits, group_size, channels is not None)
    starts, parts = _starts(numel, bits, group_size, part_numel)
    ranges = None if channels is None else channels.low_and_span()
    noise = None
    if stochastic:  # as many as the parts would draw for their groups and places, one after another
        number = extremes.shape[1] + parts * group_size
        noise = noise_bits(number, private_generator(flat.device))
    if is_fake(flat):
        flat.sum()  # to those who count operators and bytes, the pass over it
        return packed, extremes
    _library().quantize(
        flat.data_ptr(),
        flat.dtype == torch.bfloat16,
        numel,
        starts,
        parts,
        group_size,
        bits,
        None if noise is None else noise.data_ptr(),
        packed.data_ptr(),
        extremes.data_ptr(),
        *_addresses(ranges),
        *_numbers(channels),
        torch.get_num_threads(),
        _team(),
    )
    return packed, extremes


def dequantize(
    packed: Tensor,
    extremes: Tensor,
    numel: int,
    bits: int,
    group_size: int,
    part_numel: int,
    channels: Channels | None = None,
) -> Tensor:
    """What :func:`memengine.techniques.codecs.quantized.dequantize` gives."""
    flat = quantized.empty_values(extremes, numel, channels)
    ranges = None if channels is None else channels.low_and_span()
    if is_fake(flat):
        return flat.zero_()  # the pass over it
    _library().dequantize(
        packed.data_ptr(),
        extremes.data_ptr(),
        flat.dtype == torch.bfloat16,
        numel,
        *_starts(numel, bits, group_size, part_numel),
        group_size,
        bits,
        flat.data_ptr(),
        *_addresses(ranges),
        *_numbers(channels),
        torch.get_num_threads(),
        _team(),
    )
    return flat


def _addresses(ranges: tuple[Tensor, Tensor] | None) -> tuple[int | None, int | None]:
    if ranges is None:
        return None, None
    low, span = ranges
    return low.data_ptr(), span.data_ptr()


def _numbers(channels: Channels | None) -> tuple[int, int]:
    return (0, 0) if channels is None else (channels.extremes.shape[1], channels.stride)


@lru_cache(maxsize=1024)  # steps code the same shapes again
def _starts(*how: int) -> tuple[ctypes.Array[ctypes.c_int64], int]:
    """The first element of each of :func:`quantized.parts`, and how many there are."""
    parts = quantized.parts(*how)
    return (_LONG * len(parts))(*(part.elements.start for part in parts)), len(parts)


def compare_with_eager(like: Tensor, bits: int, group_size: int, by_channel: bool) -> None:
    """Compare with torch's operations on a few groups, in the dtype of `like`.

    Raises:
        ArithmeticError: When one bit differs.
    """
    cases = quantized.cases_to_compare(like, group_size, by_channel)
    generator = private_generator(like.device)
    state = generator.get_state()

    def extremes_and_values(by: Any, case: Case, stochastic: bool) -> tuple[Tensor, Tensor]:
        how, at_once = (bits, group_size), (4 * group_size, case.channels)
        packed, extremes = by.quantize(case.flat, *how, stochastic, *at_once)
        generator.set_state(state)
        return extremes, by.dequantize(packed, extremes, case.flat.numel(), *how, *at_once)

    for case, stochastic in itertools.product(cases, (False, True)):
        ways = quantized, sys.modules[__name__]
        both = (extremes_and_values(by, case, stochastic) for by in ways)
        for expected, found in zip(*both, strict=True):
            finite = expected.isfinite()
            if not (
                torch.equal(finite, found.isfinite())
                and torch.equal(expected[finite], found[finite])
            ):
                raise ArithmeticError(f'{bits} bits of {like.dtype} are not what they were to be')
