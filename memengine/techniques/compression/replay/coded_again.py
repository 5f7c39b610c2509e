"""Saved tensors that are coded as an earlier forward has coded them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from memengine._torch_private.autograd import version_of
from memengine.memory.meter import count_kept
from memengine.techniques.codecs.codec import Codec
from memengine.techniques.codecs.lossless_by_need import lossless_codec_for
from memengine.techniques.compression.backward_needs import Need
from memengine.techniques.compression.recomputation.operations import recomputation_of
from memengine.techniques.compression.recomputation.recomputation import (
    FindSource,
    Recomputation,
    Whole,
)
from memengine.techniques.compression.saved.coded_part import CodedPart, coded, view_of
from memengine.techniques.compression.saved.saved_storage import (
    SavedStorage,
    still_alive,
    to_be_decided,
)
from memengine.techniques.compression.saved.saved_tensor import SavedAs, SavedTensor
from memengine.techniques.modules.saved_tensors import KeptAsIs, is_in_backward

if TYPE_CHECKING:
    from memengine.techniques.compression.replay.plan import HowCoded


class CodedAgain:
    """A saved tensor of which the plan says how it is coded, if its node turns out to be as it was.

    Else it is looked at as if there were no plan, and that stands here. (Meters do not look into
    what can be called.)

    Attributes:
        memory: The storage that it is a view of, with what the plan codes of that.
        how: As it was coded.
        module: Which saved it.
        codec: The codec, once the node is known.
        number: Among those that its module saves in this forward.
        order: Among all that are saved in this forward.
        has_gradient: Whether the tensor has one.
        is_examined: Whether its node is known.
        is_metered: Whether meters have been shown it.
        instead: What is held of it without a plan, if the node was not as it was.
        follows: As of a :class:`SavedTensor`.
    """

    __slots__ = (
        '__weakref__', '_counted_bytes', '_is_whole', '_kept', '_prefetched', '_read', 'codec',
        'follows', 'has_gradient', 'how', 'instead', 'is_examined', 'is_metered', 'memory',
        'module', 'number', 'order',
    )  # fmt: skip
    only_recomputes = False

    def __init__(
        self, tensor: Tensor, memory: CodedMemory, how: HowCoded, module: nn.Module
    ) -> None:
        self._kept: KeptAsIs | None = KeptAsIs(tensor)
        self._read: Callable[[], Tensor] = self._kept.tensor
        self._prefetched: Tensor | None = None
        self.memory, self.how, self.module = memory, how, module
        self.codec: Codec | None = None
        self.number = self.order = self._counted_bytes = 0
        self.has_gradient = tensor.requires_grad
        self.is_examined = self.is_metered = False
        self.instead: SavedTensor | None = None
        self.follows: Recomputation | None = None
        self._is_whole = False

    def __call__(self) -> Tensor:
        """What autograd is given for the tensor."""
        if self.follows is not None and not self.follows.is_exact:
            return self.follows()
        tensor, self._prefetched = self._prefetched, None
        return self._read() if tensor is None else tensor

    decode = tensor = __call__

    def prefetch(self) -> Tensor:
        """The tensor, for what is computed from it in backward before autograd asks for it too."""
        tensor = self()
        if self._kept is None and is_in_backward():
            self._prefetched = tensor
        return tensor

    @property
    def is_exact(self) -> bool:
        """Whether it gives back what was saved."""
        if self.instead is not None:
            return self.instead.is_exact
        return self._kept is not None or self.how.rule is None

    @property
    def is_whole(self) -> bool:
        """Whether it stays as it is."""
        return self._is_whole if self.instead is None else self.instead.is_whole

    @property
    def is_modified(self) -> bool:
        """Whether the tensor was modified in place since it was saved; not once it is coded."""
        return self._kept is not None and self._kept.is_modified

    @property
    def content(self) -> Tensor:
        """The tensor, until it is coded."""
        assert self._kept is not None
        return self._kept.content

    def examine(
        self, node: Any, this: SavedAs, needs: Mapping[str, Need], find_source: FindSource
    ) -> bool:
        """Whether it can be coded as it was.

        Args:
            node: That has saved it.
            this: As what.
            needs: What the derivative needs of which field.
            find_source: Knows what is held of other nodes, from which it might be computed now.
        """
        how, kept = self.how, self._kept
        assert kept is not None
        field = how.saved_as.field
        if how.saved_as[:2] != this[:2] or needs.get(field) is not how.need or kept.is_modified:
            return False
        if any(rule.only_recomputes for rule, _ in how.rules):
            of = field, Whole.of(kept.content), self.number
            if recomputation_of(node, *of, find_source) is not None:
                return False
        self.codec = how.codec or lossless_codec_for(how.need, kept.content, node)
        self.is_examined = self.codec is not None
        return self.is_examined

    def show_to_meters(self) -> None:
        """Let meters count the tensor from now on."""
        if not self.is_metered:
            self.is_metered = True
            count_kept(self.content)

    def give_way(self, memory: SavedStorage) -> None:
        """Stand for what is held without a plan, which knows what is known."""
        how, kept = self.how, self._kept
        assert kept is not None
        saved = SavedTensor(kept.content, memory, self.module, how.rules)
        saved.hold(kept, self.has_gradient)
        saved.number, saved.order, saved.is_examined = self.number, self.order, self.is_examined
        if self.is_examined:
            saved.need, saved.name = how.need, how.name
            saved.rule, saved.codec = how.rule, self.codec
        self.instead, self._read, self._kept = saved, saved, None

    def code(self, read: Callable[[], Tensor], nbytes: int) -> None:
        """Let go of the tensor, for what reads it from a code of so many bytes."""
        how = self.how
        if how.rule is not None:
            self._counted_bytes = nbytes
            how.rule.kept.add(how.name, how.need.kind, self.content.nbytes, nbytes)
        self._read, self._kept = read, None

    def revert_to(self, memory: Tensor) -> None:
        """Stay as it is for good, let go of the code, as the memory is kept anyway."""
        how = self.how
        self._kept = KeptAsIs(view_of(memory, how.dtype, how.layout))
        self._read, self.is_metered = self._kept.tensor, False
        if how.rule is not None:
            before = self.content.nbytes
            how.rule.kept.add(how.name, how.need.kind, -before, -self._counted_bytes)

    def keep_or_offload(self) -> None:
        """Stay as it is, and here: beside an offload nothing is coded by plan."""
        self._is_whole = True
        self.show_to_meters()

    def move_to(self, part: CodedPart) -> None:
        """It stays where it is, which costs bytes at most."""


class CodedMemory:
    """A storage in one state, of which the plan says how what is saved of it is coded.

    Attributes:
        undecided: What is saved of it, in the order of saving, until it is coded.
        coded: What was, so far.
        kept: What was not, as its code would have been no smaller.
    """

    __slots__ = ('_parts', '_storage', '_version', 'coded', 'kept', 'undecided')

    def __init__(self, tensor: Tensor) -> None:
        self._storage, self._version = weakref.ref(tensor.untyped_storage()), version_of(tensor)
        self._parts: dict[int, weakref.ref[CodedPart]] = {}
        self.undecided: list[weakref.ref[CodedAgain]] = []
        self.coded: list[weakref.ref[CodedAgain]] = []
        self.kept: list[weakref.ref[CodedAgain]] = []

    def is_of(self, tensor: Tensor) -> bool:
        """Whether the tensor is a view of it."""
        return self._storage() is tensor.untyped_storage() and self._version == version_of(tensor)

    def add_view(self, saved: CodedAgain) -> None:
        """Note what is saved of it."""
        self.undecided.append(weakref.ref(saved))

    def take_undecided(self) -> list[CodedAgain]:
        """What is not coded, and will not be by plan."""
        undecided, self.undecided = still_alive(self.undecided), []
        return undecided

    def code(self, alive: Container[int] | None) -> bool:
        """Code what is saved, as ``code_or_keep()`` of a :class:`SavedStorage` would.

        Returns:
            False where not all is there, as it was, that was coded together: nothing is then.
        """
        new = to_be_decided(self.undecided, alive)
        if not new:
            return True
        is_as_it_was = len(new) == new[0].how.together and not still_alive(self.kept)
        if not is_as_it_was or any(one.is_modified for one in new):
            return False
        self.undecided = []
        for one in new:
            if self._code(one):
                self.coded.append(weakref.ref(one))
            else:
                one.keep_or_offload()
                self.kept.append(weakref.ref(one))
        return True

    def _code(self, one: CodedAgain) -> bool:
        """Whether that takes less than the storage, which depends on what is in it."""
        how, content = one.how, one.content
        codec = how.codec_of_part or one.codec
        assert codec is not None
        if how.base is None:
            code, nbytes = coded(codec, content)
            is_less = nbytes < how.nbytes or how.rule is None
            if is_less:
                one.code(code.decode, nbytes)
            return is_less
        reference = self._parts.get(how.part)
        part = reference() if reference is not None else None
        nbytes = 0
        if part is None:
            part = CodedPart(codec, view_of(content, how.dtype, how.base))
            nbytes = part.nbytes
            if nbytes >= how.nbytes:
                return False
            self._parts[how.part] = weakref.ref(part)
        one.code(partial(part.view_at, how.layout), nbytes)
        return True
