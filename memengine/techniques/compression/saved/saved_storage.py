"""Saved tensors by the memory that they are views of, so that no part of it is coded twice."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from memengine._torch_private.autograd import storage_key, version_of
from memengine.techniques.codecs.memory_order import is_dense
from memengine.techniques.codecs.quantized import Quantizer
from memengine.techniques.compression.saved.coded_part import CodedPart, Layout, layout_of
from memengine.techniques.compression.saved.saved_tensor import SavedTensor
from memengine.techniques.modules.saved_tensors import KeptAsIs

_SHARE_CODED_WHOLE = 0.75  # of a storage: from here on it is coded whole, else each view of it
_References: TypeAlias = list[weakref.ref[SavedTensor]]
Saved = TypeVar('Saved')  # what hooks hold of a tensor, by plan or without one


class SavedStorage:
    """A storage in one state, with what is saved of it.

    Attributes:
        views: How often anything of it was saved.
    """

    def __init__(self, tensor: Tensor, held: Callable[[], KeptAsIs | None] | None = None) -> None:
        """A view of it is saved, and another may be held as it is whatever is decided here."""
        self._storage, self._version = weakref.ref(tensor.untyped_storage()), version_of(tensor)
        self._undecided: _References = []  # in the order of saving
        self._coded: _References = []
        self._codings = self.views = 0
        self._kept_whole: list[Callable[[], object]] = []
        other = held() if held is not None else None
        if held is not None and other is not None and not other.is_modified:
            self._kept_whole.append(held)
        self._parts: dict[Layout | None, weakref.ref[CodedPart]] = {}  # None: of most of it

    def is_of(self, tensor: Tensor) -> bool:
        """Whether the tensor is a view of it; an address is used again when it is free."""
        return self._storage() is not None and self._version == version_of(tensor)

    def is_in(self, storage: torch.UntypedStorage | None) -> bool:
        """Whether it is that storage, in this state or another."""
        return storage is not None and self._storage() is storage

    @property
    def may_be_lossy(self) -> bool:
        """Whether a rule may keep it in a code that gives back something else."""
        saved = still_alive(self._undecided) + still_alive(self._coded)
        return not all(one.only_recomputes for one in saved)

    def add_planned(
        self, coded: Iterable[weakref.ref[Any]], kept: Iterable[weakref.ref[Any]]
    ) -> None:
        """Note what a plan has coded of it, to be let go of if it stays as it is, and has kept."""
        self._coded += coded
        self._kept_whole += kept

    def add_view(self, saved: SavedTensor) -> None:
        """Note what is saved of it."""
        self.views += 1
        self._undecided.append(weakref.ref(saved))

    def code_or_keep(self, alive: Container[int] | None = ()) -> None:
        """Code what is saved, unless something needs the memory as it is.

        Args:
            alive: Addresses of storages that somebody else holds now, so that it is no price that
                they are here until they are coded. None where there is no meter to tell.
        """
        new = to_be_decided(self._undecided, alive)
        if not new:
            return
        content = new[0].content
        if any(one.is_modified for one in new):
            stays = new  # of which backward will complain; what was coded before was not changed
        elif None in [one.codec for one in new] or self._is_kept():
            stays = new
            if self._coded:
                stays += still_alive(self._coded)
                self._coded = []
                self._parts.clear()
        else:
            self._code(new)
            stays = [one for one in new if one.is_here]
            self._coded += [weakref.ref(one) for one in new if not one.is_here]
        for one in stays:
            one.revert_to(content)
            one.keep_or_offload()
        self._kept_whole += [weakref.ref(one) for one in stays]
        self._undecided = []

    def _is_kept(self) -> bool:
        return any(reference() is not None for reference in reversed(self._kept_whole))

    def _code(self, new: list[SavedTensor]) -> None:
        self._codings += 1
        for one in new:
            one.coding = self._codings
        of_values = [one for one in new if one.rule is not None]
        for one in new:
            if one.rule is None:
                assert one.codec is not None
                one.replace_by(CodedPart(one.codec, one.content))
        if not of_values:
            return
        best = max(of_values, key=lambda one: one.fidelity)
        step = _step_of_channels(best)
        for one in of_values:
            if (part := self._part_for(one, of_values, best, step)) is not None:
                one.replace_by(part)

    def _part_for(
        self, one: SavedTensor, others: list[SavedTensor], best: SavedTensor, step: int | None
    ) -> CodedPart | None:
        """A part that serves: one that is there and as near, or a new one by the best's codec."""
        content = one.content
        layout, fidelity = layout_of(content), best.fidelity
        for key in (layout, None) if self._parts else ():  # the very view, or most of the storage
            part = self._parts[key]() if key in self._parts else None
            if part is not None and part.fidelity >= fidelity and part.has(layout, content.dtype):
                return part
        assert best.rule is not None and best.codec is not None
        by_view = best.rule.codes_each_view
        codec = one.codec if by_view and one.rule is best.rule else best.codec
        assert codec is not None
        views = [other.content for other in others if other.is_here]
        base = content if by_view else _base_for(content, views, step)
        part = CodedPart(codec, base, fidelity)
        whole = content.untyped_storage().nbytes()
        if part.nbytes >= whole:
            return None
        is_most = base.nbytes >= _SHARE_CODED_WHOLE * whole
        self._parts[None if is_most else layout] = weakref.ref(part)
        for earlier in still_alive(self._coded):
            earlier.move_to(part)
        return part


def still_alive(references: Iterable[weakref.ref[Saved]]) -> list[Saved]:
    """Those that autograd has not let go of."""
    return [one for reference in references if (one := reference()) is not None]


def to_be_decided(undecided: Iterable[weakref.ref[Any]], alive: Container[int] | None) -> list[Any]:
    """What is saved of a memory, once all of its operations are looked at; nothing before.

    Args:
        undecided: So far.
        alive: As in :meth:`SavedStorage.code_or_keep`: meters count what nobody else holds.
    """
    saved = still_alive(undecided)
    if saved and alive is not None and storage_key(saved[0].content.untyped_storage()) not in alive:
        for one in saved:
            one.show_to_meters()
    return [] if False in [one.is_examined for one in saved] else saved


def _step_of_channels(saved: SavedTensor) -> int | None:
    """Elements from one channel to the next, where the codec looks at channels."""
    codec = saved.codec
    is_by_channel = isinstance(codec, Quantizer) and codec.by_channel and saved.content.ndim > 1
    return saved.content.stride(1) if is_by_channel else None


def _base_for(view: Tensor, views: list[Tensor], step: int | None) -> Tensor:
    """What to code for a view: all of its storage, if views of that are most of it, or itself.

    All of it in a shape with channels that are as many elements apart, if these matter.
    """
    storage = view.untyped_storage()
    views = [other for other in views if other.dtype == view.dtype]
    for other in views:
        has_channels = step is None or (other.ndim > 1 and other.stride(1) == step)
        if has_channels and other.nbytes == storage.nbytes() and is_dense(other):
            return other
    if step is not None:
        return view
    parts = {layout_of(other): other.nbytes for other in views}
    if (
        sum(parts.values()) >= _SHARE_CODED_WHOLE * storage.nbytes()
        and storage.nbytes() % view.itemsize == 0
    ):
        return view.new_empty(0).set_(storage, 0, (storage.nbytes() // view.itemsize,), (1,))
    return view
