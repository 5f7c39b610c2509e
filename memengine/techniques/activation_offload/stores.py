"""Where bytes wait: in host memory, in pinned host memory beside an accelerator, or in a file."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memengine._torch_private.fake import is_fake

# A store writes bytes away and returns how to start reading them; what that returns waits for the
# bytes. Functions, not objects, as the meter of saved bytes looks for tensors in objects.
StartRead = Callable[[], Callable[[], Tensor]]


def store_bytes(
    content: Tensor, store: str, folder: str | Path | None, leaving: Leaving
) -> StartRead:
    """Write bytes away.

    Args:
        content: The bytes, [N].
        store: Where to: ``'host'``, ``'disk'`` or ``'auto'``.
        folder: Where files go; None for a temporary folder.
        leaving: Holds what is still being copied.
    """
    on_cpu = content.device.type == 'cpu'
    if store == 'disk' or (store == 'auto' and on_cpu):
        return _to_disk(content, folder)
    return _to_memory(content) if on_cpu else _to_pinned_memory(content, leaving)


def _to_memory(content: Tensor) -> StartRead:
    copy = content.clone()

    def read() -> Callable[[], Tensor]:
        back = copy.clone()
        return lambda: back

    return read


def _to_disk(content: Tensor, folder: str | Path | None) -> StartRead:
    size, device = content.numel(), content.device
    mapped = _map_file(size, folder)
    mapped.copy_(content)
    _let_go_of_pages(mapped)

    def read() -> Callable[[], Tensor]:
        back = mapped.to(device, copy=True)
        _let_go_of_pages(mapped)
        return lambda: back

    return read


def _map_file(size: int, folder: str | Path | None) -> Tensor:
    """Bytes that are a file's, which has no name: it goes with them, and with a process at once.

    (A file that is open would need no mapping, but processes may open some thousand only.)
    """
    try:
        handle, path = tempfile.mkstemp(prefix='activation_', dir=folder)
        try:
            # To write to a mapping of a full disk is a SIGBUS.
            if size and hasattr(os, 'posix_fallocate'):
                os.posix_fallocate(handle, 0, size)
            return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        finally:
            os.close(handle)
            os.unlink(path)
    except OSError as error:
        raise OSError(
            f'activation_offload: {size / 2**20:.1f} MiB cannot be written to '
            f'{folder or tempfile.gettempdir()} ({error.strerror}); set activation_offload.folder '
            "to where there is room, or store='host'"
        ) from error


def _let_go_of_pages(mapped: Tensor) -> None:
    """Leave what has been written or read to the file, as a process is said to take its pages."""
    if not is_fake(mapped):
        address, length = ctypes.c_void_p(mapped.data_ptr()), ctypes.c_size_t(mapped.nbytes)
        _madvise()(address, length, mmap.MADV_DONTNEED)


@cache
def _madvise() -> Callable[..., int]:
    """The C library's function: each look-up makes classes that only a collection frees."""
    found: Callable[..., int] = ctypes.CDLL(None).madvise
    return found


class Leaving:
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


def _to_pinned_memory(content: Tensor, leaving: Leaving) -> StartRead:
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
