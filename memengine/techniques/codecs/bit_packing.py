"""Several small integers in one byte.

The bytes are planar: the first ``1 / per_byte`` of the values lies in the lowest bits of all bytes,
the next part in the bits above. Every pass is then over contiguous memory, which is five times
faster on CPU than to put neighbours into one byte.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PACKED_BITS = (1, 2, 4, 8)
_MOST_AT_ONCE = 2**20  # elements


def packed_numel(numel: int, bits: int) -> int:
    """How many bytes `numel` values of `bits` bits take."""
    return -(-numel * bits // 8)


def pack_bits(values: Tensor, bits: int, out: Tensor | None = None) -> Tensor:
    """Pack integers below ``2 ** bits`` into bytes.

    Args:
        values: uint8 or bool, of any shape; larger values spoil their neighbours and are not
            looked for.
        bits: 1, 2, 4 or 8 for each value.
        out: uint8 of ``packed_numel(values.numel(), bits)`` elements, written to.

    Returns:
        uint8 of one dimension, `out` where given; never memory of `values`.

    Cost: each value is read once, each byte written ``8 / bits`` times; no temporary memory.
    """
    assert bits in PACKED_BITS and values.dtype in (torch.uint8, torch.bool)
    flat = values.reshape(-1).view(torch.uint8)
    size = packed_numel(flat.numel(), bits)
    packed = flat.new_empty(size) if out is None else out
    packed.copy_(flat[:size])
    for shift in range(bits, 8, bits):
        start = shift // bits * size
        plane = flat[start : start + size]
        packed[: plane.numel()].add_(plane, alpha=1 << shift)
    return packed


def pack_truths(flat: Tensor, test: Callable[[Tensor], Tensor]) -> Tensor:
    """One bit for each element: what a test says of it.

    Args:
        flat: ``[n]``.
        test: Gives booleans for elements; it is called with some at a time.

    Returns:
        As :func:`pack_bits` gives it of all that the test gives.

    Cost: what the test takes of a million elements at a time.
    """
    packed = flat.new_zeros(packed_numel(flat.numel(), 1), dtype=torch.uint8)
    start = 0
    for some in flat.split(_MOST_AT_ONCE):
        add_truths(packed, start, test(some))
        start += len(some)
    return packed


def add_truths(packed: Tensor, start: int, mask: Tensor) -> None:
    """Set the bits of some elements, which are zeros so far, as :func:`pack_bits` packs all.

    Args:
        packed: Of all.
        start: The first of these elements.
        mask: bool, one dimension.
    """
    while len(mask):
        bit, byte = divmod(start, len(packed))
        some = packed[byte : byte + len(mask)]
        some.add_(mask[: len(some)], alpha=1 << bit)
        start, mask = start + len(some), mask[len(some) :]


def truths(packed: Tensor, start: int, numel: int) -> Tensor:
    """The bits of `numel` elements from the one at `start` on, bool."""
    values = packed.new_empty(numel)
    done = 0
    while done < numel:
        bit, byte = divmod(start + done, len(packed))
        some = packed[byte : byte + numel - done]
        torch.bitwise_right_shift(some, bit, out=values[done : done + len(some)])
        done += len(some)
    return values.bitwise_and_(1).view(torch.bool)


def truths_in_order(packed: Tensor, start: int, numel: int) -> Tensor:
    """The same of bytes that hold eight neighbours each, the first in the lowest bit."""
    first, before = divmod(start, 8)
    some = packed[first : packed_numel(start + numel, 1), None]
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = torch.bitwise_right_shift(some, shifts).bitwise_and_(1)
    return bits.flatten()[before : before + numel].view(torch.bool)


def unpack_bits(packed: Tensor, bits: int, numel: int) -> Tensor:
    """The values that :func:`pack_bits` packed.

    Args:
        packed: uint8, from :func:`pack_bits`.
        bits: As packed.
        numel: How many values there were.

    Returns:
        uint8 of `numel` elements.
    """
    assert packed.numel() == packed_numel(numel, bits)
    values = packed.new_empty(numel)
    size = packed.numel()
    for shift in range(0, 8, bits):
        start = shift // bits * size
        plane = values[start : start + size]
        torch.bitwise_right_shift(packed[: plane.numel()], shift, out=plane)
    return values.bitwise_and_(2**bits - 1)
