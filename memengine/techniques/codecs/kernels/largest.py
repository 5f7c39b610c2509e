"""DropIT's largest elements of a whole tensor: what ``top_k.largest`` and ``places.take`` do,
and the way back from bits, ``places.Bitmap``.

The least that is kept is found by eight bits of a magnitude after eight, from the highest: each
pass counts the elements that begin with the bits found so far by the next eight. Of those that are
equal to the least, the first are kept.

Legend: n elements, k of them kept, p pages of 256 elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memengine.techniques.codecs.bit_packing import packed_numel, unpack_bits
from memengine.techniques.codecs.top_k import INTEGER_OF

__all__ = ['largest_of_all', 'prove', 'scatter']

_PAGE = 256
_PAGES = 8  # of a program


def largest_of_all(flat: Tensor, kept: int, as_offsets: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The elements of largest magnitude, in rising order of their places.

    Args:
        flat: ``[n]``, of float32, bfloat16 or float16; fewer than ``2 ** 31``.
        kept: k, from 1 to n.
        as_offsets: How places are given.

    Returns:
        The elements, ``[k]``, and either uint8 ``[k]``, their places in pages, with int16 ``[p]``,
        how many each page has, or a bit for each element, as ``pack_bits`` packs them, and nothing.

    Cost: a kernel that reads the tensor for each byte of an element and two more, for bits three,
    and two small ones. Beside what is returned, 8 bytes for 2,048 elements and 4 KiB.
    """
    numel, passes = flat.numel(), flat.element_size()
    integers = flat.view(INTEGER_OF[flat.dtype])
    counts = flat.new_zeros(passes + 1, _PAGE, dtype=torch.int32)
    values = flat.new_empty(kept)
    pages = triton.cdiv(numel, _PAGE)
    bits = flat.new_empty(0 if as_offsets else packed_numel(numel, 1), dtype=torch.uint8)
    offsets = flat.new_empty(kept if as_offsets else 0, dtype=torch.uint8)
    of_pages = flat.new_empty(pages if as_offsets else 0, dtype=torch.int16)
    programs = triton.cdiv(pages, _PAGES)
    sums = counts.new_empty(2, programs)
    how = dict(passes=passes, page=_PAGE)
    with torch.cuda.device_of(flat):
        for number in range(passes):
            _count[programs,](integers, counts, numel, kept, number=number, pages=_PAGES, **how)
        _weigh[programs,](integers, counts, sums, numel, kept, pages=_PAGES, **how)
        ends = sums.cumsum(1, dtype=torch.int32)
        _take[programs,](
            integers,
            counts,
            ends,
            values.view(integers.dtype),
            offsets,
            of_pages,
            numel,
            kept,
            as_offsets=as_offsets,
            pages=_PAGES,
            **how,
        )
        if not as_offsets:
            _put_bits[triton.cdiv(len(bits), _PAGE),](integers, counts, bits, numel, kept, **how)
    return values, offsets if as_offsets else bits, of_pages


def scatter(values: Tensor, bits: Tensor, flat: Tensor) -> Tensor:
    """Put values, ``[k]`` in the order of their places, where bits are set; two kernels, and a sum.

    Args:
        values: ``[k]``.
        bits: A bit for each element, as ``pack_bits`` packs them.
        flat: ``[n]``, written to throughout; fewer than ``2 ** 31``.
    """
    programs = triton.cdiv(flat.numel(), _PAGE * _PAGES)
    sums = bits.new_empty(programs, dtype=torch.int32)
    how = dict(pages=_PAGES, page=_PAGE)
    with torch.cuda.device_of(flat):
        _count_bits[programs,](bits, sums, flat.numel(), **how)
        ends = sums.cumsum(0, dtype=torch.int32)
        _scatter[programs,](bits, ends, values, flat, flat.numel(), **how)
    return flat


def prove(like: Tensor) -> None:
    """Compare with torch's ``topk`` on some pages, where `like` lies and in its dtype.

    Raises:
        ArithmeticError: When other elements are kept, or are said to lie elsewhere.
    """
    numel = _PAGE * (2 * _PAGES + 1) + 77
    steps = torch.arange(1, numel + 1, device=like.device)
    ties = (steps * 7 % 5 - 2).to(like.dtype)
    spread = steps.mul(0.37).sin().mul(steps % 97).to(like.dtype)
    spread[3], spread[700] = float('inf'), -torch.finfo(like.dtype).max
    integer = INTEGER_OF[like.dtype]
    for flat, kept in ((spread, numel // 10), (spread, numel // 2), (ties, 1000), (ties, numel)):
        keys = flat.view(integer) & torch.iinfo(integer).max
        expected = keys.topk(kept).values
        values, bits, _ = largest_of_all(flat, kept, as_offsets=False)
        positions = unpack_bits(bits, 1, numel).nonzero()[:, 0]
        right = len(positions) == kept and torch.equal(keys[positions].sort(0, True)[0], expected)
        right = right and torch.equal(values, flat[positions])
        decoded = scatter(values, bits, torch.full_like(flat, 5))
        right = right and torch.equal(decoded[positions], values)
        right = right and int((decoded != 0).sum()) == int((values != 0).sum())
        again, offsets, counts = largest_of_all(flat, kept, as_offsets=True)
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
def _least(
    counts: tl.tensor, kept: tl.tensor, number: tl.constexpr, page: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The highest `number` bytes of the least that is kept, and how many that begin so are."""
    byte = tl.arange(0, page)
    found, wanted = kept * 0, kept
    for done in tl.static_range(number):
        count = tl.load(counts + done * page + byte)
        at_least = tl.cumsum(count, 0, reverse=True)
        digit = tl.sum((at_least >= wanted).to(tl.int32), axis=0) - 1
        wanted -= tl.sum(tl.where(byte > digit, count, 0), axis=0)
        found = found * page + digit
    return found, wanted


@triton.jit
def _places(pages: tl.constexpr, page: tl.constexpr) -> tl.tensor:
    """Of a program's elements, [pages * page]."""
    return tl.program_id(0).to(tl.int64) * pages * page + tl.arange(0, pages * page)


@triton.jit(do_not_specialize=['numel', 'kept'])
def _count(
    flat: tl.tensor,
    counts: tl.tensor,
    numel: tl.tensor,
    kept: tl.tensor,
    number: tl.constexpr,
    passes: tl.constexpr,
    pages: tl.constexpr,
    page: tl.constexpr,
) -> None:
    _, keys = _keys(flat, _places(pages, page), numel)
    shift: tl.constexpr = 8 * (passes - 1 - number)
    byte = (keys >> shift) & 255
    found, _ = _least(counts, kept, number, page)
    is_next = keys >= 0
    if number > 0:
        is_next = is_next & ((keys >> (shift + 8)) == found)
    seen = tl.histogram(tl.where(is_next, byte, page), 2 * page)
    bins = tl.arange(0, 2 * page)
    is_counted = (bins < page) & (seen > 0)
    tl.atomic_add(counts + number * page + bins, seen, mask=is_counted)


@triton.jit(do_not_specialize=['numel', 'kept'])
def _weigh(
    flat: tl.tensor,
    counts: tl.tensor,
    sums: tl.tensor,
    numel: tl.tensor,
    kept: tl.tensor,
    passes: tl.constexpr,
    pages: tl.constexpr,
    page: tl.constexpr,
) -> None:
    """How many elements of each program are above the least, and how many equal it."""
    _, keys = _keys(flat, _places(pages, page), numel)
    least, _ = _least(counts, kept, passes, page)
    above = tl.sum((keys > least).to(tl.int32), axis=0)
    ties = tl.sum((keys == least).to(tl.int32), axis=0)
    tl.store(sums + tl.program_id(0), above)
    tl.store(sums + tl.num_programs(0) + tl.program_id(0), ties)


@triton.jit(do_not_specialize=['numel', 'kept'])
def _take(
    flat: tl.tensor,
    counts: tl.tensor,
    ends: tl.tensor,
    values: tl.tensor,
    offsets: tl.tensor,
    of_pages: tl.tensor,
    numel: tl.tensor,
    kept: tl.tensor,
    as_offsets: tl.constexpr,
    passes: tl.constexpr,
    pages: tl.constexpr,
    page: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    places = _places(pages, page)
    bits, keys = _keys(flat, places, numel)
    least, wanted = _least(counts, kept, passes, page)
    above = tl.load(ends + program - 1, mask=program > 0, other=0)
    ties = tl.load(ends + tl.num_programs(0) + program - 1, mask=program > 0, other=0)
    is_tie = keys == least
    rank = ties + tl.cumsum(is_tie.to(tl.int32), 0)  # from 1
    is_kept = (keys > least) | (is_tie & (rank <= wanted))
    target = above + tl.minimum(ties, wanted) + tl.cumsum(is_kept.to(tl.int32), 0) - 1
    tl.store(values + target, bits, mask=is_kept)
    if as_offsets:
        tl.store(offsets + target, (places & (page - 1)).to(tl.uint8), mask=is_kept)
        count = tl.sum(tl.reshape(is_kept.to(tl.int32), (pages, page)), axis=1)
        own = program.to(tl.int64) * pages + tl.arange(0, pages)
        tl.store(of_pages + own, count.to(tl.int16), mask=own * page < numel)
    else:  # the place of the last tie that is kept, for _put_bits
        last = counts + passes * page + tl.zeros_like(keys)
        tl.store(last, places.to(tl.int32), mask=is_tie & (rank == wanted))


@triton.jit(do_not_specialize=['numel', 'kept'])
def _put_bits(
    flat: tl.tensor,
    counts: tl.tensor,
    packed: tl.tensor,
    numel: tl.tensor,
    kept: tl.tensor,
    passes: tl.constexpr,
    page: tl.constexpr,
) -> None:
    least, _ = _least(counts, kept, passes, page)
    last = tl.load(counts + passes * page)
    size = (numel + 7) // 8
    place = tl.program_id(0).to(tl.int64) * page + tl.arange(0, page)
    byte = tl.zeros((page,), tl.int32)
    for plane in tl.static_range(8):
        element = tl.where(place < size, place + plane * size, numel)
        _, keys = _keys(flat, element, numel)
        is_kept = (keys > least) | ((keys == least) & (element <= last))
        byte |= is_kept.to(tl.int32) << plane
    tl.store(packed + place, byte.to(tl.uint8), mask=place < size)


@triton.jit
def _bits_of(packed: tl.tensor, places: tl.tensor, numel: tl.tensor) -> tl.tensor:
    """Of elements, 0 or 1, and 0 beyond the last."""
    size = (numel + 7) // 8
    byte = tl.load(packed + places % size, mask=places < numel, other=0).to(tl.int32)
    return (byte >> (places // size).to(tl.int32)) & 1


@triton.jit(do_not_specialize=['numel'])
def _count_bits(
    packed: tl.tensor, sums: tl.tensor, numel: tl.tensor, pages: tl.constexpr, page: tl.constexpr
) -> None:
    bits = _bits_of(packed, _places(pages, page), numel)
    tl.store(sums + tl.program_id(0), tl.sum(bits, axis=0))


@triton.jit(do_not_specialize=['numel'])
def _scatter(
    packed: tl.tensor,
    ends: tl.tensor,
    values: tl.tensor,
    flat: tl.tensor,
    numel: tl.tensor,
    pages: tl.constexpr,
    page: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    places = _places(pages, page)
    bits = _bits_of(packed, places, numel)
    before = tl.load(ends + program - 1, mask=program > 0, other=0)
    found = tl.load(values + before + tl.cumsum(bits, 0) - 1, mask=bits != 0, other=0)
    tl.store(flat + places, found, mask=places < numel)
