"""Codes of parts of a storage, and the views that are read from them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from memengine.memory.meter import count_kept
from memengine.techniques.activation_offload import is_offloading
from memengine.techniques.codecs.codec import Code, Codec, nbytes_of
from memengine.techniques.codecs.memory_order import is_dense
from memengine.techniques.compression.recomputation.recomputation import RecomputedCode
from memengine.techniques.compression.rules import EXACT
from memengine.techniques.compression.saved.offloaded_code import OffloadedCode
from memengine.techniques.modules.saved_tensors import current_backward

Layout = tuple[Any, torch.Size, tuple[int, ...]]  # offset, shape and strides, in elements


def coded(codec: Codec, base: Tensor) -> tuple[Code, int]:
    """A tensor's code, moved out beside an offload that is active, and its bytes."""
    code = codec(base)
    if isinstance(code, RecomputedCode):
        return code, 0  # nothing is kept, or to be looked for in it
    nbytes = nbytes_of(code)
    if is_offloading() and nbytes:
        return OffloadedCode(code), nbytes
    count_kept(code)
    return code, nbytes


class CodedPart:
    """A code, and which part of a storage it stands for.

    Attributes:
        code: What ``decode()`` gives the part from.
        codec: That has made it.
        layout: Of the part.
        dtype: As well.
        nbytes: Of the code.
        fidelity: How near it is.
        is_counted: Whether its bytes have been.
    """

    __slots__ = (
        '__weakref__', '_decoded', '_decoded_in', '_decoded_layout', '_device', '_is_dense',
        'code', 'codec', 'dtype', 'fidelity', 'is_counted', 'layout', 'nbytes',
    )  # fmt: skip

    def __init__(self, codec: Codec, base: Tensor, fidelity: float = EXACT) -> None:
        self.code, self.nbytes = coded(codec, base)
        self.codec, self.fidelity, self.is_counted = codec, fidelity, False
        self.layout, self.dtype, self._is_dense = layout_of(base), base.dtype, is_dense(base)
        self._device = base.device
        self._decoded: weakref.ref[torch.UntypedStorage] | None = None
        self._decoded_in, self._decoded_layout = -1, self.layout  # in which backward, and how

    def has(self, layout: Layout, dtype: torch.dtype) -> bool:
        """Whether a view of the storage can be read from it."""
        own = self.layout
        within = self._is_dense and layout[0] >= own[0] and _end_of(layout) <= _end_of(own)
        return dtype == self.dtype and (within or layout == own)

    def view_at(self, layout: Layout) -> Tensor:
        """A view that it serves; of memory that an earlier one still holds, as q, k and v do."""
        storage = self._decoded() if self._decoded is not None else None
        if storage is None or self._decoded_in != current_backward():
            base = self.code.decode()
            storage, self._decoded_in = base.untyped_storage(), current_backward()
            self._decoded, self._decoded_layout = weakref.ref(storage), layout_of(base)
            if layout == self.layout:
                return base
        offset, shape, stride = self._decoded_layout
        if layout != self.layout:
            offset, shape, stride = offset + layout[0] - self.layout[0], *layout[1:]
        view = torch.empty(0, dtype=self.dtype, device=self._device)
        return view.set_(storage, offset, shape, stride)


def layout_of(tensor: Tensor) -> Layout:
    """Where a tensor lies in its storage."""
    return tensor.storage_offset(), tensor.shape, tensor.stride()


def view_of(memory: Tensor, dtype: torch.dtype, layout: Layout) -> Tensor:
    """A view of a tensor's storage, which counts changes with it."""
    offset, shape, stride = layout
    if memory.dtype != dtype:
        nbytes = memory.untyped_storage().nbytes() // dtype.itemsize * dtype.itemsize
        whole = memory.as_strided((nbytes // memory.itemsize,), (1,), 0)
        memory = whole.view(dtype)
    return memory.as_strided(shape, stride, offset)


def _end_of(layout: Layout) -> int:
    """Behind the last element, in the storage; of a tensor with elements."""
    offset, shape, stride = layout
    return offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1
