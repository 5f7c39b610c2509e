"""Smaller codes that lose nothing of what a derivative needs.

Those that look at a tensor's values to see whether they apply give None where they do not: it is
then kept as it is. On an accelerator that look would wait for the device, and they do not look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from memengine._torch_private.compiled_kernels import proven_kernels
from memengine._torch_private.fake import is_fake
from memengine.techniques.codecs.bit_packing import pack_bits, pack_truths, unpack_bits
from memengine.techniques.codecs.memory_order import MemoryOrder, in_memory_order

__all__ = [
    'between',
    'bitmask',
    'narrow_ints',
    'positive_mask',
    'shape_only',
    'sign_mask',
    'two_valued',
]

INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NARROW_DTYPES = (torch.uint8, torch.int16, torch.int32)
_KERNELS = 'memengine.techniques.codecs.kernels.bits'
_OF_KERNELS = (torch.float32, torch.bfloat16, torch.float16, torch.bool)
_SAMPLE_NUMEL = 1024
_SOME_NUMEL = 2**20  # looked at together


@dataclass(frozen=True)
class BitCode:
    """One of two values for each element.

    Args:
        packed: A bit for each element.
        values: For a bit of 0 and of 1, as integers of the tensor's element size.
        order: The way back to the tensor's shape.
    """

    packed: Tensor
    values: tuple[int, int]
    order: MemoryOrder

    @property
    def nbytes(self) -> int:
        """Of the bits."""
        return self.packed.nbytes

    @torch.no_grad()
    def decode(self) -> Tensor:
        """The two values where they belong."""
        kernels = proven_kernels(_KERNELS, self.packed, self.order.dtype)
        form = of_two_values if kernels is None else kernels.select
        integer = INTEGER_OF_SIZE[self.order.dtype.itemsize]
        elements = form(self.packed, self.order.numel, *self.values, integer)
        return self.order.shaped(elements.view(self.order.dtype))


def of_two_values(packed: Tensor, numel: int, off: int, on: int, integer: torch.dtype) -> Tensor:
    """One of two integers for each bit, ``[n]``."""
    # Integers wrap around, so this is exact; torch.where would branch at each element.
    elements = unpack_bits(packed, 1, numel).to(integer)
    return elements.mul_(_wrapped(on - off, integer)).add_(off)


@dataclass(frozen=True)
class Within:
    """A test of elements: whether they lie between two bounds, which are outside themselves.

    Args:
        low: Lower bound.
        high: Upper bound, if there is one.
        nan: What is said of NaN.
    """

    low: float
    high: float | None = None
    nan: bool = True

    def __call__(self, elements: Tensor) -> Tensor:
        """A boolean for each."""
        low, high = self.low, self.high
        if high is not None:  # as torch does
            elements = elements.to(torch.promote_types(elements.dtype, torch.float32))
        if self.nan:
            outside = elements <= low
            return (
                outside if high is None else outside.logical_or_(elements >= high)
            ).logical_not_()
        within = elements > low
        return within if high is None else within.logical_and_(elements < high)


@dataclass(frozen=True)
class NarrowCode:
    """Integers in a narrower dtype."""

    narrowed: Tensor
    order: MemoryOrder

    @torch.no_grad()
    def decode(self) -> Tensor:
        """The integers in their own dtype."""
        return self.order.shaped(self.narrowed.to(self.order.dtype))


@dataclass(frozen=True)
class ShapeCode:
    """A shape, and how it lay in memory."""

    order: MemoryOrder

    def decode(self) -> Tensor:
        """Zeros of that shape."""
        order = self.order
        return order.shaped(torch.zeros(order.numel, dtype=order.dtype, device=order.device))


@torch.no_grad()
def bitmask(
    tensor: Tensor, test: Callable[[Tensor], Tensor] | None = None, on: float = 1, off: float = 0
) -> BitCode:
    """One bit for each element: what a test says of it.

    Args:
        tensor: Of any dtype with a `test`, else of booleans.
        test: Gives a boolean for each element; it is called with the elements in memory order, some
            at a time.
        on: What ``decode()`` has, in the tensor's dtype, where the test holds.
        off: And where it does not.

    Raises:
        TypeError: For a tensor that is not boolean, without a test.

    Bytes: ``numel / 8``: 1/32 of float32, 1/8 of bool. Cost: two passes; four to decode. For the
    tests of this file on a GPU one kernel each way, where it has agreed: :func:`proven_kernels`.
    """
    if test is None and tensor.dtype != torch.bool:
        raise TypeError(
            f'bitmask takes booleans, got {tensor.dtype}; give it a test, as in positive_mask()'
        )
    flat, order = in_memory_order(tensor)
    packed = packed_truths(flat, test)
    values = torch.tensor([off, on], dtype=tensor.dtype, device='cpu')
    return BitCode(packed, _integers_of(values), order)


def packed_truths(flat: Tensor, test: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """One bit for each of ``[n]``, booleans without a test; by a kernel where there is one."""
    known = Within(0) if test is None else test
    if isinstance(known, Within) and flat.dtype in _OF_KERNELS:
        kernels = proven_kernels(_KERNELS, flat, flat.dtype)
        if kernels is not None:
            return kernels.pack_within(flat, known)
    return pack_bits(flat, 1) if test is None else pack_truths(flat, test)


def positive_mask(tensor: Tensor) -> BitCode:
    """1 where a ReLU's result is above zero: all that its derivative needs.

    NaN counts as above, as in torch's derivative of ReLU, so that nothing is hidden. Bytes: 1/32
    of float32.
    """
    return bitmask(tensor, Within(0))


def sign_mask(tensor: Tensor) -> BitCode:
    """1 where a LeakyReLU's input is above zero, -1 elsewhere: all that its derivative needs."""
    return bitmask(tensor, Within(0, nan=False), off=-1)


def between(tensor: Tensor, low: float, high: float, inside: float, outside: float) -> BitCode:
    """`inside` where the input of hardtanh or ReLU6 lies between its bounds, `outside` elsewhere.

    The bounds themselves are outside, as in torch's derivatives of hardtanh and hardsigmoid (not
    in that of clamp). NaN is inside, so that it is not hidden; torch takes it either way.

    Args:
        tensor: The input.
        low: Lower bound.
        high: Upper bound.
        inside: Any number between the bounds, such as their mean.
        outside: Any other, such as infinity.
    """

    return bitmask(tensor, Within(low, high), on=inside, off=outside)


@torch.no_grad()
def two_valued(tensor: Tensor) -> BitCode | None:
    """One bit for each element of a tensor that holds no more than two values, and the values.

    Such is dropout's noise on CPU, of 0 and 1 / (1 - p). Every element is compared, bit by bit, so
    a NaN and a negative zero come back too.

    Returns:
        None for a tensor with more values, and for any on an accelerator, whose dropout saves
        booleans.

    Bytes: ``numel / 8``. Cost: a sample of 1024 elements tells most other tensors; for the rest
    four passes.
    """
    if tensor.dtype.itemsize not in INTEGER_OF_SIZE or tensor.device.type != 'cpu':
        return None
    flat, order = in_memory_order(tensor)
    elements = _as_integers(flat)
    step = -(-elements.numel() // _SAMPLE_NUMEL)
    if not elements.numel() or not _hold_only([elements[::step]], *torch.aminmax(elements[::step])):
        return None
    low, high = torch.aminmax(elements)
    if not _hold_only(elements.split(_SOME_NUMEL), low, high):
        return None
    packed = pack_truths(elements, lambda some: some == high)
    return BitCode(packed, _integers_of(torch.stack([low, high])), order)


def _hold_only(parts: Iterable[Tensor], *two: Tensor) -> bool:
    """Whether each element of all parts is one of two values."""
    return all(bool((part == two[0]).logical_or_(part == two[1]).all()) for part in parts)


@torch.no_grad()
def narrow_ints(tensor: Tensor, below: int | None = None) -> NarrowCode | None:
    """Integers in the smallest of uint8, int16 and int32 that holds them all.

    Such are the indices of a max-pool (within a plane: int16 up to 181 x 181) and of an embedding.

    Args:
        tensor: The integers.
        below: What they are known to be below, from 0 on. It counts on an accelerator, and of a
            fake tensor; on CPU, and where it is not known, the integers are looked at.

    Returns:
        None where no narrower dtype holds them, and for an empty tensor.

    Raises:
        TypeError: For a tensor that is not of integers.

    Bytes: 1/8, 1/4 or 1/2 of int64. Cost: two passes, one to decode; one with `below`. Waits for
    an accelerator without it.
    """
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise TypeError(f'narrow_ints takes integers, got {tensor.dtype}')
    flat, order = in_memory_order(tensor)
    if not flat.numel():
        return None
    if below is not None and (flat.device.type != 'cpu' or is_fake(flat)):
        low, high = 0, below - 1
    else:
        low, high = torch.stack(torch.aminmax(flat)).tolist()
    for dtype in _NARROW_DTYPES:
        held = torch.iinfo(dtype)
        if dtype.itemsize < tensor.dtype.itemsize and held.min <= low and high <= held.max:
            return NarrowCode(flat.to(dtype), order)
    return None


def shape_only(tensor: Tensor) -> ShapeCode:
    """No values, for a derivative that needs but the shape and strides: of the input of a pool.

    Bytes: none. Decoding fills a tensor with zeros.
    """
    return ShapeCode(in_memory_order(tensor)[1])


def _integers_of(values: Tensor) -> tuple[int, int]:
    off, on = _as_integers(values).tolist()
    return off, on


def _wrapped(number: int, dtype: torch.dtype) -> int:
    """A number as integers of a dtype wrap around."""
    held = torch.iinfo(dtype)
    return (number - held.min) % 2**held.bits + held.min


def _as_integers(flat: Tensor) -> Tensor:
    """The elements' bits: equal integers are equal elements, NaN and signed zeros included."""
    return flat.view(INTEGER_OF_SIZE[flat.dtype.itemsize])
