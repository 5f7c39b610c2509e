"""DropIT's codec: of a saved tensor only the elements that matter most are kept.

Legend: n elements of the tensor in memory (what is expanded counts once), k of them kept. They are
seen as they lie there, as ``[n]``, and cut into blocks of neighbours.

Source: DropIT: Dropping Intermediate Tensors for Memory-Efficient DNN Training, ICLR 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from memengine.suggest import did_you_mean
from memengine.techniques.codecs.bit_packing import add_truths, packed_numel
from memengine.techniques.codecs.codec import Code, Codec
from memengine.techniques.codecs.kept_positions import (
    BYTE_VALUES,
    Bitmap,
    Offsets,
    Places,
    are_few,
    kernels_for,
    kernels_for_all,
    take,
    take_from_blocks,
)
from memengine.techniques.codecs.memory_order import MemoryOrder, in_memory_order
from memengine.techniques.codecs.top_k import (
    INTEGER_OF,
    largest,
    magnitudes,
    masks_of_blocks,
    noise,
    part_numel,
)
from memengine.techniques.modules.saved_tensors import KeptAsIs

__all__ = ['Cast', 'SparseCode', 'Sparsifier']

_MASKED_AT_ONCE = 2**23  # elements
STRATEGIES = ('mink', 'random', 'block_mink')


class Sparsifier:
    """Codec that sets the share ``gamma`` of a tensor's elements to zero and keeps the others.

    Args:
        strategy: Which elements are kept.

            - ``'mink'``: the ``int(n * (1 - gamma))`` of largest magnitude, as published.
            - ``'random'``: as many, drawn uniformly; not scaled up for those that are missing.
            - ``'block_mink'``: in each block the largest ones, to the nearest number. Magnitudes
              are compared to 16 bits of precision in blocks of 256, and as many fewer as a longer
              block's positions take more, down to 8, those of bf16.

            At least one is kept, of a block as of a tensor. NaN counts as larger than infinity.
            Where several are as large as the least that is kept, any of them are.
        gamma: Share of elements that is dropped, from 0 to below 1. May be set between calls.
        block_size: For ``'block_mink'`` only: the elements of a block, by default 256; ``'row'``:
            as many as the dimension has that is innermost in memory, the last one or channels in
            channels_last. The last block may be shorter.
        values: Codec of the values that are kept, ``[k]``; None keeps them as they are.

    Raises:
        ValueError: When a setting is none of these, or `block_size` is given without blocks.

    Calling it with a tensor of any shape, strides and floating-point dtype gives its code. Raises
    TypeError for any other dtype.

    Bytes: the values (4k in fp32) and their places in the cheaper of two forms: one bit for each
    element (where a kernel selects from a whole tensor also two bytes for 4,096), or one byte for
    each that is kept (in blocks above 256, and without blocks, also two for 256 elements). In fp32
    at gamma 0.9, 0.127 of the dense tensor, and 0.076 with values in 16 bits; at 0.7 and 0.5, 0.331
    and 0.531. At gamma 0 the tensor itself is kept. ``'mink'`` keeps no zeros on CPU, as decoding
    gives them anyway: after a ReLU it may cost less.

    While it runs: 16 MiB at most, of float64 some more, with `values` also what is kept of them. On
    CPU 3 MB, and with ``'mink'`` a copy of the magnitudes that are about as large as the least that
    is kept: a fortieth of the tensor, more where many are equal.

    Time: on CPU blocks are partitioned by NumPy, in one thread, some at a time of what fits its
    cache: this takes a third to an eighth of the time of a ``topk`` of the whole tensor. On a GPU
    one kernel selects from blocks of up to 4,096, three (of fp32 four) from a whole tensor, and one
    puts back (:func:`proven_kernels`). Nothing waits for an accelerator, on which the number kept
    is always the one asked for.

    The random strategy draws from a generator of its own: dropout draws what it would have drawn.
    """

    def __init__(
        self,
        strategy: str = 'mink',
        gamma: float = 0.9,
        block_size: int | Literal['row'] | None = None,
        values: Codec | None = None,
    ) -> None:
        if strategy not in STRATEGIES:
            hint = did_you_mean(str(strategy), STRATEGIES, after=';')
            raise ValueError(
                f'strategy: expected one of {", ".join(STRATEGIES)}, got {strategy!r}{hint}'
            )
        if block_size is None:
            block_size = BYTE_VALUES
        elif strategy != 'block_mink':
            raise ValueError(
                f"block_size: only strategy='block_mink' has blocks, got block_size={block_size!r} "
                f'with strategy={strategy!r}; choose that strategy or leave block_size out'
            )
        if block_size != 'row' and not (isinstance(block_size, int) and block_size > 0):
            raise ValueError(
                f"block_size: expected a number of elements from 1 or 'row', got {block_size!r}"
            )
        self.strategy, self.block_size, self.values = strategy, block_size, values
        self.gamma = gamma

    @property
    def gamma(self) -> float:
        """Share of elements that is dropped."""
        return self._gamma

    @gamma.setter
    def gamma(self, gamma: float) -> None:
        if not 0 <= gamma < 1:  # also catches NaN
            raise ValueError(
                f'gamma: expected the share of elements to drop, from 0 to below 1, got {gamma!r}'
            )
        self._gamma = float(gamma)

    @torch.no_grad()
    def __call__(self, tensor: Tensor) -> Code:
        """The tensor's code, without a graph."""
        if tensor.dtype not in INTEGER_OF:
            names = ', '.join(str(dtype) for dtype in INTEGER_OF)
            raise TypeError(f'Sparsifier: expected a tensor of {names}, got {tensor.dtype}')
        flat, order = in_memory_order(tensor)  # [n]
        size = order.numel
        if self.strategy == 'block_mink':
            block = _innermost(order) if self.block_size == 'row' else self.block_size
            size = max(1, min(block, size))
            kept = self._kept_of_block(size)
        else:
            kept = min(size, max(1, int(size * (1 - self.gamma))))
        if kept == size:
            return KeptAsIs(tensor) if self.values is None else self.values(tensor)
        values, places = self._select(flat, size, kept)
        return SparseCode(values if self.values is None else self.values(values), places, order)

    def _kept_of_block(self, size: int) -> int:
        return max(1, size - round(size * self.gamma))

    def _select(self, flat: Tensor, size: int, kept: int) -> tuple[Tensor, Places]:
        """The values that are kept, ``[k]``, and their places."""
        if self.strategy == 'mink' and (kernels := kernels_for_all(flat)) is not None:
            numel, as_offsets = flat.numel(), are_few(kept, flat.numel())
            values, found, counts = kernels.largest_of_all(flat, kept, as_offsets)
            if as_offsets:
                return values, Offsets(found, counts, BYTE_VALUES, numel)
            return values, Bitmap(found, numel, in_order=True, counts=counts)
        if self.strategy != 'block_mink':
            is_random = self.strategy == 'random'
            keys = noise(flat) if is_random else magnitudes(flat)
            selection = largest(keys, kept, with_zeros=is_random)
            return take(flat, selection.masks(), selection.kept)
        whole = flat.numel() // size * size
        blocks = [(flat[:whole], size, kept)]
        if rest := flat.numel() - whole:
            blocks.append((flat[whole:], rest, self._kept_of_block(rest)))
        total = sum(part.numel() // length * some for part, length, some in blocks)
        numel = flat.numel()
        as_offsets = size <= BYTE_VALUES and total < packed_numel(numel, 1)
        in_one_kernel = as_offsets or not are_few(total, numel)
        kernels = kernels_for(flat, size) if in_one_kernel else None
        if kernels is not None:
            of_last = blocks[-1][2]
            if not as_offsets:
                return _largest_of_blocks(kernels, flat, (size, kept, of_last), total)
            values, found = kernels.largest_of_blocks(flat, size, kept, of_last, True)
            return values, Offsets(found, kept, size, numel)
        if as_offsets:
            values, offsets = take_from_blocks(flat, blocks, total)
            return values, Offsets(offsets, kept, size, numel)
        return take(flat, chain.from_iterable(masks_of_blocks(*run) for run in blocks), total)


def _largest_of_blocks(
    kernels: Any, flat: Tensor, blocks: tuple[int, int, int], total: int
) -> tuple[Tensor, Bitmap]:
    """By a kernel for some of the blocks at a time, whose mask takes a byte for each element."""
    size, kept, _ = blocks
    values = flat.new_empty(total)
    bits = flat.new_zeros(packed_numel(flat.numel(), 1), dtype=torch.uint8)
    some = max(1, _MASKED_AT_ONCE // size)
    done = 0
    for number, part in enumerate(flat.split(some * size)):
        start = number * some * kept
        room = values[start : start + some * kept]
        _, mask = kernels.largest_of_blocks(part, *blocks, False, room)
        add_truths(bits, done, mask.view(torch.bool))
        done += len(part)
    return values, Bitmap(bits, flat.numel())


@dataclass(frozen=True)
class SparseCode:
    """Some elements of a tensor and where they are; the others are zero."""

    values: Tensor | Code  # [k]
    places: Places
    order: MemoryOrder

    def decode(self) -> Tensor:
        """The tensor, as memory of its own."""
        values = self.values if isinstance(self.values, Tensor) else self.values.decode()
        return self.order.shaped(self.places.scatter(values))


class Cast:
    """Codec that keeps a tensor in a smaller dtype; one that is no larger stays as it is.

    Args:
        dtype: What values are kept in. bf16 has 8 bits of precision and fp32's range, fp16 has
            11 and ends at 65504. Finite values beyond the range become its ends, never infinite.

    Bytes: while it runs, at most 16 MiB beside the tensor and what is kept of it.

    Raises:
        ValueError: When it is no floating-point dtype.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        if not dtype.is_floating_point:
            raise ValueError(f'dtype: expected a floating-point dtype, got {dtype}')
        self.dtype = dtype

    @torch.no_grad()
    def __call__(self, tensor: Tensor) -> Code:
        """The tensor's code, without a graph."""
        if tensor.dtype.itemsize <= self.dtype.itemsize:
            return KeptAsIs(tensor)
        limit = torch.finfo(self.dtype).max
        flat, order = in_memory_order(tensor)
        cast = flat.new_empty(len(flat), dtype=self.dtype)
        some = part_numel(flat.device, flat.itemsize)
        for part, room in zip(flat.split(some), cast.split(some), strict=True):
            room.copy_(part.clamp(-limit, limit).where(part.isfinite(), part))
        return CastCode(order.shaped(cast), tensor.dtype)


@dataclass(frozen=True)
class CastCode:
    """A tensor in another dtype than its own."""

    tensor: Tensor
    dtype: torch.dtype

    def decode(self) -> Tensor:
        """The tensor in its own dtype."""
        return self.tensor.to(self.dtype)


def _innermost(order: MemoryOrder) -> int:
    """Size of the dimension whose elements are neighbours in memory."""
    steps = [(step, size) for step, size in zip(order.stride, order.shape, strict=True) if size > 1]
    return min((pair for pair in steps if pair[0]), default=(1, 1))[1]
