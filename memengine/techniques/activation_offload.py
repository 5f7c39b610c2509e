"""Activation offload: what autograd saves waits outside the device's memory until backward.

In pinned host memory, copied on a stream of its own, or in a file. Tensors come back shortly
before backward asks for them, in the reverse of the order in which they were saved.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memengine._torch_private.autograd import (
    check_of_later_writes,
    is_under_forward_ad,
    is_under_functorch,
    next_node_number,
    storage_key,
    version_of,
)
from memengine._torch_private.ops import do_not_compile, pytree
from memengine.memory.ledger import owned_by
from memengine.technique import PausableHandle, Report, Settings, Technique, setting, with_settings
from memengine.techniques.modules.saved_tensors import (
    KeptAsIs,
    is_in_backward,
    is_parameter,
    is_part_without_base,
    is_plain,
    may_be_unfilled,
)
from memengine.techniques.modules.wrapped_forward import WrappedForward, is_wrapped

__all__ = [
    'ActivationOffload',
    'ActivationOffloadSettings',
    'is_offloading',
    'offload_activations',
    'offload_tensor',
]

_SETTING = 'activation_offload'


class _State(threading.local):
    """Of a thread."""

    offloading: _Offloading | None = None  # the hooks that are active


_state = _State()


def offload_activations(
    model: nn.Module,
    store: str = 'auto',
    *,
    folder: str | Path | None = None,
    min_bytes: int = 2**20,
    look_ahead: int = 2,
) -> ActivationOffload:
    """Let what a model saves for backward wait outside the device's memory. Exact.

    Left where they are: parameters, buffers and the model's inputs, which live anyway; tensors
    below ``min_bytes``; tensor subclasses and sparse tensors; what other saved-tensor hooks inside
    the model take. A storage that is saved several times, or in several views, moves once. Of
    dropped or quantised activations, applied before, the codes move. Under activation
    checkpointing, applied before, the inputs of checkpointed modules move, and what they keep
    (torch >= 2.9).

    Args:
        model: Its ``forward`` is wrapped; the model stays what it is.
        store: ``'host'`` for host memory (pinned for a model on an accelerator), ``'disk'`` for
            files, ``'auto'`` for host memory on an accelerator and files on a CPU.
        folder: Where the files go; a temporary folder by default. They are removed with the graph.
        min_bytes: Smallest storage that moves, in bytes.
        look_ahead: How many storages are brought back before they are asked for. Each costs its
            bytes on the device; 0 brings back what is asked for and waits.

    Returns:
        The handle: ``stored_bytes``, ``peak_stored_bytes``, ``moved_bytes``, ``undo()``.

    Raises:
        ValueError: For an unknown store, a folder without files, sizes below 0, or a model that
            is offloaded already.

    Cost: every byte once out and once back, on CUDA beside the computation. On the device are what
    is not moved, ``look_ahead`` storages, and those in use: from the first op that asks for one to
    the last. No computation. Autocast, BatchNorm and random state are not touched; DDP, FSDP,
    slices and the gradient cache compose, as does ``torch.compile``, whose graphs save too.

    Source: ``torch.autograd.graph.save_on_cpu`` is the plain form, without look-ahead, sharing or
    minimum size.
    """
    given = dict(store=store, folder=folder, min_bytes=min_bytes, look_ahead=look_ahead)
    TECHNIQUE.set_to(given)  # refuses what they cannot be
    if is_wrapped(model, ActivationOffload):
        raise ValueError(f'{_SETTING}: {type(model).__name__} is offloaded already')
    offload = ActivationOffload(model, store, folder, min_bytes, look_ahead)
    offload.begin()
    return offload


class ActivationOffload(WrappedForward, PausableHandle):
    """A model's forward whose saved tensors move; made by :func:`offload_activations`.

    Attributes:
        stored_bytes: Bytes in the store now.
        peak_stored_bytes: The most so far.
        moved_bytes: Bytes that went out so far, and came back: a pair.
    """

    setting = _SETTING

    def __init__(
        self, module: nn.Module, store: str, folder: str | Path | None, min_bytes: int, ahead: int
    ) -> None:
        super().__init__('', module)
        self.store, self.folder = store, folder
        self.min_bytes, self.look_ahead = min_bytes, ahead
        self.stored_bytes = self.peak_stored_bytes = 0
        self.moved_bytes = (0, 0)

    @do_not_compile(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; what it saves moves."""
        is_transformed = is_under_functorch() or is_under_forward_ad()  # nothing moves there
        if self.is_paused or not torch.is_grad_enabled() or is_transformed:
            return self.plain(*args, **kwargs)
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        with _Offloading(self, inputs):
            return self.plain(*args, **kwargs)

    def report(self) -> Report:
        """What has moved."""
        if not self.moved_bytes[0]:
            return Report(
                left=f'{_SETTING}: the first iteration saved nothing of at least '
                f'min_bytes={self.min_bytes} that can be moved; lower min_bytes'
            )
        return Report(
            f'Activation offload: {self.moved_bytes[0] / 2**20:.1f} MiB moved in the first '
            f'iteration, {self.peak_stored_bytes / 2**20:.1f} MiB of them at once'
        )

    def count_bytes(self, stored: int = 0, out: int = 0, back: int = 0) -> None:
        """Note bytes that came into the store, moved out and came back."""
        self.stored_bytes += stored
        self.peak_stored_bytes = max(self.peak_stored_bytes, self.stored_bytes)
        self.moved_bytes = (self.moved_bytes[0] + out, self.moved_bytes[1] + back)


class _Offloading(saved_tensors_hooks):
    """The saved-tensor hooks of one forward."""

    def __init__(self, offload: ActivationOffload, inputs: Iterable[Tensor]) -> None:
        self._offload = offload
        module = offload.module
        live = itertools.chain(module.parameters(), module.buffers(), inputs)
        self._stays = owned_by(tensor for tensor in live if is_plain(tensor))
        self._storages: list[weakref.ref[_OffloadedStorage]] = []  # in the order of saving
        self._latest: dict[int, tuple[weakref.ref[Any], int, weakref.ref[_OffloadedStorage]]] = {}
        self._leaving = _Leaving()
        self._outside: _Offloading | None = None
        self._waiting: deque[_Waiting] = deque()
        super().__init__(self.pack_saved, _unpack)

    def __enter__(self) -> None:
        super().__enter__()  # first: where hooks are forbidden, it raises
        self._outside, _state.offloading = _state.offloading, self

    def __exit__(self, *exception: object) -> None:
        _state.offloading = self._outside
        if self._waiting and exception[0] is None:
            self._move_filled(next_node_number() + 1)
        self._leaving.wait()
        super().__exit__(*exception)
        # A hook that is a method holds its object, and so the inputs, until garbage is collected.
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
        content = tensor.new_empty(0, dtype=torch.uint8).set_(storage)
        read = _store(self._offload, content, self._leaving)
        stored = _OffloadedStorage(self._offload, storage.nbytes(), read, self._storages)
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
        read: _StartRead,
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


# A store writes bytes away and returns how to start reading them; what that returns waits for the
# bytes. Functions, not objects, as the meter of saved bytes looks for tensors in objects.
_StartRead = Callable[[], Callable[[], Tensor]]


def _store(offload: ActivationOffload, content: Tensor, leaving: _Leaving) -> _StartRead:
    on_cpu = content.device.type == 'cpu'
    if offload.store == 'disk' or (offload.store == 'auto' and on_cpu):
        return _to_disk(content, offload.folder)
    return _to_memory(content) if on_cpu else _to_pinned_memory(content, leaving)


def _to_memory(content: Tensor) -> _StartRead:
    copy = content.clone()

    def read() -> Callable[[], Tensor]:
        back = copy.clone()
        return lambda: back

    return read


def _to_disk(content: Tensor, folder: str | Path | None) -> _StartRead:
    handle, path = tempfile.mkstemp(prefix='activation_', dir=folder)
    os.close(handle)
    size, device = content.numel(), content.device
    torch.from_file(path, shared=True, size=size, dtype=torch.uint8).copy_(content)

    def read() -> Callable[[], Tensor]:
        mapped = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        back = mapped.to(device, copy=True)
        return lambda: back

    weakref.finalize(read, Path(path).unlink, missing_ok=True)
    return read


class _Leaving:
    """Tensors that are being copied out, held until their own stream waits for the copies.

    With ``record_stream`` the allocator would ask the device whether a copy is done: a host that
    runs ahead of it finds nothing free, and the device holds as much as without offload.
    """

    most = 2  # at once

    def __init__(self) -> None:
        self._copies: deque[tuple[Tensor, Any, Any]] = deque()  # with event, and stream

    def add(self, content: Tensor, copied: Any, stream: Any) -> None:
        """Hold what was computed on ``stream`` until the event ``copied``."""
        self._copies.append((content, copied, stream))
        self.wait(self.most)

    def wait(self, most: int = 0) -> None:
        """Let all but the last ``most`` go; the device waits for their copies, not the host."""
        while len(self._copies) > most:
            _, copied, stream = self._copies.popleft()
            stream.wait_event(copied)


_streams: dict[torch.device, Any] = {}  # one for each device, for copies in both directions


def _to_pinned_memory(content: Tensor, leaving: _Leaving) -> _StartRead:
    device = content.device
    module = torch.get_device_module(device)
    copying = _streams.setdefault(device, module.Stream(device))
    copy = torch.empty(content.shape, dtype=torch.uint8, device='cpu', pin_memory=True)
    computing = module.current_stream(device)
    copying.wait_stream(computing)
    with module.stream(copying):
        copy.copy_(content, non_blocking=True)
    leaving.add(content, copying.record_event(), computing)

    def read() -> Callable[[], Tensor]:
        asking = module.current_stream(device)
        back = torch.empty_like(copy, device=device)  # memory that this stream has done with
        copying.wait_stream(asking)
        with module.stream(copying):
            back.copy_(copy, non_blocking=True)
        arrived = copying.record_event()

        def wait() -> Tensor:
            using = module.current_stream(device)
            using.wait_event(arrived)
            if using != asking:
                back.record_stream(using)
            return back

        # Nobody may have waited: its memory is still not given away before it has arrived.
        weakref.finalize(wait, _wait_for, asking, arrived, back).atexit = False
        return wait

    return read


def _wait_for(stream: Any, event: Any, _held_until_then: Tensor) -> None:
    stream.wait_event(event)


@dataclass(frozen=True)
class ActivationOffloadSettings(Settings):
    """Settings of :func:`offload_activations`."""

    store: Literal['auto', 'host', 'disk'] = setting(
        'auto', help='where to: host memory, files, or files on a CPU only'
    )
    folder: str | Path | None = setting(None, help='where files go; None: a temporary folder')
    min_bytes: int = setting(2**20, help='smallest storage that moves', unit='bytes', low=0)
    look_ahead: int = setting(
        2, help='how many are brought back before they are asked for', unit='storages', low=0
    )
    strict: bool = setting(True, help='whether it is an error when the first step moves nothing')

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.folder is not None and self.store == 'host':
            raise ValueError(f"folder={str(self.folder)!r} is for store='disk', not 'host'")


TECHNIQUE = Technique(
    key=_SETTING,
    title='activation offload',
    settings=ActivationOffloadSettings,
    apply=with_settings(offload_activations),
    call='memengine.offload_activations',
    shorthand='store',
    after=('activation_checkpointing',),  # what is left to save moves, and codes for tensors
    use_when='what is left does not fit on the GPU, and host memory is free',
    saves='what is saved for backward, on the device',
    price='every byte to the host and back',
    page='activation_checkpointing.md',
    example=ActivationOffloadSettings(store='disk', min_bytes=64),
)
