"""One forward beside the plan that an earlier one has left."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from memengine._torch_private.autograd import next_node_number, node_number, storage_key, version_of
from memengine.techniques.activation_offload import is_offloading
from memengine.techniques.compression.recomputation.recomputation import (
    ComputedAgain,
    ComputedMemory,
    Recomputation,
    Source,
)
from memengine.techniques.compression.replay.coded_again import CodedAgain, CodedMemory
from memengine.techniques.compression.replay.plan import (
    HeldWhole,
    HowCoded,
    HowComputed,
    Noted,
    Plan,
    Step,
    plan_of,
)
from memengine.techniques.compression.rules import Rule
from memengine.techniques.compression.saved.saved_storage import SavedStorage
from memengine.techniques.modules.saved_tensors import KeptAsIs, is_parameter, is_plain

_MOST_PLANS = 8  # of a model's; inputs may have another shape each time

_NO_MORE = Step(None, torch.Size(), (), torch.bool, ())  # agrees with none


class ForwardPlans:
    """What forwards of a model have saved, by the shapes of what they were given, and by rules."""

    def __init__(self) -> None:
        self._plans: dict[Any, Plan] = {}
        self._uses: dict[Any, int] = {}

    def begin(self, inputs: Sequence[Any], rules: Sequence[Rule]) -> Replay:
        """A forward begins. The first, second, fourth, eighth ... of a kind follows no plan."""
        shapes = ((x.shape, x.dtype) for x in inputs if type(x) is Tensor and is_plain(x))
        kind = *shapes, *(rule.state for rule in rules)
        uses = self._uses[kind] = self._uses.pop(kind, 0) + 1  # at the end: it is the latest
        if len(self._uses) > _MOST_PLANS:
            oldest = [*self._uses][0]
            self._uses.pop(oldest, None)
            self._plans.pop(oldest, None)
        plan = self._plans.get(kind) if uses & (uses - 1) else None
        if plan is not None and not plan.holds:
            plan = None
        return Replay(self._plans, kind, plan)


class Replay:
    """One forward beside its plan; without one, it is noted for later ones.

    Attributes:
        is_noting: Whether there is none.
        may_have_copies: Whether copies may be saved for operations that work in place.
        first_node: The number of the first node that the forward makes.
        memories: That were looked at, the last that had an address.
        coded_memories: That are coded by plan, likewise.
        all_coded_memories: As well, in the order of saving.
    """

    def __init__(self, plans: dict[Any, Plan], kind: Any, plan: Plan | None) -> None:
        self._plans, self._kind = plans, kind
        self.is_noting = plan is None
        self.may_have_copies = plan is None or plan.has_copies
        self.first_node = next_node_number()
        self._noted: list[Noted | None] = []
        self._steps = () if plan is None else plan.steps
        self._owned = {} if plan is None else plan.owned
        self._rest: Iterator[Step | None] = iter(self._steps)
        self._packed: list[weakref.ref[Any] | None] = []  # so far, as the plan has it
        self.memories: dict[int, SavedStorage] = {}
        self.coded_memories: dict[int, CodedMemory] = {}
        self.all_coded_memories: list[CodedMemory] = []
        self._held: dict[int, weakref.ref[Any]] = {}  # of these what stays, by its storage
        self._looked_up = 0  # how many of them

    def memory_of(self, tensor: Tensor) -> SavedStorage | None:
        """The memory of a plain tensor, if something that is saved of it was looked at."""
        memory = self.memories.get(storage_key(tensor.untyped_storage()))
        return memory if memory is not None and memory.is_of(tensor) else None

    def pack(self, tensor: Tensor, node: int | None, saver: Any) -> Any:
        """What to keep of a tensor; to be asked once for each, in the order of saving.

        Args:
            tensor: That is saved.
            node: The number of its node; None for what no node saves.
            saver: The forward of the module.

        Returns:
            None for what is to be looked at.
        """
        step = next(self._rest, _NO_MORE)
        packed: Any = None
        if step is None:
            self._packed.append(None)
            return None
        number, shape, stride, dtype, rules, is_a_parameter, how = step
        if node is None or node - self.first_node != number:
            self._drop()
        elif is_a_parameter:
            if type(tensor) is nn.Parameter or is_parameter(tensor):
                packed = KeptAsIs(tensor)
            else:
                self._drop()
        elif not (
            type(tensor) is Tensor
            and tensor.layout is torch.strided
            and tensor.shape == shape
            and tensor.stride() == stride
            and tensor.dtype is dtype
            and saver.rules is rules
        ):
            self._drop()
        elif isinstance(how, HowComputed):
            memory = self.memory_of(tensor)
            if memory is None or not memory.may_be_lossy:
                packed = self._let_go(tensor, how, saver.module)
        elif not is_offloading() and (not self.memories or self.memory_of(tensor) is None):
            if how is None:
                packed = HeldWhole(tensor, saver.module)
            else:
                packed = self._hold_to_code(tensor, how, saver.module)
        self._packed.append(None if packed is None else weakref.ref(packed))
        return packed

    def _hold_to_code(self, tensor: Tensor, how: HowCoded, module: nn.Module) -> CodedAgain | None:
        """Hold a tensor until it is known that its code serves as in an earlier forward."""
        if not is_plain(tensor) or is_parameter(tensor):
            return None
        if tensor.storage_offset() != how.layout[0]:
            return None
        memory = self._memory_at(how.first, CodedAgain, tensor)
        if memory is None:
            storage = tensor.untyped_storage()
            key = storage_key(storage)
            owned = self._owned.get(key)
            if storage.nbytes() != how.nbytes or (owned is not None and owned() is storage):
                return None
            memory = self.coded_memories[key] = CodedMemory(tensor)
            self.all_coded_memories.append(memory)
        return CodedAgain(tensor, memory, how, module)

    def _packed_at(self, place: int) -> Any:
        """What is kept at a place of the plan, if that was gone through and anything is."""
        reference = self._packed[place] if place < len(self._packed) else None
        return None if reference is None else reference()

    def _memory_at(self, place: int | None, kind: type[Any], tensor: Tensor) -> Any:
        """The memory of what is kept at a place in such a way, if the tensor is a view of it."""
        first: Any = None if place is None else self._packed_at(place)
        return first.memory if isinstance(first, kind) and first.memory.is_of(tensor) else None

    def _let_go(self, tensor: Tensor, how: HowComputed, module: nn.Module) -> ComputedAgain | None:
        """Let go of a result at once, if it can be computed again as in an earlier forward."""
        if version_of(tensor) != how.place.version:
            return None
        memory = self._memory_at(how.first, ComputedAgain, tensor)
        if memory is None:
            found = self._find_again(tensor, how)
            if found is None:
                return None
            memory = ComputedMemory(found, None if how.first is None else tensor)
        if not how.rule.still_serves(how.place, tensor, memory.recomputation):
            return None
        how.rule.kept.add(how.place.name, how.place.need.kind, tensor.nbytes, 0)
        return ComputedAgain(memory, tensor, module)

    def _find_again(self, tensor: Tensor, how: HowComputed) -> Recomputation | None:
        """The same recomputation, from what is held of this forward."""
        last = tensor.grad_fn
        if last is None or tensor.untyped_storage().nbytes() != how.nbytes:
            return None
        made = how.made
        nodes = made.derivation.find_again(last)
        if nodes is None:
            return None
        tensors: list[Source] = []
        for place, index in zip(made.derivation.places, how.saved_at, strict=True):
            if index is None:
                assert not isinstance(place, int)
                tensors.append(place())
                continue
            step, source = self._steps[index], self._packed_at(index)
            if source is None or not source.is_whole or step is None:
                return None
            assert isinstance(place, int)
            if node_number(nodes[place]) - self.first_node != step.node:
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
        step = Step(node - self.first_node, *layout, rules, is_parameter(tensor))
        storage = tensor.untyped_storage()
        more = version_of(tensor), int(tensor.storage_offset()), storage.nbytes()
        self._noted.append(Noted(step, weakref.ref(packed), type(packed) is KeptAsIs, *more))

    def finish(self, has_copies: bool, owned: Mapping[int, torch.UntypedStorage]) -> None:
        """The forward has ended, and all is decided.

        Args:
            has_copies: Whether copies were saved for operations that worked in place.
            owned: Storages that are the model's, by key; not asked for where there is a plan.
        """
        if self.is_noting:
            self._plans[self._kind] = plan_of(self._noted, has_copies, owned)
        elif next(self._rest, _NO_MORE) is not _NO_MORE:
            self._drop()

    def _drop(self) -> None:
        self._plans.pop(self._kind, None)
        self._rest = repeat(None)
