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
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

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
)
from memengine._torch_private.modules import is_compiled
from memengine.memory.ledger import owned_by, tensors_in
from memengine.techniques.compression.backward_needs import IN_PLACE, needs_of, operation
from memengine.techniques.compression.recomputable_ops import Held, Repetition, repetition_of
from memengine.techniques.compression.rules import EXACT, Rule, Tally
from memengine.techniques.compression.saved_storage import Memory, Saved
from memengine.techniques.modules.blocks import Selector, select_modules
from memengine.techniques.modules.saved_tensors import (
    KeptAsIs,
    is_in_backward,
    is_parameter,
    is_plain,
)
from memengine.techniques.modules.wrapped_forward import (
    THE_MODEL,
    WrappedForward,
    is_wrapped,
    wrapper_of,
)
from memengine.techniques.offload import ActivationOffload
from memengine.techniques.technique import Handle as TechniqueHandle
from memengine.techniques.technique import Report

__all__ = ['Handle', 'Place', 'add_rule', 'chosen_modules', 'remove_rule', 'rules_of']

Handled = TypeVar('Handled', bound='Handle')

_state = threading.local()  # .scope: of the forward that runs; .asked_for: see _asked_for


def rules_of(model: nn.Module) -> list[Rule]:
    """The rules that hold in a model's modules, each once."""
    places = (wrapper_of(module, Place) for module in model.modules())
    found = {id(rule): rule for place in places if place is not None for rule, _ in place.rules}
    return list(found.values())


def add_rule(model: nn.Module, rule: Rule, modules: Container[nn.Module]) -> None:
    """Keep what modules of a model save by a rule, until :func:`remove_rule`.

    Args:
        model: Its modules' ``forward`` is wrapped; the model stays what it is.
        rule: The rule.
        modules: Those for which it holds; in others it has no say.

    Raises:
        ValueError: When a module is offloaded already, or compiled: its graph saves what it likes.
    """
    for name, module in model.named_modules():
        if is_compiled(module):
            raise ValueError(
                f'{rule.setting}: {name or THE_MODEL} is compiled, and what compiled code saves '
                'cannot be told apart; use either'
            )
        if is_wrapped(module, ActivationOffload):
            raise ValueError(
                f'{rule.setting}: activation_offload is applied to {name or THE_MODEL} already, '
                'and would move what is not compressed yet; apply it afterwards'
            )
    for name, module in model.named_modules():
        place = wrapper_of(module, Place)
        if place is None:
            place = Place(name, module)
            place.begin()
        place.users.append(rule)
        if module in modules:
            rules = [*place.rules, (rule, name or THE_MODEL)]
            place.rules = sorted(rules, key=_order)


def _order(pair: tuple[Rule, str]) -> tuple[bool, int]:
    """Exact rules first, then those for the fewest tensors."""
    return pair[0].fidelity != EXACT, pair[0].fidelity


def chosen_modules(
    model: nn.Module,
    modules: Selector | Sequence[Selector] | None,
    exclude: Selector | Sequence[Selector],
    setting: str,
) -> set[nn.Module]:
    """The modules for which a rule holds: the selected ones with all that is in them.

    Args:
        model: Where to look.
        modules: As :func:`select_modules` takes them; None for all.
        exclude: As well; those that are left out.
        setting: What to call the setting in errors.

    Raises:
        ValueError: When a name matches nothing.
    """

    def within(selectors: Selector | Sequence[Selector]) -> set[nn.Module]:
        selected = select_modules(model, selectors, setting=setting)
        return {part for module in selected.values() for part in module.modules()}

    chosen = set(model.modules()) if modules is None else within(modules)
    return chosen - within(exclude) if exclude else chosen


def remove_rule(model: nn.Module, rule: Rule) -> None:
    """Leave the model as it was before :func:`add_rule`; nothing for a rule that does not hold.

    Raises:
        ValueError: When a forward has been wrapped by something else in the meantime; nothing is
            changed then.
    """
    places = []
    for name, module in model.named_modules():
        place = wrapper_of(module, Place)
        if place is None and 'forward' in vars(module):
            raise ValueError(
                f'{rule.setting}: the forward of {name or THE_MODEL} was wrapped again '
                'afterwards; undo that first'
            )
        if place is not None and any(user is rule for user in place.users):
            places.append(place)
    for place in places:
        place.rules = [pair for pair in place.rules if pair[0] is not rule]
        place.users = [user for user in place.users if user is not rule]
        if not place.users:
            place.undo()


class Handle(TechniqueHandle):
    """A rule's way back to its model, which it does not hold and copies do not take along.

    Attributes:
        kept: Bytes before and after, in all forward passes so far, and by module and need.
    """

    setting: str

    def __init__(self, model: nn.Module) -> None:
        self._model: Callable[[], nn.Module | None] = weakref.ref(model)
        self.kept = Tally()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), '_model': _nothing}

    @property
    def model(self) -> nn.Module:
        """The model.

        Raises:
            ValueError: When it is gone, or this is a copy.
        """
        model = self._model()
        if model is None:
            raise ValueError(f'{self.setting}: the model that this was made for is not there')
        return model

    def __enter__(self: Handled) -> Handled:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def report(self) -> Report | None:
        """What has been compressed."""
        if not self.kept.before:
            return Report(
                left=f'{self.setting}: the first iteration saved nothing that can be compressed: '
                'what is trained is frozen, checkpointed, excluded, or smaller than a code would be'
            )
        before, after = self.kept.before / 2**20, self.kept.after / 2**20
        return Report(
            f'{self.setting}: {before:.1f} MiB saved as {after:.1f} MiB in the first iteration, in '
            f'{len(self.kept.places)} places'
        )

    def undo(self) -> None:
        """Leave the model as it was."""
        remove_rule(self.model, self)  # type: ignore[arg-type]


def _nothing() -> None:
    return None


class Place(WrappedForward):
    """A module's forward that knows which rules hold for what is saved in it."""

    setting = 'compressed activations'

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self.rules: list[tuple[Rule, str]] = []  # with what its model calls this module
        self.users: list[Rule] = []  # that hold here or elsewhere in their model

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; what it saves is kept by the rules."""
        scope = getattr(_state, 'scope', None)
        if scope is not None:
            return self._run(scope, args, kwargs)
        off = not torch.is_grad_enabled() or not self.module.training
        off |= is_under_functorch()  # which has no graph
        if off or is_in_backward() or is_checkpointing():  # of which the middle one recomputes
            return self.plain(*args, **kwargs)
        scope = _state.scope = _Scope(self.module)
        try:
            with scope:
                return self._run(scope, args, kwargs)
        finally:
            _state.scope = None
            scope.close()

    def _run(self, scope: _Scope, args: Any, kwargs: Any) -> Any:
        outside, scope.place = scope.place, self
        try:
            outputs = self.plain(*args, **kwargs)
        finally:
            scope.place = outside
        scope.settle(outputs, (args, kwargs))
        if outside is None:
            scope.end()
        return outputs


class _Scope(saved_tensors_hooks):
    """The saved-tensor hooks of one forward."""

    def __init__(self, module: nn.Module) -> None:
        self.place: Place | None = None  # the innermost module that runs
        self._owned = owned_by([module])
        self._first = next_node_number()
        self._looked_at: set[int] = set()  # nodes of the graph, by number
        self._unsettled: dict[int, list[weakref.ref[Saved]]] = {}  # by the node that saved it
        self._memory_of: dict[int, Memory] = {}
        self._saving: set[int] = set()  # nodes that have saved something here, by number
        super().__init__(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Any:
        self._saving.add(next_node_number() - 1)
        if not is_plain(tensor):
            return tensor
        storage = tensor.untyped_storage()
        if storage_key(storage) in self._owned or is_parameter(tensor) or not tensor.numel():
            return KeptAsIs(tensor)
        memory = self._memory_of.get(storage_key(storage))
        if memory is None or not memory.is_of(tensor):
            memory = self._memory_of[storage_key(storage)] = Memory(tensor)
        assert self.place is not None
        saved = Saved(tensor, memory, self.place.module, self.place.rules)
        self._unsettled.setdefault(next_node_number() - 1, []).append(weakref.ref(saved))
        return saved

    def settle(self, outputs: Any, inputs: Any) -> None:
        """Decide how to keep what the operations behind a module's outputs have saved."""
        if not self._unsettled:
            return
        touched: dict[Memory, None] = {}
        nodes = {node_number(node): node for node in self._new_nodes(outputs)}
        for number, node in nodes.items():
            # What acts in place saves a copy, whose node comes next and leads nowhere.
            copied = number + 1 not in nodes and operation(node) in IN_PLACE
            for saved in self._settle_node(node, (number, number + 1) if copied else (number,)):
                touched[saved.memory] = None
        if not touched:
            return
        given = tensors_in((inputs, outputs))
        alive = {storage_key(tensor.untyped_storage()) for tensor in given if is_plain(tensor)}
        for memory in touched:
            memory.settle(alive)

    def _settle_node(self, node: Any, numbers: Sequence[int]) -> list[Saved]:
        """Learn what a node has saved, under its own number or another."""
        waiting = [n for n in numbers if n in self._unsettled]
        found: list[Saved] = []
        for field, need in needs_of(node).items() if waiting else ():
            saved = _asked_for(node, field)
            if isinstance(saved, Saved):
                saved.settle(need, node, partial(self._repeat, node, field, saved.content))
                found.append(saved)
        for number in waiting:
            kept = [one for one in (reference() for reference in self._unsettled[number]) if one]
            if number == numbers[0]:  # all of it is this node's
                del self._unsettled[number]
                found += [one for one in kept if one not in found]
        for saved in found:
            saved.is_settled = True
        return found

    def _repeat(self, node: Any, field: str, tensor: Tensor) -> Repetition | None:
        return repetition_of(node, field, tensor, self._held)

    def _held(self, node: Any, field: str) -> Held | None:
        """What is held of another node of this forward, if it has saved with these hooks."""
        number = node_number(node)
        ours = number in self._saving or number + 1 in self._saving and operation(node) in IN_PLACE
        return _asked_for(node, field) if ours else None

    def end(self) -> None:
        """What no output depends on is kept as it is, if it is kept at all."""
        for references in self._unsettled.values():
            for saved in filter(None, (reference() for reference in references)):
                saved.is_settled = True
        for memory in self._memory_of.values():
            memory.settle()

    def close(self) -> None:
        """Let go of everything; hooks that are methods hold themselves."""
        self._unsettled, self._memory_of = {}, {}
        self.pack_hook = _unpack

    def _new_nodes(self, outputs: Any) -> Iterator[Any]:
        """Nodes of this forward's graph that have not been looked at."""
        tensors = [outputs] if isinstance(outputs, Tensor) else tensors_in(outputs)
        pending = [tensor.grad_fn for tensor in tensors]
        while pending:
            node = pending.pop()
            if node is None or not self._first <= node_number(node) < next_node_number():
                continue  # a leaf, whose number is the largest, or what came before
            if node_number(node) not in self._looked_at:
                self._looked_at.add(node_number(node))
                yield node
                pending.extend(parent for parent, _ in node.next_functions)


def _asked_for(node: Any, field: str) -> Saved | KeptAsIs | None:
    """What hooks hold of a node's field, if they are ours."""
    if not has_saved(node, field):
        return None
    found: list[Saved | KeptAsIs] = []
    _state.asked_for = found
    try:
        saved_by(node, field)  # unpacks it
    except RuntimeError:  # a backward inside of the forward has used it up
        return None
    finally:
        _state.asked_for = None
    return found[0] if found else None


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    found = getattr(_state, 'asked_for', None)
    if found is None:
        return packed.tensor()
    found.append(packed)
    return torch.empty(0)  # nobody looks at it
