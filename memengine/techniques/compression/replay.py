"""What a forward keeps as it is, computes again or codes is replayed in later ones.

A forward notes it, in the order of saving. In later ones what stays is let pass at once, and what
is computed again is let go at once, where the graph gives the same answers as it did; no operation
is looked up for either: to keep a tensor, or to compute its very bits again, is right whatever it
is for. A lossy code has to be known to serve: what is coded waits, in each forward anew, until its
module ends and the graph shows its node. If that is of the class that it was, the field is known
and so is the need; fields are not searched. What differs from the plan drops it. What cannot be
seen to differ costs bytes at most, until the next forward that follows no plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memengine._torch_private.autograd import node_number, storage_key, version_of
from memengine.techniques.activation_offload import is_offloading
from memengine.techniques.compression.recomputation import (
    ComputedAgain,
    ComputedMemory,
    Recomputation,
    Source,
)
from memengine.techniques.compression.rules import RecomputedPlace, Rule
from memengine.techniques.compression.saved_storage import SavedAs, SavedStorage, SavedTensor
from memengine.techniques.modules.saved_tensors import KeptAsIs, is_parameter, is_plain

__all__ = ['ForwardPlans', 'HeldWhole', 'Replay']

_MOST_PLANS = 8  # of a model's; inputs may have another shape each time


class HeldWhole(KeptAsIs):
    """A saved tensor of which the plan says that it stays as it is.

    Attributes:
        follows: As of a :class:`SavedTensor`.
    """

    __slots__ = ('follows', 'module')

    def __init__(self, tensor: Tensor, module: nn.Module) -> None:
        super().__init__(tensor)
        self.module = module
        self.follows: Recomputation | None = None

    def tensor(self) -> Tensor:
        """The tensor, or what stands for it."""
        if self.follows is None or self.follows.is_exact:
            return KeptAsIs.tensor(self)  # super() takes longer
        return self.follows()

    decode = prefetch = tensor


class _Again(NamedTuple):
    """How a saved tensor was computed again.

    Attributes:
        made: The recomputation; its sources are not held.
        saved_at: For each source the place in the plan, None for what is to be had elsewhere.
        rule: By which.
        place: Where.
        nbytes: Of the storage.
        first: Place in the plan of the first tensor of its memory; None where that is the only one.
    """

    made: Recomputation
    saved_at: list[int | None]
    rule: Rule
    place: RecomputedPlace
    nbytes: int
    first: int | None


class _Step(NamedTuple):
    """What the plan has for a saved tensor, and what has to be the same of it.

    Attributes:
        node: Its node's number, from the forward's first on, and so how many were made in between.
        shape: The tensor's.
        stride: As well.
        dtype: As well.
        rules: Of the module that saves it; each module has a list of its own.
        is_parameter: Whether it is one; of its shape nothing is asked then.
        again: How it was computed again; None where it stays.
        saved_as: By what, where it may be coded; it is looked at then.
    """

    node: int | None
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    rules: Sequence[Any]
    is_parameter: bool = False
    again: _Again | None = None
    saved_as: SavedAs | None = None


FindMemory = Callable[[Tensor], SavedStorage | None]
_Plan = list[_Step | None]  # for each saved tensor; None: to be looked at
_NO_MORE = _Step(None, torch.Size(), (), torch.bool, ())  # agrees with none


class ForwardPlans:
    """What forwards of a model have saved, by the shapes of what they were given, and by rules."""

    def __init__(self) -> None:
        self._plans: dict[Any, _Plan] = {}
        self._uses: dict[Any, int] = {}

    def begin(self, inputs: Sequence[Any], rules: Sequence[Rule], first_node: int) -> Replay:
        """A forward begins. The first, second, fourth, eighth ... of a kind follows no plan."""
        shapes = ((x.shape, x.dtype) for x in inputs if type(x) is Tensor and is_plain(x))
        kind = *shapes, *(rule.state for rule in rules)
        uses = self._uses[kind] = self._uses.pop(kind, 0) + 1  # at the end: it is the latest
        if len(self._uses) > _MOST_PLANS:
            oldest = [*self._uses][0]
            self._uses.pop(oldest, None)
            self._plans.pop(oldest, None)
        plan = self._plans.get(kind) if uses & (uses - 1) else None
        return Replay(self._plans, kind, plan, first_node)


class Replay:
    """One forward beside its plan; without one, it is noted for later ones."""

    def __init__(
        self, plans: dict[Any, _Plan], kind: Any, plan: _Plan | None, first_node: int
    ) -> None:
        self._plans, self._kind, self._first_node = plans, kind, first_node
        self.is_noting = plan is None
        self._noted: list[_Noted | None] = []
        self._plan: _Plan = plan or []
        self._rest: Iterator[_Step | None] = iter(self._plan)
        self._packed: list[weakref.ref[Any] | None] = []  # so far, as the plan has it
        self._held: dict[int, weakref.ref[Any]] = {}  # of these what stays, by its storage
        self._looked_up = 0  # how many of them

    def pack(self, tensor: Tensor, node: int | None, saver: Any, find_memory: FindMemory) -> Any:
        """What to keep of a tensor; to be asked once for each, in the order of saving.

        Args:
            tensor: That is saved.
            node: The number of its node; None for what no node saves.
            saver: The forward of the module.
            find_memory: Finds a plain tensor's, if something that is saved of it was looked at.

        Returns:
            None for what is to be looked at, or by what it is saved, where that is known.
        """
        step = next(self._rest, _NO_MORE)
        packed: Any = None
        if step is None:
            pass
        elif node is None or node - self._first_node != step.node:
            self._drop()
        elif step.is_parameter:
            if type(tensor) is nn.Parameter or is_parameter(tensor):
                packed = KeptAsIs(tensor)
            else:
                self._drop()
        elif not (
            type(tensor) is Tensor
            and tensor.layout is torch.strided
            and tensor.shape == step.shape
            and tensor.stride() == step.stride
            and tensor.dtype is step.dtype
            and saver.rules is step.rules
        ):
            self._drop()
        elif step.again is not None:
            memory = find_memory(tensor)
            if memory is None or not memory.may_be_lossy:
                packed = self._let_go(tensor, step.again, saver.module)
        elif step.saved_as is not None:
            self._packed.append(None)
            return step.saved_as
        elif find_memory(tensor) is None and not is_offloading():
            packed = HeldWhole(tensor, saver.module)
        self._packed.append(None if packed is None else weakref.ref(packed))
        return packed

    def _let_go(self, tensor: Tensor, again: _Again, module: nn.Module) -> ComputedAgain | None:
        """Let go of a result at once, if it can be computed again as in an earlier forward."""
        if version_of(tensor) != again.place.version:
            return None
        memory = None
        if again.first is not None and again.first < len(self._packed):
            reference = self._packed[again.first]
            first = reference() if reference is not None else None
            memory = first.memory if type(first) is ComputedAgain else None
        if memory is None or not memory.is_of(tensor):
            found = self._find_again(tensor, again)
            if found is None:
                return None
            memory = ComputedMemory(found, None if again.first is None else tensor)
        if not again.rule.still_serves(again.place, tensor, memory.recomputation):
            return None
        again.rule.kept.add(again.place.name, again.place.need.value, tensor.nbytes, 0)
        return ComputedAgain(memory, tensor, module)

    def _find_again(self, tensor: Tensor, again: _Again) -> Recomputation | None:
        """The same recomputation, from what is held of this forward."""
        last = tensor.grad_fn
        if last is None or tensor.untyped_storage().nbytes() != again.nbytes:
            return None
        made = again.made
        nodes = made.derivation.find_again(last)
        if nodes is None:
            return None
        tensors: list[Source] = []
        for place, index in zip(made.derivation.places, again.saved_at, strict=True):
            if index is None:
                assert not isinstance(place, int)
                tensors.append(place())
                continue
            step, reference = self._plan[index], self._packed[index]
            source = reference() if reference is not None else None
            if source is None or not source.is_whole or step is None:
                return None
            assert isinstance(place, int)
            if node_number(nodes[place]) - self._first_node != step.node:
                return None
            if step.is_parameter and not source.content.untyped_storage().nbytes():
                return None  # sharded again
            tensors.append(source)
        return made.again_from(tensors)

    def held_whole(self, key: int) -> Callable[[], Any] | None:
        """What is kept as it is of a storage, as the plan has it."""
        for reference in self._packed[self._looked_up :]:
            held = reference() if reference is not None else None
            if type(held) is HeldWhole:
                assert reference is not None
                self._held[storage_key(held.content.untyped_storage())] = reference
        self._looked_up = len(self._packed)
        return self._held.get(key)

    def note(self, tensor: Tensor, packed: Any, node: int | None, rules: Sequence[Any]) -> None:
        """A forward without a plan has saved a tensor, and keeps this of it."""
        if packed is tensor or node is None:
            self._noted.append(None)
            return
        layout = tensor.shape, tensor.stride(), tensor.dtype
        step = _Step(node - self._first_node, *layout, rules, is_parameter(tensor))
        more = version_of(tensor), tensor.untyped_storage().nbytes()
        self._noted.append(_Noted(step, weakref.ref(packed), type(packed) is KeptAsIs, *more))

    def finish(self) -> None:
        """The forward has ended, and all is decided."""
        if self.is_noting:
            self._plans[self._kind] = _plan_of(self._noted)
        elif next(self._rest, _NO_MORE) is not _NO_MORE:
            self._drop()

    def _drop(self) -> None:
        self._plans.pop(self._kind, None)
        self._rest = repeat(None)


class _Noted(NamedTuple):
    """What is noted of a saved tensor."""

    step: _Step
    packed: Callable[[], Any]
    stays: bool
    version: int
    nbytes: int


def _plan_of(noted: Sequence[_Noted | None]) -> _Plan:
    packed = [None if one is None else one.packed() for one in noted]
    places = {id(one): place for place, one in enumerate(packed) if one is not None}
    of_memory: dict[int, list[int]] = {}
    for place, one in enumerate(packed):
        if isinstance(one, SavedTensor) and one.is_computed_again:
            of_memory.setdefault(id(one.memory), []).append(place)
    plan: _Plan = []
    for one, held in zip(noted, packed, strict=True):
        step = None
        if one is not None and one.stays:
            step = one.step
        elif one is not None and held is not None:
            if held.is_computed_again:
                first, *others = of_memory[id(held.memory)]
                again = _again(one, held, places, first if others else None)
                step = None if again is None else one.step._replace(again=again)
            elif held.is_whole and held.is_for_no_rule:
                step = one.step
            elif held.saved_as is not None and not held.is_recomputable:
                step = one.step._replace(saved_as=held.saved_as)
        plan.append(step)
    return plan


def _again(
    noted: _Noted, saved: SavedTensor, places: dict[int, int], first: int | None
) -> _Again | None:
    """How a tensor is computed again; None where that starts from what nobody has noted."""
    made, rule, need = saved.recomputation, saved.rule, saved.need
    assert made is not None and rule is not None and need is not None
    saved_at: list[int | None] = []
    for source, place in zip(made.sources, made.derivation.places, strict=True):
        if isinstance(place, int) and id(source) not in places:
            return None
        saved_at.append(places[id(source)] if isinstance(place, int) else None)
    step = noted.step
    where = saved.number, saved.name, need, made.operation, step.stride, step.dtype
    return _Again(
        made.again_from(()),
        saved_at,
        rule,
        RecomputedPlace(*where, noted.version),
        noted.nbytes,
        first,
    )
