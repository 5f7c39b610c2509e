"""Where the elements lie that a sparse code keeps, and how they are taken out and put back.

All is done some elements at a time. On devices that are not to be waited for, the host does not
know how many of a part are kept: each element finds its place by a running count.

Legend: n elements in memory, k of them kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from memengine._torch_private.compiled_kernels import proven_kernels
from memengine.techniques.codecs.bit_packing import (
    add_truths,
    packed_numel,
    truths,
    truths_in_order,
)
from memengine.techniques.codecs.top_k import part_numel, places_in_blocks, positions_of

BYTE_VALUES = 256  # what one byte counts
_KERNELS = 'memengine.techniques.codecs.kernels'
_OF_KERNELS = (torch.float32, torch.bfloat16, torch.float16)
_LARGEST_BLOCK_OF_KERNELS = 2**12  # of which a GPU's multiprocessor holds several


def kernels_for(like: Tensor, block_size: int) -> Any | None:
    """What selects from a tensor's blocks and puts back in one kernel each, if it is to be had."""
    if like.dtype not in _OF_KERNELS or not 1 < block_size <= _LARGEST_BLOCK_OF_KERNELS:
        return None
    return proven_kernels(f'{_KERNELS}.selection', like, block_size)


def kernels_for_all(like: Tensor) -> Any | None:
    """What selects from a whole tensor, and puts back by bits, in some kernels, likewise."""
    if like.dtype not in _OF_KERNELS or like.numel() >= 2**31 - 8:  # counted in 32 bits
        return None
    return proven_kernels(f'{_KERNELS}.largest_values', like)


def are_few(kept: int, numel: int) -> bool:
    """Whether a byte for each that is kept, and two a page, are fewer than a bit for each."""
    return kept + 2 * -(-numel // BYTE_VALUES) < packed_numel(numel, 1)


@dataclass(frozen=True)
class Bitmap:
    """Places among n as one bit each.

    Args:
        bits: As ``pack_truths`` packs them, or in order.
        numel: n.
        in_order: Whether a byte holds eight neighbours, the first in the lowest bit: so one kernel
            writes them that has an element's neighbours at hand.
        counts: How many are set of each 4,096, int16, where that kernel has counted them.
    """

    bits: Tensor
    numel: int
    in_order: bool = False
    counts: Tensor | None = None

    def scatter(self, values: Tensor) -> Tensor:
        """Values, ``[k]`` in the order of their places, among zeros: ``[n]``."""
        flat = values.new_empty(self.numel)
        kernels = kernels_for_all(flat)
        if kernels is not None and len(values):
            return kernels.scatter(values, self.bits, self.counts, flat, self.in_order)
        flat.zero_()
        unpack = truths_in_order if self.in_order else truths
        done: int | Tensor = 0
        some = part_numel(flat.device, flat.itemsize)
        for start in range(0, self.numel if len(values) else 0, some):
            part = flat[start : start + some]
            mask = unpack(self.bits, start, len(part))
            if flat.device.type == 'cpu':
                positions = positions_of(mask)
                stop = done + len(positions)
                part.index_copy_(0, positions, values[done:stop])
                done = stop
            else:
                count = mask.cumsum(0, dtype=torch.int32).add_(done)
                done = count[-1:].clone()
                found = values.index_select(0, count.sub_(1).clamp_(min=0))
                part.copy_(found.masked_fill_(~mask, 0))
        return flat


@dataclass(frozen=True)
class Offsets:
    """Places among n as one byte each, from the start of their block of at most 256.

    `counts` says how many there are in each block: one number for all, though the last may have
    less, or an int16 for each.
    """

    offsets: Tensor
    counts: Tensor | int
    block_size: int
    numel: int

    def scatter(self, values: Tensor) -> Tensor:
        """Values, ``[k]`` in the order of the offsets, among zeros: ``[n]``."""
        flat = values.new_empty(self.numel)
        kernels = kernels_for(flat, self.block_size)
        if kernels is not None:
            return kernels.scatter(values, self.offsets, self.counts, self.block_size, flat)
        flat.zero_()
        # Of half precision scatter takes ten times as long on CPU; elsewhere index_copy may copy.
        put = Tensor.index_copy_ if flat.device.type == 'cpu' else Tensor.scatter_
        done, total = 0, len(self.offsets)
        for starts in self._starts_of_blocks():
            stop = min(done + len(starts), total)
            positions = starts[: stop - done].add_(self.offsets[done:stop])
            put(flat, 0, positions, values[done:stop])
            done = stop
        return flat

    def _starts_of_blocks(self) -> Iterator[Tensor]:
        """Where the block of each offset starts, int64, some at a time; as if the last was full."""
        device, total = self.offsets.device, len(self.offsets)
        some = part_numel(device)
        some_blocks = max(1, some // self.block_size)
        if isinstance(self.counts, int) or device.type == 'cpu':
            starts = torch.arange(0, self.numel, self.block_size, device=device)
            for first in range(0, len(starts), some_blocks):
                blocks = slice(first, first + some_blocks)
                counts = self.counts
                if isinstance(counts, Tensor):
                    counts = counts[blocks].to(torch.int64)
                yield starts[blocks].repeat_interleave(counts)
        else:  # which is not to be asked for the sum of some counts
            ends = self.counts.cumsum(0)
            for first in range(0, total, some // 4):
                ranks = torch.arange(first, min(first + some // 4, total), device=device)
                yield torch.searchsorted(ends, ranks, right=True).mul_(self.block_size)


Places = Bitmap | Offsets


def take(flat: Tensor, masks: Iterable[Tensor], kept: int) -> tuple[Tensor, Places]:
    """The elements for which masks are true.

    Args:
        flat: ``[n]``.
        masks: One after another, ``[n]`` in all.
        kept: How many there are.

    Returns:
        Their values, ``[k]``, and their places in the form of fewer bytes.
    """
    numel, pages = flat.numel(), -(-flat.numel() // BYTE_VALUES)
    in_bits = not are_few(kept, numel)
    room = kept if flat.device.type == 'cpu' else kept + 1  # for all that are not kept
    values = flat.new_empty(room)
    offsets = flat.new_empty(0 if in_bits else room, dtype=torch.uint8)
    bits = flat.new_zeros(packed_numel(numel, 1) if in_bits else 0, dtype=torch.uint8)
    counts = flat.new_zeros(0 if in_bits else pages, dtype=torch.int16)
    move = _move_on_cpu if flat.device.type == 'cpu' else _move
    start = 0
    done: Any = 0
    for mask in masks:
        columns = [(flat[start : start + len(mask)], values)]
        if in_bits:
            add_truths(bits, start, mask)
        else:
            _add_counts(counts, start, mask)
            columns.append((_offsets(start, mask), offsets))
        done = move(columns, mask, done)
        start += len(mask)
    if in_bits:
        return values[:kept], Bitmap(bits, numel)
    return values[:kept], Offsets(offsets[:kept], counts, BYTE_VALUES, numel)


def _move_on_cpu(columns: list[tuple[Tensor, Tensor]], mask: Tensor, done: int) -> int:
    """Put what a mask is true for behind what has been put there; returns how much that is then."""
    positions = positions_of(mask)
    stop = done + len(positions)
    for column, kept in columns:
        torch.index_select(column, 0, positions, out=kept[done:stop])
    return stop


def _move(columns: list[tuple[Tensor, Tensor]], mask: Tensor, done: Tensor | int) -> Tensor:
    """The same, while the host does not know how much it is."""
    count = mask.cumsum(0).add_(done)
    stop = count[-1:].clone()
    last = len(columns[0][1]) - 1
    place = count.sub_(1).masked_fill_(~mask, last)
    for column, kept in columns:
        kept.scatter_(0, place, column)
    return stop


def _offsets(start: int, mask: Tensor) -> Tensor:
    """The place of each element of a part in its page, uint8."""
    places = torch.arange(start, start + len(mask), dtype=torch.int32, device=mask.device)
    return places.to(torch.uint8)  # of which it takes the lowest byte


def _add_counts(counts: Tensor, start: int, mask: Tensor) -> None:
    """Count for each page what a mask is true for."""
    before = start % BYTE_VALUES
    after = -(before + len(mask)) % BYTE_VALUES
    pages = functional.pad(mask.view(torch.uint8), (before, after)).view(-1, BYTE_VALUES)
    first = start // BYTE_VALUES
    counts[first : first + len(pages)] += pages.sum(1, dtype=counts.dtype)


def take_from_blocks(
    flat: Tensor, runs: Iterable[tuple[Tensor, int, int]], kept: int
) -> tuple[Tensor, Tensor]:
    """The largest of each block of at most 256, in any order within it.

    Args:
        flat: ``[n]``.
        runs: Blocks of one size each: their elements, size, and how many of each are kept.
        kept: How many there are in all.

    Returns:
        Their values, ``[k]``, and their places in their blocks, uint8 ``[k]``.
    """
    values, offsets = flat.new_empty(kept), flat.new_empty(kept, dtype=torch.uint8)
    start = done = 0
    for run, size, some in runs:
        for places in places_in_blocks(run, size, some):  # [blocks, some]
            blocks = torch.arange(len(places), dtype=places.dtype, device=flat.device)
            stop = done + places.numel()
            offsets[done:stop] = places.flatten()
            places = places.add_(blocks.mul_(size)[:, None]).flatten()
            torch.index_select(flat[start:], 0, places, out=values[done:stop])
            start, done = start + len(blocks) * size, stop
    return values, offsets
