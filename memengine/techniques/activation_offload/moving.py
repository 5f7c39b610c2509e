"""Saved tensors that move out, and come back shortly before backward asks for them."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memengine._torch_private.autograd import (
    check_of_later_writes,
    next_node_number,
    storage_key,
    version_of,
)
from memengine._torch_private.ops import do_not_compile
from memengine.memory.ledger import owned_by
from memengine.techniques.activation_offload.stores import Leaving, StartRead, store_bytes
from memengine.techniques.modules.saved_tensors import (
    KeptAsIs,
    is_in_backward,
    is_parameter,
    is_part_without_base,
    is_plain,
    may_be_unfilled,
)

if TYPE_CHECKING:
    from memengine.techniques.activation_offload.offload_activations import ActivationOffload


class _State(threading.local):
    """Of a thread."""

    offloading: Offloading | None = None  # the hooks that are active


_state = _State()


class Offloading(saved_tensors_hooks):
    """The saved-tensor hooks of one forward."""

    def __init__(self, offload: ActivationOffload, inputs: Iterable[Tensor]) -> None:
        self._offload = offload
        module = offload.module
        live = itertools.chain(module.parameters(), module.buffers(), inputs)
        self._stays = owned_by(tensor for tensor in live if is_plain(tensor))
        self._storages: list[weakref.ref[_OffloadedStorage]] = []  # in the order of saving
        self._latest: dict[int, tuple[weakref.ref[Any], int, weakref.ref[_OffloadedStorage]]] = {}
        self._leaving = Leaving()
        self._outside: Offloading | None = None
        self._waiting: deque[_Waiting] = deque()
        super().__init__(self.pack_saved, _unpack)

    def __enter__(self) -> None:
        super().__enter__()  # first: where hooks are forbidden, it raises
        self._outside, _state.offloading = _state.offloading, self

    def __exit__(self, *exception: object) -> None:
        _state.offloading = self._outside
        try:
            if self._waiting and exception[0] is None:
                self._move_filled(next_node_number() + 1)
            self._leaving.wait()
        finally:  # also where there is no room for what was to move
            super().__exit__(*exception)
            # A hook that is a method holds its object, and the inputs, until garbage is collected.
            self.pack_hook, self._stays = _unpack, {}

    def pack_saved(self, tensor: Tensor) -> Any:
        """What stands for a tensor that an operation saves."""
        number = next_node_number()
        if self._waiting:
            self._move_filled(number)
        if not may_be_unfilled(tensor):
            return self.pack(tensor)
        self._waiting.append(_Waiting(tensor, number))
        return self._waiting[-1]

    @do_not_compile
    def _move_filled(self, number: int) -> None:
        """Move what waits of nodes before the one after which autograd makes that number."""
        while self._waiting and self._waiting[0].number < number:
            waiting = self._waiting.popleft()
            if not waiting.packed.is_modified:
                waiting.packed = self.pack(waiting.packed.content)

    def pack(self, tensor: Tensor, is_part: bool | None = None) -> Any:
        """What stands for a tensor; it may be said whether it is a part without a base."""
        if not is_plain(tensor):
            return tensor
        storage = tensor.untyped_storage()
        stays = storage_key(storage) in self._stays or is_parameter(tensor)
        if stays or storage.nbytes() < self._offload.min_bytes:
            return KeptAsIs(tensor)
        if is_part is None:
            is_part = is_part_without_base(tensor)
        check = check_of_later_writes(tensor)
        if is_part:  # its version says nothing of the rest of the memory
            tensor = tensor.clone()
            storage = tensor.untyped_storage()
        return _OffloadedView(self._storage_of(tensor, storage), tensor, check)

    def _storage_of(self, tensor: Tensor, storage: Any) -> _OffloadedStorage:
        """What holds the storage as it is now."""
        known = self._latest.get(storage_key(storage))
        if known and known[0]() is not None and known[1] == version_of(tensor):
            stored = known[2]()
            if stored is not None:
                return stored
        offload, content = self._offload, tensor.new_empty(0, dtype=torch.uint8).set_(storage)
        read = store_bytes(content, offload.store, offload.folder, self._leaving)
        stored = _OffloadedStorage(offload, storage.nbytes(), read, self._storages)
        self._storages.append(weakref.ref(stored))
        self._latest[storage_key(storage)] = (
            weakref.ref(storage),  # an address is used again when its memory is free
            version_of(tensor),
            self._storages[-1],
        )
        return stored


def offload_tensor(tensor: Tensor, is_part: bool | None = None) -> Callable[[], Tensor]:
    """Move a tensor out as the offload does that is active; for hooks inside that keep tensors.

    Args:
        tensor: Its memory moves, once for all of its views.
        is_part: Whether it is a part of a memory, and no view of another tensor; to be said of one
            that is detached by now.

    Returns:
        Gives it back. Without an active offload it stays where it is.
    """
    offloading = _state.offloading
    if offloading is None:
        return lambda: tensor
    packed = offloading.pack(tensor, is_part)
    return lambda: _unpack(packed)


def is_offloading() -> bool:
    """Whether an offload is active."""
    return _state.offloading is not None


class _Waiting:
    """A saved tensor that moves once the operation that saved it is done."""

    def __init__(self, tensor: Tensor, number: int) -> None:
        self.packed: Any = KeptAsIs(tensor)
        self.number = number  # of the node that is made after its own

    def tensor(self) -> Tensor:
        return _unpack(self.packed)


def _unpack(packed: Any) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed.tensor()


class _OffloadedView:
    """A saved tensor whose storage moved out.

    Args:
        stored: The storage.
        tensor: The tensor.
        check: Raises once what was saved has been written to, though that is not what comes back.
    """

    def __init__(
        self, stored: _OffloadedStorage, tensor: Tensor, check: Callable[[], None]
    ) -> None:
        self._storage, self._dtype, self._check = stored, tensor.dtype, check
        stored.views.add(id(self))
        self._layout = (tensor.storage_offset(), tensor.shape, tensor.stride())

    def tensor(self) -> Tensor:
        self._check()
        base = self._storage.fetch(id(self))
        return base.new_empty(0, dtype=self._dtype).set_(base.untyped_storage(), *self._layout)


class _OffloadedStorage:
    """A storage that moved out."""

    def __init__(
        self,
        offload: ActivationOffload,
        nbytes: int,
        read: StartRead,
        storages: list[weakref.ref[_OffloadedStorage]],
    ) -> None:
        self._offload, self._nbytes, self._read = offload, nbytes, read
        self._index, self._storages = len(storages), storages
        self.views: set[int] = set()  # that were saved, by id
        self._asked_views: set[int] = set()
        self._arriving: Callable[[], Tensor] | None = None  # until backward asked for all views
        self._is_done = False  # backward has; there may be another through the same graph
        offload.count_bytes(stored=nbytes, out=nbytes)
        weakref.finalize(self, offload.count_bytes, -nbytes).atexit = False

    def fetch(self, view: int) -> Tensor:
        """The storage as bytes on its device; those that are asked for next are on their way."""
        if not is_in_backward():  # somebody compares, who asks for no others, and lets go of it
            self._offload.count_bytes(back=self._nbytes)
            return self._read()()
        arriving = self.start_fetch()
        first = max(self._index - self._offload.look_ahead, 0)
        following = reversed(self._storages[first : self._index])
        for stored in filter(None, (reference() for reference in following)):
            if not stored._is_done:
                stored.start_fetch()
        self._asked_views.add(view)
        if self._asked_views >= self.views:
            self._arriving, self._asked_views, self._is_done = None, set(), True
        return arriving()

    def start_fetch(self) -> Callable[[], Tensor]:
        """Start to bring the storage back, unless it is here or on its way; what waits for it."""
        if self._arriving is None:
            self._arriving = self._read()
            self._offload.count_bytes(back=self._nbytes)
        return self._arriving
