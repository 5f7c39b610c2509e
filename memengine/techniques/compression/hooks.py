"""Compressed activations: what a model saves for backward is kept as codes that rules choose.

The forward pass is the plain one, bit for bit: operations run as they are, and so do their
derivatives, on what the codes give back. When a module ends, the operations in it are looked up in
autograd's graph (``backward_needs.py``), so it is known for each saved tensor what it is for.
Memory that several operations save is coded once; memory that one of them needs as it is stays as
it is for all of them, because a code beside it would cost instead of save.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Container, Iterator
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memengine._torch_private.autograd import (
    has_saved,
    is_checkpointing,
    is_under_functorch,
    next_node_number,
    node_number,
    saved_by,
    storage_key,
    version_of,
)
from memengine._torch_private.modules import BatchOrInstanceNorm
from memengine._torch_private.ops import do_not_compile
from memengine.memory.ledger import owned_by, tensors_in
from memengine.memory.meter import is_counting
from memengine.techniques.compression.attention import attend_to_codes, is_coarse
from memengine.techniques.compression.backward_needs import (
    IN_PLACE_FORMS,
    Need,
    needs_of,
    operation_name,
    producer_of,
)
from memengine.techniques.compression.recomputation import Recomputation, Source, recomputation_of
from memengine.techniques.compression.replay import CodedAgain, CodedMemory, ForwardPlans, Replay
from memengine.techniques.compression.rules import Rule
from memengine.techniques.compression.saved_storage import (
    SavedAs,
    SavedStorage,
    SavedTensor,
    still_alive,
)
from memengine.techniques.modules.saved_tensors import (
    KeptAsIs,
    is_in_backward,
    is_parameter,
    is_plain,
)
from memengine.techniques.modules.wrapped_forward import WrappedForward

__all__ = ['CompressedForward']


class _State(threading.local):
    """Of a thread."""

    hooks: _ForwardHooks | None = None  # of the forward that runs
    collected: list[Any] | None = None  # see _held_in_field


_state = _State()
_MOST_UNEXAMINED = 8  # operations that save before those so far are looked at
_LONGEST_IN_PLACE = 3  # operations after a norm: a sum and an activation, and the norm itself
_MAY_BE_IN_PLACE = IN_PLACE_FORMS | {'Relu', 'Add'}
_NORMS = (BatchOrInstanceNorm, nn.GroupNorm)
_NOTHING = torch.empty(0, device='cpu')


class CompressedForward(WrappedForward):
    """A module's forward that knows which rules hold for what is saved in it."""

    setting = 'compressed activations'

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self.rules: list[tuple[Rule, str]] = []  # with what its model calls this module
        self.model_rules: list[Rule] = []  # that hold here or elsewhere in their model
        self._is_norm = isinstance(module, _NORMS)
        self._plans = ForwardPlans()  # of forward passes of which this is the outermost module

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), '_plans': ForwardPlans()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; what it saves is kept by the rules."""
        hooks = _state.hooks
        if hooks is None:
            return self._run_outermost(args, kwargs)
        if self.model_rules != hooks.rules:  # some hold for a part of the model only
            if any(rule.is_paused for rule in self.model_rules):
                return self._run_as_it_is(args, kwargs)
            hooks.begin_rules(self.model_rules)
        outside, hooks.forward = hooks.forward, self
        try:
            outputs = self.plain(*args, **kwargs)
        finally:
            hooks.forward = outside
        # Only beside a second rule is anything computed again from codes.
        if self._is_norm and len(self.model_rules) > 1 and is_plain(outputs):
            hooks.note_result_of_norm(outputs)
        hooks.saving_since = 0
        if hooks.unexamined:
            hooks.examine_operations(outputs, (args, kwargs))
        return outputs

    def _run_as_it_is(self, args: Any, kwargs: Any) -> Any:
        """Run the module without rules, within a model whose others go on."""
        hooks, _state.hooks = _state.hooks, None
        try:
            with saved_tensors_hooks(KeptAsIs, KeptAsIs.tensor):
                return self.plain(*args, **kwargs)
        finally:
            _state.hooks = hooks

    @do_not_compile
    def _run_outermost(self, args: Any, kwargs: Any) -> Any:
        off = not torch.is_grad_enabled() or not self.module.training
        off |= is_under_functorch()  # which has no graph
        off |= any(rule.is_paused for rule in self.model_rules)
        if off or is_in_backward() or is_checkpointing():  # of which the middle one recomputes
            return self.plain(*args, **kwargs)
        for rule in self.model_rules:
            rule.begin_forward()  # which may raise
        first_node = next_node_number()
        replay = self._plans.begin((*args, *kwargs.values()), self.model_rules, first_node)
        hooks = _state.hooks = _ForwardHooks(self.module, self.model_rules, replay, first_node)
        try:
            with hooks:
                outputs = self(*args, **kwargs)
                hooks.finish()
                return outputs
        finally:
            _state.hooks = None
            hooks.let_go()


class _ForwardHooks(saved_tensors_hooks):
    """The saved-tensor hooks of one forward."""

    def __init__(
        self, module: nn.Module, rules: list[Rule], replay: Replay, first_node: int
    ) -> None:
        self.forward: CompressedForward | None = None  # the innermost module that runs
        self.rules = rules  # that know that this forward has begun
        # What is saved whose operation has not been looked at, by the saving node.
        self.unexamined: dict[int, list[weakref.ref[Any]]] = {}
        self._module, self._replay, self._first_node = module, replay, first_node
        self._seen_nodes: set[int] = set()  # by number, as are the others
        # They tell whose copies are, which a plan may know that there are none of.
        self._sees_all_nodes = replay.is_noting or replay.has_copies
        self.saving_since = 0  # operations that have saved since the last look at some
        self._last_counted = -1
        self._held = 0  # tensors so far
        self._all_storages: list[SavedStorage] = []  # in the order of saving
        self._counts: dict[CompressedForward, int] = {}  # of what each has saved so far
        self._saving_nodes: set[int] = set()  # that have saved something here
        self._last_saving = -1
        # Where a norm's result lay when its module ended, and in which version, by the node.
        self._norm_results: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        super().__init__(self._pack, _unpack)

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
                self._saving_nodes.add(saving)
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
        self.unexamined.setdefault(number, []).append(weakref.ref(saved))

    def _count(self, tensor: Tensor, number: int | None, forward: CompressedForward) -> int:
        """Which it is of those that a module saves.

        What came before may be looked at: after as many operations with a plan as without one, so
        that tensors are coded in the same order, and draw the same random numbers.
        """
        if number is not None and number != self._last_counted:
            self._last_counted = number
            self.saving_since += 1
            if self.saving_since > _MOST_UNEXAMINED:
                self._examine_before(tensor, number)
        count = self._counts[forward] = self._counts.get(forward, 0) + 1
        return count

    def _examine_before(self, tensor: Tensor, number: int) -> None:
        """Do not wait for the end of a module that runs many operations itself."""
        node = tensor.grad_fn
        if node is not None and node_number(node) < number:  # it has saved all that it saves
            self.saving_since = 0
            if self.unexamined:
                self.examine_operations(tensor, None)

    def examine_operations(self, outputs: Any, inputs: Any) -> None:
        """Decide how to keep what the operations behind a module's outputs have saved.

        Args:
            outputs: Of the module, or what it has computed so far.
            inputs: Of the module; None while it runs, and holds nobody knows what.
        """
        unexamined = self.unexamined
        found: list[SavedTensor] = []
        for number, node in self._unseen_nodes(outputs):
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
        numbers = self._saving_numbers(node)
        kept = still_alive(self.unexamined.pop(numbers[0], []))  # all of it is this node's
        has_copy = any(number in self.unexamined for number in numbers[1:])
        this = SavedAs.of(node)
        found, rest = self._as_planned(node, this, kept)
        if rest or has_copy or not kept:
            found += self._find_saved(node, rest, None if has_copy else this)
        if any(map(is_coarse, found)):
            attend_to_codes(node, self._find_source)
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
            if not (saved.instead or saved.examine(node, this, needs, self._find_source)):
                self._give_up(saved.memory)
        found = [saved for saved in planned if not saved.instead]
        return found, [_without_plan(saved) for saved in kept if saved not in found]

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
            saved = _held_in_field(node, field)
            # What its plan has let go of is decided, though other fields of its node are not.
            if isinstance(saved, SavedTensor) and not saved.is_examined:
                self._choose_codec(saved, need, node, field)
                saved.saved_as = this and this._replace(field=field)
                found.append(saved)
        for saved in kept:
            if saved not in found:
                saved.is_for_no_rule = True
                saved.saved_as = this
                found.append(saved)
        return found

    def _choose_codec(self, saved: SavedTensor, need: Need, node: Any, field: str) -> None:
        find = partial(self._recomputation, node, field, saved)
        saved.choose_codec(need, node, find)

    def _recomputation(self, node: Any, field: str, saved: SavedTensor) -> Recomputation | None:
        """How to compute what a node has saved again, with the version that it is to have."""
        found = recomputation_of(node, field, saved.content, saved.number, self._find_source)
        saved.is_recomputable |= found is not None
        if found is None or found.is_exact:
            return found
        version = self._version_of_result(producer_of(node, field), saved.memory)
        return replace(found, version=version)

    def note_result_of_norm(self, result: Tensor) -> None:
        """Remember where a norm's result lies, in which what follows may work in place."""
        if result.grad_fn is not None:
            made = weakref.ref(result.untyped_storage()), version_of(result)
            self._norm_results[node_number(result.grad_fn)] = made

    def _version_of_result(self, node: Any, memory: SavedStorage) -> int | None:
        """The version of the memory that holds a node's result, if a norm's result lay there.

        All operations since have then worked in place, or the result would lie elsewhere: each is
        one version, and if there are more, somebody else has changed what is there.
        """
        for steps in range(_LONGEST_IN_PLACE):
            if node is None:
                return None
            if (made := self._norm_results.get(node_number(node))) is not None:
                storage, version = made
                return version + steps if memory.is_in(storage()) else None
            if operation_name(node) not in _MAY_BE_IN_PLACE:
                return None
            node = node.next_functions[0][0]
        return None

    def _find_source(self, node: Any, field: str) -> Source | None:
        """What is held of another node of this forward, if it has saved with these hooks."""
        is_ours = not self._saving_nodes.isdisjoint(self._saving_numbers(node))
        return _held_in_field(node, field) if is_ours else None

    def _saving_numbers(self, node: Any) -> list[int]:
        """The numbers under which hooks see a node save, its own first.

        What acts in place saves a copy of its input. That is made after the operation's own node
        and has a node too, so it is saved under the next number; nothing but the copy leads to that
        node: if outputs depend on the next number, it is another operation's.
        """
        number = node_number(node)
        is_next_saving = self._sees_all_nodes and number + 1 in self._saving_nodes
        if not is_next_saving or operation_name(node) not in IN_PLACE_FORMS:
            return [number]
        if number + 1 in self._seen_nodes:
            return [number]
        self._replay.has_copies = True
        return [number, number + 1]

    def finish(self) -> None:
        """What no output depends on is kept as it is, if it is kept at all."""
        for references in self.unexamined.values():
            for saved in still_alive(references):
                if type(saved) is CodedAgain:
                    self._give_up(saved.memory)
                _without_plan(saved).is_examined = True
        for planned in self._replay.all_coded_memories:
            if planned.undecided:
                self._code_or_keep(planned)
        for memory in self._all_storages:
            memory.code_or_keep()
        self._replay.finish(self._owned if self._replay.is_noting else {})

    def let_go(self) -> None:
        """Let go of everything; hooks that are methods hold themselves."""
        self.unexamined, self._counts, self._all_storages = {}, {}, []
        self._replay.memories = {}
        self.pack_hook = _unpack

    def _unseen_nodes(self, outputs: Any) -> Iterator[tuple[int, Any]]:
        """Nodes of this forward's graph that have not been looked at, and may have to be."""
        tensors = [outputs] if isinstance(outputs, Tensor) else tensors_in(outputs)
        pending = [tensor.grad_fn for tensor in tensors]
        seen, last = self._seen_nodes, next_node_number()
        first, sees_all = self._first_node, self._sees_all_nodes
        if not sees_all:  # but those that may be waited for
            first = max(first, min(self.unexamined))  # nodes lead to such as were made before
        while pending and (self.unexamined or sees_all):  # less by each node that is examined
            node = pending.pop()
            if node is None:
                continue
            number = node_number(node)
            if number in seen or not first <= number < last:
                continue  # a leaf has the largest number there is; others are of an earlier graph
            seen.add(number)
            yield number, node
            pending += [parent for parent, _ in node.next_functions]


def _held_in_field(node: Any, field: str) -> Any:
    """What hooks hold of a node's field, if they are ours."""
    if not has_saved(node, field):
        return None
    found: list[SavedTensor | KeptAsIs] = []
    _state.collected = found
    try:
        saved_by(node, field)  # unpacks it
    except RuntimeError:  # a backward inside of the forward has used it up
        return None
    finally:
        _state.collected = None
    return _without_plan(found[0]) if found else None


def _without_plan(held: Any) -> Any:
    """What stands for a saved tensor, where that is not coded by plan after all."""
    return held.instead or held if type(held) is CodedAgain else held


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    found = _state.collected
    if found is None:
        return packed.tensor()
    found.append(packed)
    return _NOTHING
