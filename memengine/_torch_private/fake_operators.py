"""Operators on fake tensors, whose results follow from those of the first time.

A ``FakeTensorMode`` takes some 80 µs for an operator even where it has carried it out before, of
which a step has thousands. To make the tensors anew takes a tenth of that.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memengine._torch_private.autograd import storage_key
from memengine._torch_private.fake import fake_on, is_fake, without_modes
from memengine._torch_private.ops import OpOverload

_VALUES_DECIDE = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,  # which changes its input's shape
}
_TAKES_IN = torch.ops.aten.lift_fresh.default
"""The operator under ``torch.tensor(3.0)``, which makes a fake tensor of a real one."""
_PLAIN = {str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None)}
_NUMBERS = {int, float, bool}  # of which 1, 1.0 and True are equal


class _NotByShapeError(Exception):
    """An argument or result that is more than its shape."""


def inputs_by_shape(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[Tensor]
) -> Hashable:
    """What an operator's results follow from: shapes and numbers; None where that is not all.

    Args:
        op: The operator.
        args: Its arguments.
        kwargs: As well, by name.
        tensors: To which those among the arguments are added.
    """
    if not _is_by_shape(op):
        return None
    try:
        if op is _TAKES_IN and not is_fake(args[0]):
            tensors.append(args[0])
            return op, _layout_of(args[0])
        given = [_by_shape(value, tensors) for value in args]
        for name, value in kwargs.items():
            given += name, _by_shape(value, tensors)
        return op, *given
    except _NotByShapeError:
        return None


@functools.cache  # as tags take long to hash
def _is_by_shape(op: OpOverload) -> bool:
    return op.namespace == 'aten' and _VALUES_DECIDE.isdisjoint(op.tags)


def _by_shape(value: Any, tensors: list[Tensor]) -> Hashable:
    kind = type(value)
    if is_fake(value):
        if value.constant is not None:
            raise _NotByShapeError
        tensors.append(value)
        return _layout_of(value)
    if kind in _NUMBERS:
        return kind, value
    if kind in _PLAIN:
        return value
    if isinstance(value, (list, tuple)):
        return kind, *[_by_shape(one, tensors) for one in value]
    if kind is Tensor and not value.numel():  # a real one, without anything that a fake would share
        tensors.append(value)
        return kind, *_layout_of(value)
    part = getattr(value, '_local_tensor', None)  # of a DTensor, which is so for its spec
    if part is not None and is_fake(part):
        tensors.append(value)
        return kind, value._spec, *_layout_of(part)
    raise _NotByShapeError


def _layout_of(tensor: Any) -> tuple[Any, ...]:
    if tensor.layout != torch.strided or tensor.dtype.is_complex:
        raise _NotByShapeError
    layout = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
    return *layout, tensor.fake_device if is_fake(tensor) else tensor.device


class _Result(NamedTuple):
    """An input, a view of one, or memory of its own."""

    source: int | None  # which input
    layout: tuple[Any, ...] | None  # None: it is that input
    attributes: Mapping[str, Any]  # of the fake tensor

    @classmethod
    def of(cls, tensor: Any, inputs: Sequence[Tensor]) -> _Result:
        for index, one in enumerate(inputs):
            if one is tensor:
                return cls(index, None, {})
        if not is_fake(tensor):
            raise _NotByShapeError
        attributes = {**vars(tensor), 'constant': None}  # numbers are no part of a shape
        layout, storage = _layout_of(tensor), tensor.untyped_storage()
        for index, one in enumerate(inputs):
            if storage_key(one.untyped_storage()) == storage_key(storage):
                return cls(index, layout, attributes)
        result = cls(None, layout, attributes)
        if result.again(inputs).untyped_storage().nbytes() != storage.nbytes():
            raise _NotByShapeError
        return result

    def again(self, inputs: Sequence[Tensor]) -> Tensor:
        source = None if self.source is None else inputs[self.source]
        if self.layout is None:
            assert source is not None
            return source
        shape, stride, offset, dtype, device = self.layout
        with without_modes():
            if source is None:
                memory = torch.empty_strided(shape, stride, dtype=dtype, device='meta')
            else:
                memory = torch.empty(0, dtype=dtype, device='meta')
                memory.set_(source.untyped_storage(), offset, shape, stride)
            return fake_on(memory, device, self.attributes)


class Results:
    """What an operator gives for inputs of certain shapes."""

    def __init__(self, kind: type | None, several: Sequence[_Result | None]) -> None:
        self._kind, self._several = kind, several

    @classmethod
    def of(cls, out: Any, inputs: Sequence[Tensor]) -> Results | None:
        """What was given, if it follows from the inputs' shapes.

        Args:
            out: Tensors and None, in a list or tuple or not.
            inputs: The tensors that it was given for.
        """
        kind = type(out) if isinstance(out, (tuple, list)) else None
        given = [out] if kind is None else out
        try:
            several = [None if one is None else _Result.of(one, inputs) for one in given]
        except _NotByShapeError:
            return None
        fresh = [one for one, how in zip(given, several, strict=True) if how and how.source is None]
        are_apart = len({storage_key(one.untyped_storage()) for one in fresh}) == len(fresh)
        return cls(kind, several) if are_apart else None

    def again(self, inputs: Sequence[Tensor]) -> Any:
        """The same, for other inputs of these shapes."""
        several = [None if how is None else how.again(inputs) for how in self._several]
        return several[0] if self._kind is None else self._kind(several)
