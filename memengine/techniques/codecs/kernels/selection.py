"""DropIT's largest elements of each block, and the way back to their places, in a kernel each.

Legend: n elements, r blocks of them, k elements that are kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memengine.techniques.codecs.kept_positions import BYTE_VALUES
from memengine.techniques.codecs.kernels.largest_values import (
    MOST_SCATTERING,
    share_of,
    sum_before,
)
from memengine.techniques.codecs.top_k import masks_of_blocks

__all__ = ['compare_with_eager', 'largest_of_blocks', 'scatter']

_TILE_NUMEL = 2048
_ROWS = 16  # blocks that are put back at once


def largest_of_blocks(
    flat: Tensor,
    size: int,
    kept: int,
    kept_of_last: int,
    as_offsets: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The largest of each block, as ``top_k.masks_of_blocks`` finds them, in rising order.

    Args:
        flat: ``[n]``, of float32, bfloat16 or float16.
        size: Elements of a block; the last one may be shorter.
        kept: How many of each.
        kept_of_last: How many of the last one, if it is shorter.
        as_offsets: How places are given.
        out: ``[k]``, which takes the elements.

    Returns:
        The elements, ``[k]``, and uint8: their places in blocks of at most 256, ``[k]``, or 1 where
        they are, ``[n]``.

    Cost: one kernel, which reads the tensor once.
    """
    full, rest = divmod(flat.numel(), size)
    total = full * kept + (kept_of_last if rest else 0)
    values = flat.new_empty(total) if out is None else out
    places = flat.new_empty(total if as_offsets else flat.numel(), dtype=torch.uint8)
    width = triton.next_power_of_2(size)
    rows = max(1, _TILE_NUMEL // width)
    with torch.cuda.device_of(flat):
        _largest_of_blocks[triton.cdiv(full + bool(rest), rows),](
            flat.view(torch.int32 if flat.element_size() == 4 else torch.int16),
            values.view(torch.int32 if flat.element_size() == 4 else torch.int16),
            places,
            flat.numel(),
            size,
            kept,
            kept_of_last,
            as_offsets=as_offsets,
            rows=rows,
            width=width,
        )
    return values, places


def scatter(
    values: Tensor,
    offsets: Tensor,
    counts: Tensor | int,
    block_size: int,
    flat: Tensor,
    share: int | None = None,
) -> Tensor:
    """Put values where ``kept_positions.Offsets`` says that they belong, and zeros elsewhere.

    Args:
        values: ``[k]``.
        offsets: uint8, ``[k]``, from the start of their block.
        counts: How many each block has: one number, or an int16 for each.
        block_size: Elements of a block, at most 256.
        flat: ``[n]``, written to throughout.
        share: Blocks of a program, a multiple of 16; None chooses.

    Cost: one kernel.
    """
    blocks = triton.cdiv(flat.numel(), block_size)
    share = share or share_of(blocks, MOST_SCATTERING, _ROWS)
    constant = isinstance(counts, int)
    with torch.cuda.device_of(flat):
        _scatter[triton.cdiv(blocks, share),](
            values,
            offsets,
            offsets if constant else counts,  # of the former none are read
            flat,
            flat.numel(),
            values.numel(),
            counts if constant else 0,
            block_size,
            share,
            constant=constant,
            rows=_ROWS,
            width=BYTE_VALUES,
            num_warps=8,
        )
    return flat


def compare_with_eager(like: Tensor, size: int) -> None:
    """Compare with the eager form on some blocks of `size`, where `like` lies and in its dtype.

    Raises:
        ArithmeticError: When other elements are kept, or come to lie elsewhere.
    """
    full, rest, kept = 35 * size, size // 2, max(1, size // 10)  # in several programs
    numel = full + rest
    flat = torch.arange(1, numel + 1, device=like.device).mul(0.37).sin().to(like.dtype)
    flat[3], flat[size : size + 7], flat[-1] = float('nan'), float('inf'), -2
    blocks = (flat[:full], size, kept), (flat[full:], rest, 1)
    masks = torch.cat([mask for block in blocks for mask in masks_of_blocks(*block)])
    positions = masks.nonzero()[:, 0]
    kept_only = torch.zeros_like(flat).index_copy_(0, positions, flat[positions]).nan_to_num()
    values, mask = largest_of_blocks(flat, size, kept, 1, as_offsets=False)
    right = torch.equal(mask.nonzero()[:, 0], positions)
    right &= torch.equal(values.nan_to_num(), flat[positions].nan_to_num())
    pages = torch.arange(0, numel + BYTE_VALUES, BYTE_VALUES, device=like.device)
    counts = torch.searchsorted(positions, pages).diff().to(torch.int16)
    offsets = (positions & (BYTE_VALUES - 1)).to(torch.uint8)
    decoded = scatter(values, offsets, counts, BYTE_VALUES, torch.full_like(flat, 5), 2 * _ROWS)
    right &= torch.equal(decoded.nan_to_num(), kept_only)
    if size <= BYTE_VALUES:
        code = largest_of_blocks(flat, size, kept, 1, as_offsets=True)
        decoded = scatter(*code, kept, size, torch.full_like(flat, 5))
        right &= torch.equal(decoded.nan_to_num(), kept_only)
    if not right:
        raise ArithmeticError(f'what is kept of {like.dtype} is not what it was to be')


@triton.jit(do_not_specialize=['numel', 'size', 'kept', 'kept_of_last'])
def _largest_of_blocks(
    flat: tl.tensor,
    values: tl.tensor,
    places: tl.tensor,
    numel: tl.tensor,
    size: tl.tensor,
    kept: tl.tensor,
    kept_of_last: tl.tensor,
    as_offsets: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
) -> None:
    block = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    first = block * size
    length = tl.minimum(tl.maximum(numel - first, 0), size).to(tl.int32)
    column = tl.arange(0, width)[None, :]
    is_element = column < length[:, None]
    elements = first[:, None] + column
    bits = tl.load(flat + elements, mask=is_element, other=0)
    keys = bits.to(tl.int32)
    if flat.dtype.element_ty == tl.int16:
        keys = keys << 16
    keys = (keys & 0x7FFFFFFF & (-width)) | column  # magnitudes, no two equal
    keys = tl.where(is_element, keys, -1)
    wanted = tl.where(length < size, kept_of_last, kept)
    least = tl.zeros((rows,), tl.int32)  # the key of the least that is kept, bit by bit
    for place in range(31):
        raised = least | (1 << (30 - place))
        enough = tl.sum((keys >= raised[:, None]).to(tl.int32), axis=1) >= wanted
        least = tl.where(enough, raised, least)
    is_kept = is_element & (keys >= least[:, None])
    target = (block * kept)[:, None] + tl.cumsum(is_kept.to(tl.int32), axis=1) - 1
    tl.store(values + target, bits, mask=is_kept)
    if as_offsets:
        tl.store(places + target, (column + tl.zeros_like(keys)).to(tl.uint8), mask=is_kept)
    else:
        tl.store(places + elements, is_kept.to(tl.uint8), mask=is_element)


@triton.jit(do_not_specialize=['numel', 'total', 'kept', 'block_size', 'share'])
def _scatter(
    values: tl.tensor,
    offsets: tl.tensor,
    counts: tl.tensor,
    flat: tl.tensor,
    numel: tl.tensor,
    total: tl.tensor,
    kept: tl.tensor,
    block_size: tl.tensor,
    share: tl.tensor,
    constant: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
) -> None:
    first = tl.program_id(0).to(tl.int64) * share
    blocks = (numel + block_size - 1) // block_size
    done = first * kept
    if not constant:
        done += sum_before(counts, first, rows * width)
    column = tl.arange(0, width)[None, :]
    for start in range(0, share, rows):
        block = first + start + tl.arange(0, rows)
        if constant:
            count = tl.where(block < blocks, kept, 0)
        else:
            count = tl.load(counts + block, mask=block < blocks, other=0).to(tl.int32)
        place = (done + tl.cumsum(count, 0) - count)[:, None] + column
        is_place = (column < count[:, None]) & (place < total)
        offset = tl.load(offsets + place, mask=is_place, other=0).to(tl.int32)
        value = tl.load(values + place, mask=is_place, other=0)
        block_start = (block * block_size)[:, None]
        element, target = block_start + column, block_start + offset
        tl.store(flat + element, 0, mask=(column < block_size) & (element < numel))
        tl.debug_barrier()  # where another thread has put zero
        tl.store(flat + target, value, mask=is_place & (target < numel))
        done += tl.sum(count, 0)
