"""DropIT's largest elements of a whole tensor: what ``top_k.largest`` and
``kept_positions.take`` do, and the way back from bits, ``kept_positions.Bitmap``.

The least that is kept is found by some bits of a magnitude after others, from the highest: in each
pass every program counts, of its share, the elements that begin with the bits found so far, by
whether their next ones are at least those of each bin. What stands before a program's share follows
from the counts of the programs before it. Of those that are equal to the least, the first are kept.

Legend: n elements, k of them kept, p pages of 256 elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memengine.techniques.codecs.bit_packing import pack_bits, packed_numel, truths_in_order
from memengine.techniques.codecs.top_k import INTEGER_OF

__all__ = [
    'MOST_SCATTERING',
    'compare_with_eager',
    'largest_of_all',
    'scatter',
    'share_of',
    'sum_before',
]

_PAGE = 256
_TILE = 16 * _PAGE  # elements that a program has at once
_MOST_COUNTING = 128  # programs: each reads the counts of all others
MOST_SCATTERING = 1024  # programs, each of which reads the counts of those before it
_LEAST_SHARE = 8 * _TILE  # of a program that counts: below it, others' counts are more to read


def largest_of_all(
    flat: Tensor, kept: int, as_offsets: bool, share: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The elements of largest magnitude, in rising order of their places.

    Args:
        flat: ``[n]``, of float32, bfloat16 or float16; fewer than ``2 ** 31``.
        kept: k, from 1 to n.
        as_offsets: How places are given.
        share: Elements of a program, a multiple of 4,096; None chooses.

    Returns:
        The elements, ``[k]``, and either uint8 ``[k]``, their places in pages, with int16 ``[p]``,
        how many each page has, or a bit for each element, in order, with as much for each 4,096.

    Cost: kernels that read the tensor, and no others: of fp32 four, of 16 bits three. Beside what
    is returned, 3 MiB at most, for 16 bits a quarter.
    """
    numel = flat.numel()
    integers = flat.view(INTEGER_OF[flat.dtype])
    share = share or max(_LEAST_SHARE, share_of(numel, _MOST_COUNTING))
    programs = triton.cdiv(numel, share)
    passes, width = (3, 11) if flat.element_size() == 4 else (2, 8)
    how = dict(passes=passes, width=width, tile=_TILE, most=_MOST_COUNTING, num_warps=8)
    counts = integers.new_empty(passes, programs, 1 << width, dtype=torch.int32)
    found = counts.new_empty(passes, 2)
    values = flat.new_empty(kept)
    bits = flat.new_empty(0 if as_offsets else packed_numel(numel, 1), dtype=torch.uint8)
    offsets = flat.new_empty(kept if as_offsets else 0, dtype=torch.uint8)
    page = _PAGE if as_offsets else _TILE
    of_pages = flat.new_empty(triton.cdiv(numel, page), dtype=torch.int16)
    asked = integers, counts, found, numel, kept, share
    with torch.cuda.device_of(flat):
        for number in range(passes):
            _count[programs,](*asked, number=number, **how)
        places = values.view(integers.dtype), offsets, of_pages, bits
        _take[programs,](*asked, *places, as_offsets=as_offsets, page=page, **how)
    return values, offsets if as_offsets else bits, of_pages


def scatter(
    values: Tensor,
    bits: Tensor,
    counts: Tensor | None,
    flat: Tensor,
    in_order: bool,
    share: int | None = None,
) -> Tensor:
    """Put values, ``[k]`` in the order of their places, where bits are set, and zeros elsewhere.

    Args:
        values: ``[k]``.
        bits: A bit for each element.
        counts: How many are set of each 4,096, int16, where that is known.
        flat: ``[n]``, written to throughout; fewer than ``2 ** 31``.
        in_order: As of a ``Bitmap``.
        share: As in :func:`largest_of_all`.

    Cost: one kernel, and one to count.
    """
    share = share or share_of(flat.numel(), MOST_SCATTERING)
    settings = dict(in_order=in_order, tile=_TILE)
    with torch.cuda.device_of(flat):
        if counts is None:
            counts = bits.new_empty(triton.cdiv(flat.numel(), _TILE), dtype=torch.int16)
            _count_bits[len(counts),](bits, counts, flat.numel(), **settings)
        programs = triton.cdiv(flat.numel(), share)
        _scatter[programs,](bits, counts, values, flat, flat.numel(), share, **settings)
    return flat


def share_of(numel: int, most: int, at_once: int = _TILE) -> int:
    """Elements of each of at most so many programs, a multiple of what one has at once."""
    return triton.cdiv(triton.cdiv(numel, most), at_once) * at_once


def compare_with_eager(like: Tensor) -> None:
    """Compare with torch's ``topk`` on some pages, where `like` lies and in its dtype.

    Raises:
        ArithmeticError: When other elements are kept, or are said to lie elsewhere.
    """
    numel, share = 4 * _TILE + 333, 2 * _TILE  # three programs, of which the last has a rest
    steps = torch.arange(1, numel + 1, device=like.device)
    ties = (steps * 7 % 5 - 2).to(like.dtype)
    spread = steps.mul(0.37).sin().mul(steps % 97).to(like.dtype)
    spread[3], spread[700] = float('inf'), -torch.finfo(like.dtype).max
    integer = INTEGER_OF[like.dtype]
    for flat, kept in ((spread, numel // 10), (spread, numel // 2), (ties, 1000), (ties, numel)):
        keys = flat.view(integer) & torch.iinfo(integer).max
        expected = keys.topk(kept).values
        values, bits, counts = largest_of_all(flat, kept, False, share)
        kept_there = truths_in_order(bits, 0, numel)
        positions = kept_there.nonzero()[:, 0]
        right = len(positions) == kept and torch.equal(keys[positions].sort(0, True)[0], expected)
        right = right and torch.equal(values, flat[positions])
        in_planes = pack_bits(kept_there, 1)
        for packed, known, in_order in ((bits, counts, True), (in_planes, None, False)):
            decoded = scatter(values, packed, known, torch.full_like(flat, 5), in_order, share)
            right = right and torch.equal(decoded[positions], values)
            right = right and int((decoded != 0).sum()) == int((values != 0).sum())
        again, offsets, counts = largest_of_all(flat, kept, True, share)
        pages = torch.arange(len(counts), device=like.device).repeat_interleave(counts.long())
        right = right and torch.equal(again, values)
        if not right or not torch.equal(pages * _PAGE + offsets, positions):
            raise ArithmeticError(f'the largest of all of {like.dtype} are not what they were')


@triton.jit
def _keys(flat: tl.tensor, places: tl.tensor, numel: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Bits of elements, and as integers their magnitudes, below zero beyond the last."""
    bits = tl.load(flat + places, mask=places < numel, other=0)
    highest: tl.constexpr = 0x7FFFFFFF if flat.dtype.element_ty == tl.int32 else 0x7FFF
    return bits, tl.where(places < numel, bits.to(tl.int32) & highest, -1)


@triton.jit
def _places(share: tl.tensor, start: tl.tensor, tile: tl.constexpr) -> tl.tensor:
    """Of the elements of a tile in a program's share, [tile]."""
    return tl.program_id(0).to(tl.int64) * share + start + tl.arange(0, tile)


@triton.jit
def _next(
    counts: tl.tensor,
    found: tl.tensor,
    kept: tl.tensor,
    programs: tl.tensor,
    number: tl.constexpr,
    width: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The highest bits of the least that is kept, after so many passes, and how many that begin so
    are."""
    bins: tl.constexpr = 1 << width
    highest, wanted = kept * 0, kept
    if number > 0:
        if number > 1:
            highest = tl.load(found + 2 * (number - 1))
            wanted = tl.load(found + 2 * (number - 1) + 1)
        bin = tl.arange(0, bins)
        at_least = tl.zeros((bins,), tl.int32)
        for first in range(0, programs, 8):
            program = first + tl.arange(0, 8)[:, None]
            row = counts + ((number - 1) * programs + program) * bins + bin[None, :]
            at_least += tl.sum(tl.load(row, mask=program < programs, other=0), axis=0)
        digit = tl.sum((at_least >= wanted).to(tl.int32), axis=0) - 1
        wanted -= tl.sum(tl.where(bin == digit + 1, at_least, 0), axis=0)
        highest = highest * bins + digit
    return highest, wanted


@triton.jit
def _before(
    counts: tl.tensor,
    digit: tl.tensor,
    number: tl.constexpr,
    bins: tl.constexpr,
    most: tl.constexpr,
) -> tl.tensor:
    """How many elements before the program's share a pass has counted from a digit on."""
    program = tl.arange(0, most)
    programs = tl.where(digit < bins, tl.program_id(0), 0)
    row = counts + (number * tl.num_programs(0) + program) * bins
    return tl.sum(tl.load(row + digit, mask=program < programs, other=0), axis=0)


@triton.jit(do_not_specialize=['numel', 'kept', 'share'])
def _count(
    flat: tl.tensor,
    counts: tl.tensor,
    found: tl.tensor,
    numel: tl.tensor,
    kept: tl.tensor,
    share: tl.tensor,
    number: tl.constexpr,
    passes: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
    most: tl.constexpr,
) -> None:
    bins: tl.constexpr = 1 << width
    shift: tl.constexpr = width * (passes - 1 - number)
    program, programs = tl.program_id(0), tl.num_programs(0)
    highest, wanted = _next(counts, found, kept, programs, number, width)
    if number > 0 and program == 0:  # for the next pass
        tl.store(found + 2 * number, highest)
        tl.store(found + 2 * number + 1, wanted)
    seen = tl.zeros((2 * bins,), tl.int32)
    for start in range(0, share, tile):
        _, keys = _keys(flat, _places(share, start, tile), numel)
        is_next = keys >= 0
        if number > 0:
            is_next = is_next & ((keys >> (shift + width)) == highest)
        digit = (keys >> shift) & (bins - 1)
        seen += tl.histogram(tl.where(is_next, digit, bins), 2 * bins)
    bin = tl.arange(0, 2 * bins)
    at_least = tl.cumsum(tl.where(bin < bins, seen, 0), 0, reverse=True)
    tl.store(counts + (number * programs + program) * bins + bin, at_least, mask=bin < bins)


@triton.jit(do_not_specialize=['numel', 'kept', 'share'])
def _take(
    flat: tl.tensor,
    counts: tl.tensor,
    found: tl.tensor,
    numel: tl.tensor,
    kept: tl.tensor,
    share: tl.tensor,
    values: tl.tensor,
    offsets: tl.tensor,
    of_pages: tl.tensor,
    packed: tl.tensor,
    as_offsets: tl.constexpr,
    passes: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
    most: tl.constexpr,
    page: tl.constexpr,
) -> None:
    bins: tl.constexpr = 1 << width
    pages: tl.constexpr = tile // page
    least, wanted = _next(counts, found, kept, tl.num_programs(0), passes, width)
    done = kept * 0
    for number in tl.static_range(passes):
        digit = (least >> (width * (passes - 1 - number))) & (bins - 1)
        done += _before(counts, digit + 1, number, bins, most)
    lowest = least & (bins - 1)
    ties = _before(counts, lowest, passes - 1, bins, most)
    ties -= _before(counts, lowest + 1, passes - 1, bins, most)
    done += tl.minimum(ties, wanted)
    for start in range(0, share, tile):
        places = _places(share, start, tile)
        bits, keys = _keys(flat, places, numel)
        is_tie = keys == least
        rank = ties + tl.cumsum(is_tie.to(tl.int32), 0)  # from 1
        is_kept = (keys > least) | (is_tie & (rank <= wanted))
        target = done + tl.cumsum(is_kept.to(tl.int32), 0) - 1
        tl.store(values + target, bits, mask=is_kept)
        count = tl.sum(tl.reshape(is_kept.to(tl.int32), (pages, page)), axis=1)
        own = (tl.program_id(0).to(tl.int64) * share + start) // page + tl.arange(0, pages)
        tl.store(of_pages + own, count.to(tl.int16), mask=own * page < numel)
        if as_offsets:
            tl.store(offsets + target, (places & (page - 1)).to(tl.uint8), mask=is_kept)
        else:
            bit = tl.reshape(is_kept.to(tl.int32), (tile // 8, 8)) << tl.arange(0, 8)[None, :]
            own = (tl.program_id(0).to(tl.int64) * share + start) // 8 + tl.arange(0, tile // 8)
            tl.store(packed + own, tl.sum(bit, axis=1).to(tl.uint8), mask=own * 8 < numel)
        ties += tl.sum(is_tie.to(tl.int32), axis=0)
        done += tl.sum(is_kept.to(tl.int32), axis=0)


@triton.jit
def _bits_of(
    packed: tl.tensor, places: tl.tensor, numel: tl.tensor, in_order: tl.constexpr
) -> tl.tensor:
    """Of elements, 0 or 1, and 0 beyond the last."""
    if in_order:
        place, bit = places // 8, places % 8
    else:
        size = (numel + 7) // 8
        place, bit = places % size, places // size
    byte = tl.load(packed + place, mask=places < numel, other=0).to(tl.int32)
    return (byte >> bit.to(tl.int32)) & 1


@triton.jit
def sum_before(counts: tl.tensor, last: tl.tensor, some: tl.constexpr) -> tl.tensor:
    """Of how many the counts before one tell, which are read so many at a time."""
    total = tl.zeros((some,), tl.int32)
    for first in range(0, last, some):
        place = first + tl.arange(0, some)
        total += tl.load(counts + place, mask=place < last, other=0).to(tl.int32)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=['numel'])
def _count_bits(
    packed: tl.tensor,
    counts: tl.tensor,
    numel: tl.tensor,
    in_order: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    bits = _bits_of(packed, _places(tile, 0, tile), numel, in_order)
    tl.store(counts + tl.program_id(0), tl.sum(bits, axis=0).to(tl.int16))


@triton.jit(do_not_specialize=['numel', 'share'])
def _scatter(
    packed: tl.tensor,
    counts: tl.tensor,
    values: tl.tensor,
    flat: tl.tensor,
    numel: tl.tensor,
    share: tl.tensor,
    in_order: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    done = sum_before(counts, tl.program_id(0) * (share // tile), tile)
    for start in range(0, share, tile):
        places = _places(share, start, tile)
        bits = _bits_of(packed, places, numel, in_order)
        found = tl.load(values + done + tl.cumsum(bits, 0) - 1, mask=bits != 0, other=0)
        tl.store(flat + places, found, mask=places < numel)
        done += tl.sum(bits, axis=0)
