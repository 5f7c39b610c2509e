"""What torch keeps private of tensors without memory, which know shape, type and device only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    unset_fake_temporarily,
)

__all__ = [
    'ASKS_FOR_THE_DEVICE',
    'COMPARES',
    'FAKE_REFUSES',
    'MAPS_A_FILE',
    'SHAPE_OF_VALUES',
    'READS_A_NUMBER',
    'FakeTensorMode',
    'deep_copies',
    'fake_mode',
    'fake_on',
    'is_fake',
    'modules_cast_in_place',
    'resizes_noted',
    'unset_fake_temporarily',
    'without_modes',
]

FAKE_REFUSES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
"""What fake tensors raise where shape or control flow depends on values."""

SHAPE_OF_VALUES = DynamicOutputShapeException
"""Of these what is raised by an operator whose result is as large as values say: ``unique``."""

READS_A_NUMBER = torch.ops.aten._local_scalar_dense.default
"""The operator under ``tensor.item()``."""

MAPS_A_FILE = torch.ops.aten.from_file.default
"""The operator under ``torch.from_file``, which fake tensors do not know."""

COMPARES = torch.ops.aten.equal.default
"""The operator under ``torch.equal``, which is not asked where values are known to be the same."""


ASKS_FOR_THE_DEVICE = torch.ops.prim.device.default
"""The operator under ``tensor.device``, which modes see of tensors such as fake ones."""


@contextmanager
def resizes_noted(note: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """Be told of storages and the bytes that they are resized to, which is seen by no mode.

    So ``fully_shard`` frees what it has gathered.
    """
    resize = torch.UntypedStorage.resize_

    def resize_and_note(storage: Any, nbytes: int) -> Any:
        resized = resize(storage, nbytes)
        note(storage, nbytes)
        return resized

    torch.UntypedStorage.resize_ = resize_and_note  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def _deep_copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    if id(tensor) not in memo:
        copied = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            memo[id(tensor)] = nn.Parameter(copied, tensor.requires_grad)
        else:
            memo[id(tensor)] = copied.requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


@contextmanager
def deep_copies() -> Iterator[None]:
    """Let ``copy.deepcopy`` copy fake tensors, as models are that repeat a layer or keep a teacher.

    torch looks for the memory that they lack, and copies the mode that they are of.
    """
    known = vars(FakeTensor).get('__deepcopy__', Tensor.__deepcopy__)
    FakeTensor.__deepcopy__ = _deep_copy  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeTensor.__deepcopy__ = known  # type: ignore[method-assign]


@contextmanager
def modules_cast_in_place() -> Iterator[None]:
    """Within, ``module.bfloat16()`` and the like give fake parameters another content.

    Newer torch swaps the contents of two tensors for that, but of none to which there is a weak
    reference, and its own fake mode has one to each that it has made.
    """
    utilities = vars(torch.utils)
    plain = utilities['weakref']
    utilities['weakref'] = SimpleNamespace(getweakrefs=lambda tensor: [])
    try:
        yield
    finally:
        utilities['weakref'] = plain


def fake_mode() -> FakeTensorMode:
    """The mode in which tensors are fake.

    Without its cache of results, which holds storages that operators were given (``set_``) for the
    life of the process; ``fake_operators.py`` has another one.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return mode


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no memory behind it."""
    return isinstance(tensor, FakeTensor)


without_modes = torch._C._DisableTorchDispatch
"""A context in which tensors are what they are, for the parts of those that modes have made."""


def fake_on(memory: Tensor, device: torch.device, attributes: Mapping[str, Any]) -> Tensor:
    """A fake tensor, as its class makes it in three times the time.

    Args:
        memory: A meta tensor of its shape.
        device: For which it stands.
        attributes: Of another one on that device, in the same mode.
    """
    tensor = Tensor._make_subclass(
        FakeTensor, memory, False, dispatch_device=True, device_for_backend_keys=device
    )
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    vars(tensor).update(attributes)
    return tensor
