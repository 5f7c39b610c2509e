"""The hooks of one forward: they hold what is saved, and decide how once it is known for what."""

from __future__ import annotations

import weakref
from collections.abc import Container
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memengine._torch_private.autograd import (
    is_checkpointing,
    next_node_number,
    node_number,
    storage_key,
)
from memengine.memory.ledger import owned_by, tensors_in
from memengine.memory.meter import is_counting
from memengine.techniques.compression.attention import attend_to_codes, is_coarse
from memengine.techniques.compression.backward_needs import needs_of, producer_of
from memengine.techniques.compression.hooks.forward_graph import (
    ForwardGraph,
    held_in_field,
    unpack,
    without_plan,
)
from memengine.techniques.compression.recomputation.operations import recomputation_of
from memengine.techniques.compression.recomputation.recomputation import Recomputation
from memengine.techniques.compression.replay import CodedAgain, CodedMemory, Replay
from memengine.techniques.compression.rules import Rule
from memengine.techniques.compression.saved.saved_storage import SavedStorage, still_alive
from memengine.techniques.compression.saved.saved_tensor import SavedAs, SavedTensor
from memengine.techniques.modules.saved_tensors import KeptAsIs, is_parameter, is_plain

if TYPE_CHECKING:
    from memengine.techniques.compression.hooks.compressed_forward import CompressedForward

_MOST_UNEXAMINED = 8  # operations that save before those so far are looked at


class ForwardHooks(saved_tensors_hooks):
    """The saved-tensor hooks of one forward."""

    def __init__(self, module: nn.Module, rules: list[Rule], replay: Replay) -> None:
        self.forward: CompressedForward | None = None  # the innermost module that runs
        self.rules = rules  # that know that this forward has begun
        self.graph = ForwardGraph(replay.first_node, replay.may_have_copies)
        self._module, self._replay = module, replay
        # What is saved whose operation has not been looked at, by the saving node.
        self._unexamined: dict[int, list[weakref.ref[Any]]] = {}
        self._saving_since = 0  # operations that have saved since the last look at some
        self._last_saving = self._last_counted = -1
        self._held = 0  # tensors so far
        self._all_storages: list[SavedStorage] = []  # in the order of saving
        self._counts: dict[CompressedForward, int] = {}  # of what each has saved so far
        super().__init__(self._pack, unpack)

    def begin_rules(self, rules: list[Rule]) -> None:
        """A module is entered that has others than those before it."""
        new = [rule for rule in rules if rule not in self.rules]
        self.rules = [*self.rules, *new]
        for rule in new:
            rule.begin_forward()

    @cached_property
    def _owned(self) -> dict[int, Any]:
        """Storages that are the model's; of what a plan codes it is the plan that knows them."""
        return owned_by([self._module])

    def _pack(self, tensor: Tensor) -> Any:
        # Autograd numbers nodes as it makes them, and a node saves before the next one is made: so
        # the last number that was given is that of the node that saves.
        # But for what selective checkpointing keeps: that is an operation's result, and no node's.
        saving = next_node_number() - 1
        number: int | None = saving
        if saving != self._last_saving:
            if is_checkpointing():
                number = None
            else:
                self.graph.saving_nodes.add(saving)
                self._last_saving = saving
        forward, replay = self.forward, self._replay
        assert forward is not None
        if replay.is_noting:
            packed = self._look_at(tensor, number, forward)
            replay.note(tensor, packed, number, forward.rules)
            return packed
        packed = replay.pack(tensor, number, forward)
        if packed is None:
            return self._look_at(tensor, number, forward)
        kind = type(packed)
        if kind is KeptAsIs:  # a parameter
            return packed
        count = self._count(tensor, number, forward)
        if kind is CodedAgain:
            assert number is not None
            packed.memory.add_view(packed)  # not before others of it may have been looked at
            self._wait_for_node(packed, number, count)
        return packed

    def _look_at(self, tensor: Tensor, number: int | None, forward: CompressedForward) -> Any:
        """Hold a tensor until it is known what it is for, if that is to be found out."""
        if not is_plain(tensor):
            return tensor
        if is_parameter(tensor):
            return KeptAsIs(tensor)
        count = self._count(tensor, number, forward)
        key = storage_key(tensor.untyped_storage())
        if not tensor.numel() or key in self._owned:
            return KeptAsIs(tensor)
        saved = SavedTensor(tensor, self._storage_of(tensor), forward.module, forward.rules)
        if number is None:
            saved.is_examined = True
        else:
            self._wait_for_node(saved, number, count)
        return saved

    def _storage_of(self, tensor: Tensor) -> SavedStorage:
        """The memory of a tensor that is looked at, with what a plan has held of it before."""
        replay, key = self._replay, storage_key(tensor.untyped_storage())
        memory = replay.memory_of(tensor)
        if memory is None:
            memory = replay.memories[key] = SavedStorage(tensor, replay.held_whole(key))
            self._all_storages.append(memory)
            planned = replay.coded_memories.get(key)
            if planned is not None and planned.is_of(tensor):
                memory.add_planned(planned.coded, planned.kept)
                for saved in planned.take_undecided():
                    saved.give_way(memory)
        return memory

    def _wait_for_node(self, saved: SavedTensor | CodedAgain, number: int, count: int) -> None:
        """Note what a node of that number has saved, which is to be examined."""
        self._held += 1
        saved.number, saved.order = count, self._held
        self._unexamined.setdefault(number, []).append(weakref.ref(saved))

    def _count(self, tensor: Tensor, number: int | None, forward: CompressedForward) -> int:
        """Which it is of those that a module saves.

        What came before may be looked at: after as many operations with a plan as without one, so
        that tensors are coded in the same order, and draw the same random numbers.
        """
        if number is not None and number != self._last_counted:
            self._last_counted = number
            self._saving_since += 1
            if self._saving_since > _MOST_UNEXAMINED:
                self._examine_before(tensor, number)
        count = self._counts[forward] = self._counts.get(forward, 0) + 1
        return count

    def _examine_before(self, tensor: Tensor, number: int) -> None:
        """Do not wait for the end of a module that runs many operations itself."""
        node = tensor.grad_fn
        if node is not None and node_number(node) < number:  # it has saved all that it saves
            self.examine_operations(tensor, None)

    def examine_operations(self, outputs: Any, inputs: Any) -> None:
        """Decide how to keep what the operations behind a module's outputs have saved.

        Args:
            outputs: Of the module, or what it has computed so far.
            inputs: Of the module; None while it runs, and holds nobody knows what.
        """
        self._saving_since = 0
        unexamined = self._unexamined
        if not unexamined:
            return
        found: list[SavedTensor] = []
        for number, node in self.graph.unseen_nodes(outputs, unexamined):
            if number in unexamined or number + 1 in unexamined:  # or a copy's
                found += self._examine_node(node)
        if not found:
            return
        found.sort(key=attrgetter('order'), reverse=True)  # what is computed again is let go first
        alive: set[int] | None = None
        if inputs is not None and is_counting():
            given = filter(is_plain, tensors_in((inputs, outputs)))
            alive = {storage_key(tensor.untyped_storage()) for tensor in given}
        for memory in dict.fromkeys(saved.memory for saved in found):
            self._code_or_keep(memory, alive)

    def _code_or_keep(
        self, memory: SavedStorage | CodedMemory, alive: Container[int] | None = ()
    ) -> None:
        if type(memory) is CodedMemory:
            if memory.code(alive):
                return
            memory = self._give_up(memory)
        assert isinstance(memory, SavedStorage)
        memory.code_or_keep(alive)

    def _examine_node(self, node: Any) -> list[Any]:
        """Learn what a node has saved."""
        numbers = self.graph.saving_numbers(node)
        kept = still_alive(self._unexamined.pop(numbers[0], []))  # all of it is this node's
        has_copy = any(number in self._unexamined for number in numbers[1:])
        this = SavedAs.of(node)
        found, rest = self._as_planned(node, this, kept)
        if rest or has_copy or not kept:
            found += self._find_saved(node, rest, None if has_copy else this)
        if any(map(is_coarse, found)):
            attend_to_codes(node, self.graph.find_source)
        for saved in found:
            saved.is_examined = True
        return found

    def _as_planned(
        self, node: Any, this: SavedAs, kept: list[Any]
    ) -> tuple[list[Any], list[SavedTensor]]:
        """What is coded as it was, of all that a node has saved; and the rest."""
        planned = [saved for saved in kept if type(saved) is CodedAgain]
        if not planned:
            return [], kept
        needs = needs_of(node)
        for saved in planned:
            if not (saved.instead or saved.examine(node, this, needs, self.graph.find_source)):
                self._give_up(saved.memory)
        found = [saved for saved in planned if not saved.instead]
        return found, [without_plan(saved) for saved in kept if saved not in found]

    def _give_up(self, memory: CodedMemory) -> SavedStorage:
        """Look at what is not coded yet as if there were no plan."""
        undecided = memory.take_undecided()
        storage = self._storage_of(undecided[0].content)
        for saved in undecided:
            saved.give_way(storage)
        return storage

    def _find_saved(
        self, node: Any, kept: list[SavedTensor], this: SavedAs | None
    ) -> list[SavedTensor]:
        """What a node has saved, with what each is for, as it is found in its fields.

        Args:
            node: Of the graph.
            kept: What it has saved itself.
            this: As what it saves; None where a copy has saved something for it.
        """
        found: list[SavedTensor] = []
        for field, need in needs_of(node).items() if kept or this is None else ():
            if this is not None and not kept[0].may_be_coded(need, node, field):
                continue  # to unpack it would tell nothing
            saved = held_in_field(node, field)
            # What its plan has let go of is decided, though other fields of its node are not.
            if isinstance(saved, SavedTensor) and not saved.is_examined:
                find = partial(self._recomputation, node, field, saved)
                saved.choose_codec(need, node, find)
                saved.saved_as = this and this._replace(field=field)
                found.append(saved)
        for saved in kept:
            if saved not in found:
                saved.is_for_no_rule = True
                saved.saved_as = this
                found.append(saved)
        return found

    def _recomputation(self, node: Any, field: str, saved: SavedTensor) -> Recomputation | None:
        """How to compute what a node has saved again, with the version that it is to have."""
        found = recomputation_of(node, field, saved.whole, saved.number, self.graph.find_source)
        saved.is_recomputable |= found is not None
        if found is None or found.is_exact:
            return found
        version = self.graph.version_of_result(producer_of(node, field), saved.memory)
        return replace(found, version=version)

    def finish(self) -> None:
        """What no output depends on is kept as it is, if it is kept at all."""
        for references in self._unexamined.values():
            for saved in still_alive(references):
                if type(saved) is CodedAgain:
                    self._give_up(saved.memory)
                without_plan(saved).is_examined = True
        for planned in self._replay.all_coded_memories:
            if planned.undecided:
                self._code_or_keep(planned)
        for memory in self._all_storages:
            memory.code_or_keep()
        self._replay.finish(self.graph.has_copies, self._owned if self._replay.is_noting else {})

    def let_go(self) -> None:
        """Let go of everything; hooks that are methods hold themselves."""
        self._unexamined, self._counts, self._all_storages = {}, {}, []
        self._replay.memories = {}
        self.pack_hook = unpack
