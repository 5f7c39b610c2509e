"""What a forward keeps as it is, and what it computes again, is replayed in later ones.

A forward notes both, in the order of saving. In later ones the first is let pass at once, and the
second is let go at once, where it is the result of such an operation still; no operation is looked
up for either. Only these are replayed: to keep a tensor, or to compute its very bits again, is
right whatever it is for, while a lossy code has to be known to serve, in each forward anew. What
differs from the plan drops it. What cannot be seen to differ costs bytes at most, until the next
forward that follows no plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memengine.techniques.compression.backward_needs import Need
from memengine.techniques.compression.saved_storage import SavedTensor
from memengine.techniques.modules.saved_tensors import KeptAsIs, is_plain

__all__ = ['ForwardPlans', 'HeldWhole', 'Replay']

_MOST_PLANS = 8  # of a model's; inputs may have another shape each time


class HeldWhole(KeptAsIs):
    """A saved tensor of which the plan says that it stays as it is."""

    __slots__ = ('module',)

    def __init__(self, tensor: Tensor, module: nn.Module) -> None:
        super().__init__(tensor)
        self.module = module


class _Expected(NamedTuple):
    """What has to be the same of a saved tensor.

    Attributes:
        node: Its node's number, from the forward's first on, and so how many were made in between.
        shape: The tensor's.
        stride: As well.
        dtype: As well.
        rules: Of the module that saves it.
    """

    node: int | None
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    rules: Sequence[Any]


class _Step(NamedTuple):
    """What the plan has for a saved tensor; `need` where it was computed again, else it stays."""

    expected: _Expected
    need: Need | None


_Plan = list[_Step | None]  # for each saved tensor; None: to be looked at
_NO_MORE = _Step(_Expected(None, torch.Size(), (), torch.bool, ()), None)  # agrees with none


class ForwardPlans:
    """What forwards of a model have saved, by the shapes of what they were given."""

    def __init__(self) -> None:
        self._plans: dict[Any, _Plan] = {}
        self._uses: dict[Any, int] = {}

    def begin(self, inputs: Sequence[Any], first_node: int) -> Replay:
        """A forward begins. The first, second, fourth, eighth ... of a kind follows no plan."""
        kind = tuple((x.shape, x.dtype) for x in inputs if type(x) is Tensor and is_plain(x))
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
        self._noted: list[tuple[_Expected, Callable[[], SavedTensor | None] | None]] = []
        self._is_noting = plan is None
        self._rest: Iterator[_Step | None] = iter(plan or ())

    def step(self, tensor: Tensor, node: int | None, rules: Sequence[Any]) -> _Step | None:
        """What the plan has for a tensor; to be asked once for each, in the order of saving."""
        if self._is_noting:
            return None
        step = next(self._rest, _NO_MORE)
        if step is None:
            return None
        number = None if node is None else node - self._first_node
        if step.expected == (number, tensor.shape, tensor.stride(), tensor.dtype, rules):
            return step
        self._drop()
        return None

    def note(
        self, tensor: Tensor, saved: SavedTensor | None, node: int | None, rules: Sequence[Any]
    ) -> None:
        """A tensor is saved that is to be looked at; or that stays as it is, whatever it is for."""
        if self._is_noting:
            number = None if node is None else node - self._first_node
            seen = _Expected(number, tensor.shape, tensor.stride(), tensor.dtype, rules)
            self._noted.append((seen, None if saved is None else weakref.ref(saved)))

    def finish(self) -> None:
        """The forward has ended, and all is decided."""
        if self._is_noting:
            self._plans[self._kind] = [
                _Step(seen, None) if saved is None else _step(seen, saved())
                for seen, saved in self._noted
            ]
        elif next(self._rest, _NO_MORE) is not _NO_MORE:
            self._drop()

    def _drop(self) -> None:
        self._plans.pop(self._kind, None)
        self._rest = repeat(None)


def _step(expected: _Expected, saved: SavedTensor | None) -> _Step | None:
    if saved is None or expected.node is None:
        return None
    if saved.is_computed_again:
        return _Step(expected, saved.need)
    return _Step(expected, None) if saved.is_whole and saved.is_for_no_rule else None
