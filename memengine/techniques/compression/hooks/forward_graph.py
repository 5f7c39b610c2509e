"""Autograd's graph of one forward, which is asked who has saved what."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from memengine._torch_private.autograd import (
    has_saved,
    next_node_number,
    node_number,
    saved_by,
    version_of,
)
from memengine.memory.ledger import tensors_in
from memengine.techniques.compression.backward_needs import IN_PLACE_FORMS, operation_name
from memengine.techniques.compression.recomputation.recomputation import Source
from memengine.techniques.compression.replay import CodedAgain
from memengine.techniques.compression.saved.saved_storage import SavedStorage

_LONGEST_IN_PLACE = 3  # operations after a norm: a sum and an activation, and the norm itself
_MAY_BE_IN_PLACE = IN_PLACE_FORMS | {'Relu', 'Add'}
_NOTHING = torch.empty(0, device='cpu')


class _State(threading.local):
    """Of a thread."""

    collected: list[Any] | None = None  # see held_in_field


_state = _State()


class ForwardGraph:
    """The nodes of one forward, by number, and which of them have saved something.

    Args:
        first_node: The number of the first that it makes.
        may_have_copies: Whether copies may be saved for operations that work in place: nothing
            tells whose they are but which nodes there are besides.

    Attributes:
        saving_nodes: That have saved something with these hooks.
        has_copies: Whether any was a copy.
    """

    def __init__(self, first_node: int, may_have_copies: bool) -> None:
        self._first_node, self._may_have_copies = first_node, may_have_copies
        self.saving_nodes: set[int] = set()
        self.has_copies = False
        self._seen_nodes: set[int] = set()
        # Where a norm's result lay when its module ended, and in which version, by the node.
        self._norm_results: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def unseen_nodes(
        self, outputs: Any, waiting: Mapping[int, object]
    ) -> Iterator[tuple[int, Any]]:
        """Nodes behind outputs that have not been looked at, and may have to be.

        Args:
            outputs: Where to begin.
            waiting: By the numbers of nodes that are waited for; less and less, as they are found.
        """
        tensors = [outputs] if isinstance(outputs, Tensor) else tensors_in(outputs)
        pending = [tensor.grad_fn for tensor in tensors]
        seen, last = self._seen_nodes, next_node_number()
        first, sees_all = self._first_node, self._may_have_copies
        if not sees_all:  # but those that may be waited for
            first = max(first, min(waiting))  # nodes lead to such as were made before
        while pending and (waiting or sees_all):
            node = pending.pop()
            if node is None:
                continue
            number = node_number(node)
            if number in seen or not first <= number < last:
                continue  # a leaf has the largest number there is; others are of an earlier graph
            seen.add(number)
            yield number, node
            pending += [parent for parent, _ in node.next_functions]

    def saving_numbers(self, node: Any) -> list[int]:
        """The numbers under which hooks see a node save, its own first.

        What acts in place saves a copy of its input. That is made after the operation's own node
        and has a node too, so it is saved under the next number; nothing but the copy leads to that
        node: if outputs depend on the next number, it is another operation's.
        """
        number = node_number(node)
        is_next_saving = self._may_have_copies and number + 1 in self.saving_nodes
        if not is_next_saving or operation_name(node) not in IN_PLACE_FORMS:
            return [number]
        if number + 1 in self._seen_nodes:
            return [number]
        self.has_copies = True
        return [number, number + 1]

    def find_source(self, node: Any, field: str) -> Source | None:
        """What is held of another node of this forward, if it has saved with these hooks."""
        is_ours = not self.saving_nodes.isdisjoint(self.saving_numbers(node))
        return held_in_field(node, field) if is_ours else None

    def note_result_of_norm(self, result: Tensor) -> None:
        """Remember where a norm's result lies, in which what follows may work in place."""
        if result.grad_fn is not None:
            made = weakref.ref(result.untyped_storage()), version_of(result)
            self._norm_results[node_number(result.grad_fn)] = made

    def version_of_result(self, node: Any, memory: SavedStorage) -> int | None:
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


def held_in_field(node: Any, field: str) -> Any:
    """What hooks hold of a node's field, if they are ours."""
    if not has_saved(node, field):
        return None
    found: list[Any] = []
    _state.collected = found
    try:
        saved_by(node, field)  # unpacks it
    except RuntimeError:  # a backward inside of the forward has used it up
        return None
    finally:
        _state.collected = None
    return without_plan(found[0]) if found else None


def without_plan(held: Any) -> Any:
    """What stands for a saved tensor, where that is not coded by plan after all."""
    return held.instead or held if type(held) is CodedAgain else held


def unpack(packed: Any) -> Tensor:
    """The saved tensor; but none where it is asked what is held of it."""
    if isinstance(packed, Tensor):
        return packed
    found = _state.collected
    if found is None:
        return packed.tensor()
    found.append(packed)
    return _NOTHING
