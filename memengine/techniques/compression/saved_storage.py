"""Saved tensors by the memory that they are views of, so that each piece of it is coded once."""

from __future__ import annotations

import io
import pickle
import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memengine._torch_private.autograd import storage_key, version_of
from memengine.memory.ledger import tensors_in
from memengine.memory.meter import count_kept
from memengine.techniques.codecs.codec import Code, Codec
from memengine.techniques.codecs.facts import fact_codec
from memengine.techniques.codecs.memory_order import is_dense
from memengine.techniques.compression.backward_needs import Need
from memengine.techniques.compression.recomputable_ops import Repeated
from memengine.techniques.compression.rules import Repeat, Rule
from memengine.techniques.modules.saved_tensors import KeptAsIs, current_backward, is_in_backward
from memengine.techniques.offload import is_offloading, offloaded

__all__ = ['Memory', 'Saved']

_MOSTLY = 0.75  # of a storage: from here on it is coded whole, else each view of it
_Layout = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, shape and strides, in elements


class Saved:
    """A saved tensor: as it is, or in a code.

    Attributes:
        memory: The storage that it is a view of.
        rule: The rule that has a codec for it.
        codec: That codec, or one for a fact that all it is needed for is.
        is_settled: Whether its operation has been looked at.
        is_whole: Whether it stays as it is.
        module: Which saved it.
    """

    __slots__ = (
        '__weakref__', '_ahead', '_dtype', '_is_metered', '_kept', '_layout', '_moved', '_name',
        '_need', '_piece', '_rules', '_told', 'codec', 'is_settled', 'is_whole',
        'memory', 'module', 'rule',
    )  # fmt: skip

    def __init__(
        self,
        tensor: Tensor,
        memory: Memory,
        module: nn.Module,
        rules: Sequence[tuple[Rule, str]],
    ) -> None:
        self._keep(KeptAsIs(tensor))
        self.memory, self.module = memory, module
        self.rule: Rule | None = None
        self.codec: Codec | None = None
        self.is_settled = self.is_whole = self._is_metered = False
        self._layout, self._dtype = _layout_of(tensor), tensor.dtype
        self._rules, self._name = rules, ''  # of the module that saves it
        self._told = (0, 0)
        self._piece: _Piece | None = None
        self._ahead: Tensor | None = None
        self._moved: Callable[[], Tensor] | None = None
        self._need: Need | None = None
        memory.add(self)

    def _keep(self, kept: KeptAsIs) -> None:
        # A function, not the object, in which a meter would count the tensor.
        self._kept: Callable[[], KeptAsIs] | None = lambda: kept

    @property
    def is_here(self) -> bool:
        """Whether the tensor itself has not been let go."""
        return self._kept is not None

    @property
    def content(self) -> Tensor:
        """The tensor, while it is as it is."""
        assert self._kept is not None
        return self._kept().content

    def stay(self) -> None:
        """Stay as it is: here, or where an offload that is active moves it to."""
        self.is_whole = True
        if is_offloading():
            self._moved, self._kept = offloaded(self.content), None
        else:
            self.meter()

    def meter(self) -> None:
        """Let meters count the tensor from now on."""
        if not self._is_metered:
            self._is_metered = True
            count_kept(self.content)

    @property
    def fidelity(self) -> int:
        """How near its rule's code is."""
        return self.rule.fidelity if self.rule is not None else 0

    def tensor(self) -> Tensor:
        """What autograd is given for the tensor."""
        if self._kept is not None:
            return self._kept().tensor()
        if self._moved is not None:
            return self._moved()
        assert self._piece is not None
        ahead, self._ahead = self._ahead, None
        return self._piece.read(self._layout) if ahead is None else ahead

    def ahead(self) -> Tensor:
        """The tensor, for what is computed from it in backward before autograd asks for it too.

        That comes next, as a rule, so what is decoded in backward is kept until then.
        """
        tensor = self.tensor()
        if self._piece is not None and is_in_backward():
            self._ahead = tensor
        return tensor

    @property
    def is_exact(self) -> bool:
        """Whether it gives back what was saved."""
        if self._piece is None or self.rule is None:
            return True  # no code, or one of a fact
        code = self._piece.code
        return isinstance(code, Repeated) and code.repetition.is_exact

    def settle(self, need: Need, node: Any, repeat: Repeat) -> None:
        """Learn what the tensor is for, and so how to code it; its memory decides whether.

        Args:
            need: What the derivative needs of it.
            node: The node that saved it.
            repeat: As rules take it.
        """
        assert self._kept is not None
        if self._kept().is_modified:
            return  # an error in backward, as it is without codes
        self._need = need
        self.codec = fact_codec(need, self.content, node)
        if self.codec is None and need.is_of_values and self.content.is_floating_point():
            for rule, name in self._rules:
                if (codec := rule.codec(name, need, self.content, repeat)) is not None:
                    self.rule, self.codec, self._name = rule, codec, name
                    return

    def take(self, piece: _Piece) -> None:
        """Let go of the tensor, for a piece that it can be read from."""
        if self.rule is not None and self._need is not None:
            self._told = self.content.nbytes, 0 if piece.is_counted else piece.nbytes
            self.rule.kept.add(self._name, self._need.value, *self._told)
            piece.is_counted = True
        self._piece, self._kept = piece, None

    def keep(self, memory: Tensor) -> None:
        """Stay as it is for good, let go of the code, as the memory is kept anyway."""
        if not self.is_here:
            offset, shape, stride = self._layout
            here = memory if memory.dtype == self._dtype else memory.view(self._dtype)
            self._keep(KeptAsIs(here.as_strided(shape, stride, offset)))
            self._piece, self._moved, self._is_metered = None, None, False
            if self.rule is not None and self._need is not None and any(self._told):
                before, after = self._told
                self.rule.kept.add(self._name, self._need.value, -before, -after)
        self.rule = self.codec = None


class Memory:
    """A storage in one state, with what is saved of it."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage, self._version = weakref.ref(tensor.untyped_storage()), version_of(tensor)
        self._new: list[weakref.ref[Saved]] = []  # in the order of saving; not decided upon
        self._coded: list[weakref.ref[Saved]] = []
        self._as_it_is: list[weakref.ref[Saved]] = []
        self._pieces: dict[_Layout | None, weakref.ref[_Piece]] = {}  # None: of most of it

    def is_of(self, tensor: Tensor) -> bool:
        """Whether the tensor is a view of it; an address is used again when it is free."""
        return self._storage() is not None and self._version == version_of(tensor)

    def add(self, saved: Saved) -> None:
        """Note what is saved of it."""
        self._new.append(weakref.ref(saved))

    def settle(self, alive: Container[int] = ()) -> None:
        """Code what is saved, unless something needs the memory as it is.

        Args:
            alive: Addresses of storages that somebody else holds now, so that it is no price that
                they are here until they are coded.
        """
        new = _alive(self._new)
        if not new:
            return
        content = new[0].content
        if storage_key(content.untyped_storage()) not in alive:
            for one in new:
                one.meter()
        if not all(one.is_settled for one in new):
            return  # until the others' operations are looked at
        if any(one.codec is None for one in new) or self._is_kept():
            stays = [*new, *_alive(self._coded)]
            self._coded = []
            self._pieces.clear()
        else:
            self._code(new)
            stays = [one for one in new if one.is_here]
            self._coded += [weakref.ref(one) for one in new if not one.is_here]
        for one in stays:
            one.keep(content)
            one.stay()
        self._as_it_is += [weakref.ref(one) for one in stays]
        self._new = []

    def _is_kept(self) -> bool:
        return any(reference() is not None for reference in reversed(self._as_it_is))

    def _code(self, new: list[Saved]) -> None:
        values = [one for one in new if one.rule is not None]
        for one in new:
            if one.rule is None:
                assert one.codec is not None
                one.take(_new_piece(one.codec, one.content))
        best = max(values, key=lambda one: one.fidelity, default=None)
        for one in values:
            assert best is not None
            if (piece := self._piece_for(one, values, best)) is not None:
                one.take(piece)

    def _piece_for(self, one: Saved, others: list[Saved], best: Saved) -> _Piece | None:
        """A piece that serves: one that is there already, or a new one by the best's codec."""
        content = one.content
        layout = _layout_of(content)
        for key in (layout, None):  # the very view, or most of the storage
            piece = self._pieces[key]() if key in self._pieces else None
            if piece is not None and piece.serves(content):
                return piece
        assert best.rule is not None and best.codec is not None
        by_view = best.rule.by_view
        codec = one.codec if by_view and one.rule is best.rule else best.codec
        assert codec is not None
        views = [other.content for other in others if other.is_here]
        base = content if by_view else _base(content, views)
        piece = _new_piece(codec, base)
        whole = content.untyped_storage().nbytes()
        if piece.nbytes >= whole:
            return None
        is_most = base.nbytes >= _MOSTLY * whole
        self._pieces[None if is_most else layout] = weakref.ref(piece)
        return piece


def _alive(references: list[weakref.ref[Saved]]) -> list[Saved]:
    return [one for one in (reference() for reference in references) if one is not None]


def _base(view: Tensor, views: list[Tensor]) -> Tensor:
    """What to code for a view: all of its storage, if views of that are most of it, or itself."""
    storage = view.untyped_storage()
    for other in views:
        if other.nbytes == storage.nbytes() and is_dense(other):
            return other
    parts = {_layout_of(other): other.nbytes for other in views}
    if sum(parts.values()) >= _MOSTLY * storage.nbytes() and storage.nbytes() % view.itemsize == 0:
        return view.new_empty(0).set_(storage, 0, (storage.nbytes() // view.itemsize,), (1,))
    return view


def _new_piece(codec: Codec, base: Tensor) -> _Piece:
    with torch.no_grad():
        code = codec(base)
    nbytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(code))
    if is_offloading() and nbytes:
        code = _OffloadedCode(code)
    else:
        count_kept(code)
    return _Piece(code, base, nbytes)


class _OffloadedCode:
    """A code whose tensors have moved out; pickle takes it apart, and puts it together again."""

    def __init__(self, code: Code) -> None:
        self._tensors: list[Callable[[], Tensor]] = []
        with io.BytesIO() as file:
            pickler = pickle.Pickler(file)
            pickler.persistent_id = self._move_out  # type: ignore[method-assign]
            pickler.dump(code)
            self._rest = file.getvalue()

    def _move_out(self, part: object) -> int | None:
        if not isinstance(part, Tensor):
            return None
        self._tensors.append(offloaded(part))
        return len(self._tensors) - 1

    def decode(self) -> Tensor:
        with io.BytesIO(self._rest) as file:
            unpickler = pickle.Unpickler(file)
            unpickler.persistent_load = lambda index: self._tensors[index]()  # type: ignore
            return unpickler.load().decode()


class _Piece:
    """A code, and which part of a storage it stands for."""

    __slots__ = (
        '__weakref__', '_backward', '_decoded', '_dtype', '_end', '_found', '_is_dense',
        '_layout', 'code', 'is_counted', 'nbytes',
    )  # fmt: skip

    def __init__(self, code: Code, base: Tensor, nbytes: int) -> None:
        self.code, self.nbytes, self.is_counted = code, nbytes, False
        self._layout, self._dtype, self._is_dense = _layout_of(base), base.dtype, is_dense(base)
        self._end = _end_of(base)
        self._decoded: weakref.ref[torch.UntypedStorage] | None = None
        self._backward, self._found = -1, self._layout  # when, and how what was decoded lies

    def serves(self, view: Tensor) -> bool:
        """Whether a view of the storage can be read from it."""
        layout = _layout_of(view)
        within = self._is_dense and layout[0] >= self._layout[0] and _end_of(view) <= self._end
        return view.dtype == self._dtype and (within or layout == self._layout)

    def read(self, layout: _Layout) -> Tensor:
        """A view that it serves; of memory that an earlier one still holds, as q, k and v do."""
        storage = self._decoded() if self._decoded is not None else None
        if storage is None or self._backward != current_backward():
            base = self.code.decode()
            storage, self._backward = base.untyped_storage(), current_backward()
            self._decoded, self._found = weakref.ref(storage), _layout_of(base)
        offset, shape, stride = self._found
        if layout != self._layout:
            offset, shape, stride = offset + layout[0] - self._layout[0], *layout[1:]
        view = torch.empty(0, dtype=self._dtype, device=storage.device)
        return view.set_(storage, offset, shape, stride)


def _layout_of(tensor: Tensor) -> _Layout:
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


def _end_of(tensor: Tensor) -> int:
    """Behind the last element, in the storage; of a tensor with elements."""
    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + steps + 1
