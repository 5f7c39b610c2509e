"""Saved tensors by the memory that they are views of, so that no part of it is coded twice."""

from __future__ import annotations

import io
import pickle
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import IO, Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from memengine._torch_private.autograd import storage_key, version_of
from memengine.memory.meter import count_kept
from memengine.techniques.activation_offload import is_offloading, offload_tensor
from memengine.techniques.codecs.codec import Code, Codec, nbytes_of
from memengine.techniques.codecs.lossless_by_need import lossless_codec_for
from memengine.techniques.codecs.memory_order import is_dense
from memengine.techniques.compression.backward_needs import Need
from memengine.techniques.compression.recomputation import (
    Recomputation,
    RecomputedCode,
    is_recomputable,
)
from memengine.techniques.compression.rules import EXACT, FindRecomputation, Rule
from memengine.techniques.modules.saved_tensors import (
    KeptAsIs,
    current_backward,
    is_in_backward,
    is_part_without_base,
)

__all__ = [
    'CodedPart',
    'Layout',
    'SavedAs',
    'SavedStorage',
    'SavedTensor',
    'coded',
    'layout_of',
    'still_alive',
    'to_be_decided',
    'view_of',
]

_SHARE_CODED_WHOLE = 0.75  # of a storage: from here on it is coded whole, else each view of it
Layout = tuple[Any, torch.Size, tuple[int, ...]]  # offset, shape and strides, in elements
_References: TypeAlias = 'list[weakref.ref[SavedTensor]]'
Saved = TypeVar('Saved')  # what hooks hold of a tensor, by plan or without one


class SavedAs(NamedTuple):
    """By which node a tensor was saved, and as what.

    Attributes:
        kind: The node's class.
        has_gradient: Of its inputs, which have one. With the class, that says what it saves.
        field: The field that holds it: '' for any of no need.
    """

    kind: type
    has_gradient: tuple[bool, ...]
    field: str

    @classmethod
    def of(cls, node: Any) -> SavedAs:
        """What a node has saved, whatever it is for."""
        return cls(type(node), tuple([one is not None for one, _ in node.next_functions]), '')


class SavedTensor:
    """A saved tensor: as it is, or in a code. Called, it gives what autograd is to have.

    (Meters do not look into what can be called: they are shown what is kept when that is known.)

    Attributes:
        memory: The storage that it is a view of.
        rule: The rule that has a codec for it.
        codec: That codec, or one for a fact that all it is needed for is.
        has_gradient: Whether the tensor has one.
        is_examined: Whether its operation has been looked at.
        is_whole: Whether it stays as it is.
        is_for_no_rule: Whether it would for any rule, by the operations before it.
        module: Which saved it.
        name: What the rule's model calls that.
        number: Among those that the module saves in this forward.
        need: What a derivative needs of it, if that is known.
        saved_as: By what, if it is known.
        order: Among all that are saved in this forward.
        part: Of the storage, with the code from which it is read.
        coding: The how manieth coding of its memory that was.
        is_recomputable: Whether a way was found to compute it again.
        follows: Gives what stands for it where others are coded, with which it has to agree.
    """

    __slots__ = (
        '__weakref__', '_counted_bytes', '_dtype', '_is_metered', '_is_part', '_kept', '_layout',
        '_offloaded', '_prefetched', '_rules', 'codec', 'coding', 'follows', 'has_gradient',
        'is_examined', 'is_for_no_rule', 'is_recomputable', 'is_whole', 'memory', 'module', 'name',
        'need', 'number', 'order', 'part', 'rule', 'saved_as',
    )  # fmt: skip

    def __init__(
        self,
        tensor: Tensor,
        memory: SavedStorage,
        module: nn.Module,
        rules: Sequence[tuple[Rule, str]],
    ) -> None:
        self._kept: KeptAsIs | None = KeptAsIs(tensor)
        self.has_gradient = tensor.requires_grad
        self._is_part = is_offloading() and is_part_without_base(tensor)
        self.memory, self.module = memory, module
        self.rule: Rule | None = None
        self.codec: Codec | None = None
        self.is_examined = self.is_whole = self.is_for_no_rule = self._is_metered = False
        self._rules, self.name = rules, ''  # of the module that saves it
        self.saved_as: SavedAs | None = None
        self.number = self.order = self.coding = 0
        self.is_recomputable = False
        self._counted_bytes = (0, 0)
        self.part: CodedPart | None = None
        self._prefetched: Tensor | None = None
        self._offloaded: Callable[[], Tensor] | None = None
        self.need: Need | None = None
        self.follows: Recomputation | None = None
        memory.add_view(self)

    def hold(self, kept: KeptAsIs, has_gradient: bool) -> None:
        """Stand for what was saved before, as it was then."""
        self._kept, self.has_gradient = kept, has_gradient

    @property
    def is_here(self) -> bool:
        """Whether the tensor itself has not been let go."""
        return self._kept is not None

    @property
    def content(self) -> Tensor:
        """The tensor, while it is as it is."""
        assert self._kept is not None
        return self._kept.content

    @property
    def is_modified(self) -> bool:
        """Whether the tensor was modified in place since it was saved; not once it is coded."""
        return self._kept is not None and self._kept.is_modified

    def keep_or_offload(self) -> None:
        """Stay as it is: here, or where an offload that is active moves it to."""
        self.is_whole = True
        assert self._kept is not None
        if is_offloading() and not self._kept.is_modified:  # of which backward will complain
            self._offloaded, self._kept = offload_tensor(self.content, self._is_part), None
        else:
            self.show_to_meters()

    def show_to_meters(self) -> None:
        """Let meters count the tensor from now on."""
        if not self._is_metered:
            self._is_metered = True
            count_kept(self.content)

    @property
    def fidelity(self) -> float:
        """How near its rule's code is."""
        assert self.rule is not None and self.codec is not None
        return self.rule.fidelity_of(self.codec)

    def __call__(self) -> Tensor:
        """What autograd is given for the tensor."""
        if self.follows is not None and not self.follows.is_exact:
            return self.follows()
        if self._kept is not None:
            return self._kept.tensor()
        if self._offloaded is not None:
            return self._offloaded()
        assert self.part is not None
        tensor, self._prefetched = self._prefetched, None
        return self.part.view_at(self._layout) if tensor is None else tensor

    decode = tensor = __call__

    def prefetch(self) -> Tensor:
        """The tensor, for what is computed from it in backward before autograd asks for it too.

        That comes next, as a rule, so what is decoded in backward is kept until then.
        """
        tensor = self()
        if self.part is not None and is_in_backward():
            self._prefetched = tensor
        return tensor

    @property
    def is_exact(self) -> bool:
        """Whether it gives back what was saved."""
        if self.part is None or self.rule is None:
            return True  # no code, or one of a fact
        code = self.part.code
        return isinstance(code, RecomputedCode) and code.recomputation.is_exact

    @property
    def only_recomputes(self) -> bool:
        """Whether no rule of its module codes anything but what can be computed again."""
        return all(rule.only_recomputes for rule, _ in self._rules)

    def may_be_coded(self, need: Need, node: Any, field: str) -> bool:
        """Whether a codec may be found for what this tensor's node has saved in a field."""
        if not need.is_of_values or need is Need.PRODUCT:  # whose factor may have two values
            return True
        if self.only_recomputes:
            return bool(self._rules) and is_recomputable(node, field)
        return True

    def choose_codec(self, need: Need, node: Any, find: FindRecomputation) -> None:
        """Learn what the tensor is for, and so how to code it; its memory decides whether.

        Args:
            need: What the derivative needs of it.
            node: The node that saved it.
            find: As rules take it.
        """
        assert self._kept is not None
        if self._kept.is_modified:
            return  # an error in backward, as it is without codes
        self.need = need
        is_varied = need is Need.PRODUCT and self.has_gradient  # a factor, and no dropout's mask
        self.codec = None if is_varied else lossless_codec_for(need, self.content, node)
        if self.codec is None and need.is_of_values and self.content.is_floating_point():
            for rule, name in self._rules:
                if (codec := rule.codec(name, need, self.content, find)) is not None:
                    self.rule, self.codec, self.name = rule, codec, name
                    return
            may_have_two_values = need is Need.PRODUCT and not is_varied
            self.is_for_no_rule = not (may_have_two_values or self.is_recomputable)

    @property
    def recomputation(self) -> Recomputation | None:
        """How it is computed again, if nothing is kept of it."""
        code = self.part.code if self.part is not None else None
        return code.recomputation if isinstance(code, RecomputedCode) else None

    @property
    def is_computed_again(self) -> bool:
        """Whether nothing is kept of it, and what it is computed from stays as it is."""
        return self.recomputation is not None and self.recomputation.is_from_whole

    def replace_by(self, part: CodedPart) -> None:
        """Let go of the tensor, for a coded part that it can be read from."""
        if self.rule is not None and self.need is not None:
            self._counted_bytes = self.content.nbytes, 0 if part.is_counted else part.nbytes
            self.rule.kept.add(self.name, self.need.value, *self._counted_bytes)
            part.is_counted = True
        self._layout, self._dtype = layout_of(self.content), self.content.dtype
        self.part, self._kept = part, None

    def move_to(self, part: CodedPart) -> None:
        """Be read from a part that is nearer, if that has what this is."""
        if self.rule is None or self.part is None or self.part.fidelity >= part.fidelity:
            return
        if part.has(self._layout, self._dtype):
            assert self.need is not None
            before, after = self._counted_bytes
            self.rule.kept.add(self.name, self.need.value, 0, -after)
            self.part, self._counted_bytes = part, (before, 0)
            self.saved_as = None  # it has been coded twice, which no plan says

    def revert_to(self, memory: Tensor) -> None:
        """Stay as it is for good, let go of the code, as the memory is kept anyway."""
        if not self.is_here:
            self._kept = KeptAsIs(view_of(memory, self._dtype, self._layout))
            self.part, self._offloaded, self._is_metered = None, None, False
            if self.rule is not None and self.need is not None and any(self._counted_bytes):
                before, after = self._counted_bytes
                self.rule.kept.add(self.name, self.need.value, -before, -after)
        self.rule = self.codec = None


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
        for one in of_values:
            if (part := self._part_for(one, of_values, best)) is not None:
                one.replace_by(part)

    def _part_for(
        self, one: SavedTensor, others: list[SavedTensor], best: SavedTensor
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
        base = content if by_view else _base_for(content, views)
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


def _base_for(view: Tensor, views: list[Tensor]) -> Tensor:
    """What to code for a view: all of its storage, if views of that are most of it, or itself."""
    storage = view.untyped_storage()
    views = [other for other in views if other.dtype == view.dtype]
    for other in views:
        if other.nbytes == storage.nbytes() and is_dense(other):
            return other
    parts = {layout_of(other): other.nbytes for other in views}
    if (
        sum(parts.values()) >= _SHARE_CODED_WHOLE * storage.nbytes()
        and storage.nbytes() % view.itemsize == 0
    ):
        return view.new_empty(0).set_(storage, 0, (storage.nbytes() // view.itemsize,), (1,))
    return view


def coded(codec: Codec, base: Tensor) -> tuple[Code, int]:
    """A tensor's code, moved out beside an offload that is active, and its bytes."""
    code = codec(base)
    if isinstance(code, RecomputedCode):
        return code, 0  # nothing is kept, or to be looked for in it
    nbytes = nbytes_of(code)
    if is_offloading() and nbytes:
        return _OffloadedCode(code), nbytes
    count_kept(code)
    return code, nbytes


class _OffloadedCode:
    """A code whose tensors have moved out; pickle takes it apart, and puts it together again."""

    def __init__(self, code: Code) -> None:
        with io.BytesIO() as file:
            pickler = _MovingPickler(file)
            pickler.dump(code)
            self._rest, self._tensors = file.getvalue(), pickler.tensors

    def decode(self) -> Tensor:
        with io.BytesIO(self._rest) as file:
            return _FetchingUnpickler(file, self._tensors).load().decode()


class _MovingPickler(pickle.Pickler):
    """Moves tensors out instead of writing them."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.tensors: list[Callable[[], Tensor]] = []

    def persistent_id(self, part: object) -> int | None:
        if not isinstance(part, Tensor):
            return None
        self.tensors.append(offload_tensor(part))
        return len(self.tensors) - 1


class _FetchingUnpickler(pickle.Unpickler):
    """Fetches them again."""

    def __init__(self, file: IO[bytes], tensors: list[Callable[[], Tensor]]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, index: int) -> Tensor:
        return self.tensors[index]()


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
