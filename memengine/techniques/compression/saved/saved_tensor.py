"""A saved tensor, from when it is saved until backward asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from memengine.memory.meter import count_kept
from memengine.techniques.activation_offload import is_offloading, offload_tensor
from memengine.techniques.codecs.codec import Codec
from memengine.techniques.codecs.lossless_by_need import lossless_codec_for
from memengine.techniques.compression.backward_needs import Need
from memengine.techniques.compression.recomputation.operations import is_recomputable
from memengine.techniques.compression.recomputation.recomputation import (
    Recomputation,
    RecomputedCode,
    Whole,
)
from memengine.techniques.compression.rules import FindRecomputation, Rule
from memengine.techniques.compression.saved.coded_part import CodedPart, layout_of, view_of
from memengine.techniques.modules.saved_tensors import (
    KeptAsIs,
    is_in_backward,
    is_part_without_base,
)

if TYPE_CHECKING:
    from memengine.techniques.compression.saved.saved_storage import SavedStorage


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
        whole: It, or what it is a view of.
    """

    __slots__ = (
        '__weakref__', '_counted_bytes', '_dtype', '_is_metered', '_is_part', '_kept', '_layout',
        '_offloaded', '_prefetched', '_rules', 'codec', 'coding', 'follows', 'has_gradient',
        'is_examined', 'is_for_no_rule', 'is_recomputable', 'is_whole', 'memory', 'module', 'name',
        'need', 'number', 'order', 'part', 'rule', 'saved_as', 'whole',
    )  # fmt: skip

    def __init__(
        self,
        tensor: Tensor,
        memory: SavedStorage,
        module: nn.Module,
        rules: Sequence[tuple[Rule, str]],
    ) -> None:
        self._kept: KeptAsIs | None = KeptAsIs(tensor)
        self.whole = Whole.of(tensor)
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
            self.rule.kept.add(self.name, self.need.kind, *self._counted_bytes)
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
            self.rule.kept.add(self.name, self.need.kind, 0, -after)
            self.part, self._counted_bytes = part, (before, 0)
            self.saved_as = None  # it has been coded twice, which no plan says

    def revert_to(self, memory: Tensor) -> None:
        """Stay as it is for good, let go of the code, as the memory is kept anyway."""
        if not self.is_here:
            self._kept = KeptAsIs(view_of(memory, self._dtype, self._layout))
            self.part, self._offloaded, self._is_metered = None, None, False
            if self.rule is not None and self.need is not None and any(self._counted_bytes):
                before, after = self._counted_bytes
                self.rule.kept.add(self.name, self.need.kind, -before, -after)
        self.rule = self.codec = None
