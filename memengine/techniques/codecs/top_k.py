"""Which elements are the largest in magnitude: of all, or of each block of neighbours.

Both are found some elements at a time, so little memory is taken beside the tensor, and nothing
waits for a device. On CPU this is NumPy's ``partition`` and ``nonzero``, methods of a view of the
tensor's memory: they use vector instructions, and take an eighth of the time of torch's ``topk``
and ``nonzero``.

Legend: n elements, k of them kept, r blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from memengine.techniques.codecs.grids import random_bytes
from memengine.techniques.modules.private_random import private_generator

# Without its sign bit, a number's bits as an integer are in the order of magnitudes; NaN is above
# infinity.
INTEGER_OF = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
LONGEST_BLOCK = 2**16  # whose positions leave enough bits of 32 to magnitudes
# Elements at a time: on CPU their keys and a copy of them fit a core's cache; elsewhere what is
# computed of them takes 16 MiB at most, a position of 64 bits for each included.
_PART_NUMEL = {'cpu': 2**17}
_PART_NUMEL_ELSEWHERE = 2**20
_DIGITS = 2**16  # values of 16 bits of a key
_SAMPLE = 2**15  # elements
_COUNTERS = 8  # of each on a device, where increments of the same one wait for each other


class Keys(NamedTuple):
    """Integers for ``[n]``, none of them negative, some at a time: the same whenever asked for."""

    parts: Callable[[], Iterator[Tensor]]
    numel: int
    dtype: torch.dtype
    device: torch.device


def part_numel(device: torch.device, itemsize: int = 4) -> int:
    """How many elements are computed at once, of so many bytes each."""
    return _PART_NUMEL.get(device.type, _PART_NUMEL_ELSEWHERE // max(1, itemsize // 4))


def magnitudes(flat: Tensor) -> Keys:
    """Integers in the order of the magnitudes of ``[n]``."""
    integers = flat.view(INTEGER_OF[flat.dtype])
    highest = torch.iinfo(integers.dtype).max
    some = part_numel(flat.device, integers.itemsize)

    def parts() -> Iterator[Tensor]:
        return (part & highest for part in integers.split(some))

    return Keys(parts, flat.numel(), integers.dtype, flat.device)


def noise(flat: Tensor) -> Keys:
    """Random integers of 15 bits for ``[n]``, from :func:`private_generator`."""
    generator = private_generator(flat.device)
    state = generator.get_state()

    def parts() -> Iterator[Tensor]:
        generator.set_state(state)
        for part in flat.split(part_numel(flat.device)):
            drawn = random_bytes(2 * len(part), generator).view(torch.int16)
            yield drawn.bitwise_and_(torch.iinfo(torch.int16).max)

    return Keys(parts, flat.numel(), torch.int16, flat.device)


class Selection(NamedTuple):
    """Those above the least that is kept, and the last of those that are equal to it.

    Attributes:
        keys: Of all elements.
        least: The key of the least that is kept, ``[1]``.
        surplus: How many that are equal to it are not kept, ``[1]``: the first.
        kept: How many are kept in all.
    """

    keys: Keys
    least: Tensor
    surplus: Tensor
    kept: int

    def masks(self) -> Iterator[Tensor]:
        """What is kept of ``[n]``, some at a time."""
        mask_of = _mask_on_cpu if self.least.device.type == 'cpu' else _mask
        surplus = self.surplus
        for keys in self.keys.parts():
            mask, surplus = mask_of(keys, self.least, surplus)
            del keys
            yield mask


def _mask_on_cpu(keys: Tensor, least: Tensor, surplus: Tensor) -> tuple[Tensor, Tensor]:
    """What is kept of some elements, and how many of equal ones are still too many."""
    mask = torch.from_numpy(keys.numpy() >= least.numpy())
    if surplus > 0:
        tied = positions_of(torch.from_numpy(keys.numpy() == least.numpy()))[: int(surplus)]
        mask[tied] = False
        surplus = surplus - len(tied)
    return mask, surplus


def _mask(keys: Tensor, least: Tensor, surplus: Tensor) -> tuple[Tensor, Tensor]:
    tied = keys == least
    count = tied.cumsum(0, dtype=torch.int32)
    return torch.where(tied, count > surplus, keys > least), surplus - count[-1:]


def largest(keys: Keys, kept: int, with_zeros: bool = True) -> Selection:
    """The largest of all.

    Args:
        keys: Of :func:`magnitudes` or :func:`noise`.
        kept: k, from 1 to n.
        with_zeros: Whether zeros make it up where there are fewer others. They always do on an
            accelerator, of which the number of these would have to be read.

    Cost: on CPU three passes over them, and a copy of those that are about as large as the least
    that is kept; elsewhere two passes, and one for each 16 bits of a key.
    """
    if keys.device.type == 'cpu':
        least, above, ties = _least_on_cpu(keys, kept)
        if not (least or with_zeros):
            least, ties, kept = least + 1, torch.zeros_like(ties), int(above)
    else:
        at_once = keys.numel <= part_numel(keys.device, keys.dtype.itemsize)
        least, above, ties = (_least_of_one_part if at_once else _least_of_parts)(keys, kept)
    return Selection(keys, least.to(keys.dtype), (above + ties - kept).to(torch.int32), kept)


def _least_on_cpu(keys: Keys, kept: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k-th largest key, how many are above it, and how many are equal to it: ``[1]`` each."""
    every = 1, torch.iinfo(keys.dtype).max
    for low, high in (_bounds(keys, kept, every), every):
        above, found = 0, []
        for part in keys.parts():
            own = part.numpy()
            is_above = own > high
            above += int(is_above.sum())
            found.append(torch.from_numpy(own[(own >= low) & ~is_above]))
        near = torch.cat(found)
        if above < kept and (low == 1 or kept <= above + len(near)):
            break
    rank = kept - above
    if rank > len(near):  # all others are zero
        above, least = above + len(near), 0
        ties = keys.numel - above
    else:
        least = int(_take_largest(near[None], rank).amin())
        above, ties = above + int((near > least).sum()), int((near == least).sum())
    tensor = partial(torch.tensor, device='cpu')  # whatever the default device is
    return tensor([least]), tensor([above]), tensor([ties])


def _bounds(keys: Keys, kept: int, every: tuple[int, int]) -> tuple[int, int]:
    """Between which keys the k-th largest lies by all likelihood, as a sample has it."""
    if keys.numel <= 2 * _SAMPLE:
        return every
    sample = torch.cat([part[:: keys.numel // _SAMPLE] for part in keys.parts()]).sort().values
    rank, margin = (
        len(sample) * (1 - kept / keys.numel),
        2 * len(sample) ** 0.5,
    )  # 4 deviations or more
    low, high = every
    if rank > margin:
        low = max(low, int(sample[int(rank - margin)]))
    if rank + margin < len(sample) - 1:
        high = max(low, int(sample[int(rank + margin)]))
    return low, high


def _least_of_one_part(keys: Keys, kept: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same on other devices."""
    (own,) = keys.parts()
    least = own.topk(kept, sorted=False).values.amin(0, keepdim=True)
    return least, (own > least).sum(0, keepdim=True), (own == least).sum(0, keepdim=True)


def _least_of_parts(keys: Keys, kept: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same, 16 bits after 16 bits from the highest: elements are counted by them."""
    digits: list[Tensor] = []
    least = above = ties = torch.zeros(1, dtype=torch.int64, device=keys.device)
    for _ in range(keys.dtype.itemsize // 2):
        counts = _counts(keys, digits).flip(0)
        at_least = above + counts.cumsum(0)
        place = (at_least < kept).sum(0, keepdim=True)
        ties = counts.index_select(0, place)
        above = at_least.index_select(0, place) - ties
        digit = _DIGITS - 1 - place
        digits.append(digit.to(torch.int16))  # of the same bits
        least = least * _DIGITS + digit
    return least, above, ties


def _counts(keys: Keys, digits: list[Tensor]) -> Tensor:
    """How many of the keys that begin with these digits have each one next, ``[2 ** 16]``.

    That is ``bincount``, which waits for the device.
    """
    counters = torch.zeros(_DIGITS, _COUNTERS, dtype=torch.int32, device=keys.device)
    for part in keys.parts():
        for half in part.split(part_numel(keys.device, keys.dtype.itemsize) // 2):
            _count(half, digits, counters)
    return counters.sum(1)


def _count(keys: Tensor, digits: list[Tensor], counters: Tensor) -> None:
    own, *higher = keys.view(torch.int16).view(len(keys), -1).unbind(1)[-1 - len(digits) :]
    if digits:
        same = [digit == one for digit, one in zip(reversed(higher), digits, strict=True)]
        increments = reduce(torch.logical_and, same).to(counters.dtype)
    else:
        increments = counters.new_ones(()).expand(len(own))
    width = 1 if len(own) % _COUNTERS else _COUNTERS  # neighbours count in different counters
    own = own.to(torch.int64).bitwise_and_(_DIGITS - 1)
    counters.scatter_add_(0, own.view(-1, width), increments.view(-1, width))


def masks_of_blocks(flat: Tensor, size: int, kept: int) -> Iterator[Tensor]:
    """The largest of each block, some blocks at a time.

    Args:
        flat: ``[r * size]``.
        size: Elements of a block.
        kept: How many of each, from 1 to `size`.

    Yields:
        Masks, which together are ``[r * size]``, with exactly `kept` in each block.

    Magnitudes are compared to the precision that :func:`_sortable_keys` states.
    """
    if size > LONGEST_BLOCK:
        for block in flat.split(size):
            yield from largest(magnitudes(block), kept).masks()
        return
    for keys in _sortable_keys(flat, size):
        least = _take_largest(keys.clone(), kept).amin(1, keepdim=True)
        yield (keys >= least).flatten()


def places_in_blocks(flat: Tensor, size: int, kept: int) -> Iterator[Tensor]:
    """The same as places in their blocks, int ``[blocks, kept]`` in any order."""
    for keys in _sortable_keys(flat, size):
        yield _take_largest(keys, kept) & _low_bits(size)


def positions_of(mask: Tensor) -> Tensor:
    """Where a mask ``[n]`` on a CPU is true, rising, int64."""
    # Up to a tenth, NumPy searches for each one, which at gamma 0.9 takes twice as long.
    more = mask.new_ones(mask.numel() // 50)
    found = torch.cat([mask, more]).numpy().nonzero()[0]
    return torch.from_numpy(found[: len(found) - len(more)])


def _sortable_keys(flat: Tensor, size: int) -> Iterator[Tensor]:
    """Integers in the order of magnitudes, no two equal: ``[blocks, size]``, some at a time.

    The lowest bits of a magnitude give way to its position in the block, which so breaks ties and
    is found in the largest keys themselves. What is left of fp32's 23 bits of mantissa is 15 in
    blocks of 256, and 7, as in bf16, in those of 65,536.
    """
    wide = torch.int64 if flat.dtype == torch.float64 else torch.int32
    positions = torch.arange(size, dtype=wide, device=flat.device)
    integers = flat.view(INTEGER_OF[flat.dtype])
    free = 8 * (wide.itemsize - flat.element_size())
    magnitude = torch.iinfo(wide).max - _low_bits(size)
    some = part_numel(flat.device) // (1 if flat.device.type == 'cpu' else wide.itemsize // 2)
    for part in integers.split(max(1, some // size) * size):
        highest = part.to(wide) << free if free else part
        yield (highest & magnitude).view(-1, size).bitwise_or_(positions)
        del highest


def _low_bits(size: int) -> int:
    """The bits that positions in a block take."""
    return (1 << (size - 1).bit_length()) - 1


def _take_largest(keys: Tensor, kept: int) -> Tensor:
    """The largest of each row, ``[r, kept]``, in any order. What `keys` hold is lost."""
    if keys.device.type == 'cpu':
        keys.numpy().partition(-kept)
        return keys[:, -kept:]
    return keys.topk(kept, sorted=False).values
