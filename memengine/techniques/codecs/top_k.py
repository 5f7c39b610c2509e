"""Which elements are the largest in magnitude: of all, or of each block of neighbours.

On CPU this is NumPy's ``partition`` and ``nonzero``, methods of a view of the tensor's memory: they
use vector instructions, and take an eighth of the time of torch's ``topk`` and ``nonzero``.

Legend: n elements, k of them kept, r blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = [
    'INTEGER_OF',
    'largest_elements',
    'mask_at',
    'mask_of_blocks',
    'offsets_in_blocks',
    'positions_in_blocks',
    'positions_of',
]

# Without its sign bit, a number's bits as an integer are in the order of magnitudes; NaN is above
# infinity.
INTEGER_OF = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
CHUNK_NUMEL = 2**17  # elements of which keys and their copy fit a core's cache


def largest_elements(flat: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """The largest of all; on CPU fewer than asked for when the others are zero.

    On an accelerator, of which the number of these would have to be read, zeros make it up.

    Args:
        flat: ``[n]``.
        kept: From 1 to n.

    Returns:
        Mask, ``[n]``, and the positions of its true elements, rising, ``[k]``.
    """
    integers = flat.view(INTEGER_OF[flat.dtype])
    keys = integers & torch.iinfo(integers.dtype).max
    if flat.device.type != 'cpu':
        positions = keys.topk(kept, sorted=False).indices.sort().values
        return mask_at(positions, flat.numel()), positions
    least = max(1, int(_take_largest(keys.clone()[None], kept).amin()))
    mask = keys >= least
    positions = positions_of(mask)
    surplus = positions.numel() - kept
    if surplus > 0:
        tied = positions_of(keys.index_select(0, positions) == least)
        mask[positions[tied[:surplus]]] = False
        positions = positions_of(mask)
    return mask, positions


def mask_of_blocks(flat: Tensor, size: int, kept: int) -> Tensor:
    """The largest of each block.

    Args:
        flat: ``[r * size]``.
        size: Elements of a block.
        kept: How many of each, from 1 to `size`.

    Returns:
        Mask, ``[r * size]``, with exactly `kept` in each block.

    Magnitudes are compared to the precision that :func:`_sortable_keys` states.
    """
    masks = []
    for keys in _sortable_keys(flat, size):
        least = _take_largest(keys.clone(), kept).amin(1, keepdim=True)
        masks.append((keys >= least).flatten())
    return torch.cat(masks)


def offsets_in_blocks(flat: Tensor, size: int, kept: int) -> Tensor:
    """The same as places in their blocks, of at most 256: uint8 ``[r * kept]``, in any order."""
    found = [_take_largest(keys, kept) & _low_bits(size) for keys in _sortable_keys(flat, size)]
    return torch.cat([offsets.to(torch.uint8).flatten() for offsets in found])


def positions_in_blocks(flat: Tensor, size: int, kept: int) -> Tensor:
    """The same as positions in all of them: int64 ``[r * kept]``, rising. Waits for no device."""
    found = [_take_largest(keys, kept) & _low_bits(size) for keys in _sortable_keys(flat, size)]
    offsets = torch.cat(found).to(torch.int64).sort(1).values  # [r, kept]
    starts = torch.arange(0, flat.numel(), size, device=flat.device)
    return offsets.add_(starts[:, None]).flatten()


def mask_at(positions: Tensor, numel: int) -> Tensor:
    """A mask ``[n]`` that is true at positions."""
    mask = torch.zeros(numel, dtype=torch.bool, device=positions.device)
    return mask.scatter_(0, positions, True)


def positions_of(mask: Tensor) -> Tensor:
    """Where a mask ``[n]`` is true, rising, int64. Its number is read from the device."""
    if mask.device.type == 'cpu':
        # Up to a tenth, NumPy searches for each one, which at gamma 0.9 takes twice as long.
        more = mask.new_ones(mask.numel() // 50)
        found = torch.cat([mask, more]).numpy().nonzero()[0]
        return torch.from_numpy(found[: len(found) - len(more)])
    return mask.nonzero()[:, 0]


def _sortable_keys(flat: Tensor, size: int) -> Iterator[Tensor]:
    """Integers in the order of magnitudes, no two equal: ``[blocks, size]``, on CPU some at a time.

    The lowest bits of a magnitude give way to its position in the block, which so breaks ties and
    is found in the largest keys themselves. What is left of fp32's 23 bits of mantissa is 15 in
    blocks of 256, and 7, as in bf16, in those of 65,536; above that, keys have 64 bits.
    """
    wide = torch.int64 if flat.dtype == torch.float64 or size > 2**16 else torch.int32
    positions = torch.arange(size, dtype=wide, device=flat.device)
    integers = flat.view(INTEGER_OF[flat.dtype])
    free = 8 * (wide.itemsize - flat.element_size())
    magnitude = torch.iinfo(wide).max - _low_bits(size)
    chunk = max(1, CHUNK_NUMEL // size) * size if flat.device.type == 'cpu' else flat.numel()
    for part in integers.split(chunk):
        highest = part.to(wide) << free if free else part
        yield (highest & magnitude).view(-1, size).bitwise_or_(positions)


def _low_bits(size: int) -> int:
    """The bits that positions in a block take."""
    return (1 << (size - 1).bit_length()) - 1


def _take_largest(keys: Tensor, kept: int) -> Tensor:
    """The largest of each row, ``[r, kept]``, in any order. What `keys` hold is lost."""
    if keys.device.type == 'cpu':
        keys.numpy().partition(-kept)
        return keys[:, -kept:]
    return keys.topk(kept, sorted=False).values
