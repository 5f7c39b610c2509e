"""What the graph-free forwards of a step started from, so that each can be run again with a graph.

They start from a random state, and from what modules keep beside their parameters: counters,
buffers that are swapped, results that are computed once and kept in a dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from memengine.techniques.modules.module_state import Change, ModuleState
from memengine.techniques.modules.random_state import RandomState, own_generators
from memengine.techniques.modules.running_statistics import unrepeatable

__all__ = ['FirstForwards', 'Replay']

Replay: TypeAlias = Callable[[], AbstractContextManager[None]]


class FirstForwards:
    """States before the graph-free forwards of a module, in their order.

    Args:
        module: What runs.
        devices: Accelerators that it runs on.

    Attributes:
        replays: For each forward, in their order, the context of its second run: what modules kept
            before the first one, and its random numbers. Afterwards all is as the first forwards
            have left it, but for tensors with a graph, which are as in the plain step.

    Cost: a random state, and some 25 microseconds for each module inside, by forward. What each
    forward leaves on its modules is held until the end of the step.
    """

    def __init__(self, module: nn.Module, devices: Iterable[torch.device]) -> None:
        self._module, self._devices = module, tuple(devices)
        self._are_others_kept = False
        self._before: list[ModuleState] = []
        self._after: ModuleState | None = None
        self._kept_results: dict[tuple[int, Any], Change] = {}
        self.replays: list[Replay] = []

    @contextmanager
    def next(self, slices: int) -> Iterator[RandomState]:
        """Around a forward that will be run again, in so many slices.

        Yields:
            The random state that it starts from.

        Raises:
            RuntimeError: When it writes into a tensor that modules keep, as the forwards before it
                could then not be repeated. The first one may: values that are set once.
        """
        modules = ModuleState(self._module)
        random_state = RandomState(self._devices, own_generators(self._module))
        yield random_state
        written = modules.written_to() if self._before else None
        if written is not None:
            raise unrepeatable(self._module, written)
        for _ in range(slices):
            self.replays.append(partial(self._replay, len(self._before), random_state))
            self._before.append(modules)

    def keep_others(self) -> None:
        """Called before forwards that keep their graph, and are not run again."""
        if self._before and not self._are_others_kept:
            self._are_others_kept = True
            self._before.append(ModuleState(self._module))

    def finish(self) -> None:
        """Note what all forwards have left, before the loss may change it."""
        if self._before:
            self._after = ModuleState(self._module)

    @contextmanager
    def _replay(self, number: int, random_state: RandomState) -> Iterator[None]:
        changes = self._before[number].changes(self._after)
        places = {change.place for change in changes}
        # What an earlier slice has computed and kept has that slice's graph, if it has one.
        changes += [c for place, c in self._kept_results.items() if place not in places]
        for change in changes:
            change.undo()
        try:
            with random_state.replay():
                yield
        finally:
            self._note_kept_results(number, changes)
            for change in changes:
                if not change.has_graph:
                    change.redo()

    def _note_kept_results(self, number: int, changes: list[Change]) -> None:
        """What this slice, and none after it, has changed of modules that keep a graph."""
        following = self._before[number + 1 : number + 2]
        later = {c.place for state in following for c in state.changes(self._after)}
        once = [change for change in changes if change.place not in later]
        with_graph = {change.module: change for change in once if change.has_graph}
        if with_graph and self._are_others_kept:
            kept = next(iter(with_graph.values()))
            raise RuntimeError(
                f'{kept.path} of {type(self._module).__name__} is computed from parameters in one '
                'slice and kept for the others, and has no graph in those that keep theirs from '
                'the first pass (keep_graph); set keep_graph=0 or put the layer into training mode'
            )
        self._kept_results.update((c.place, c) for c in once if c.module in with_graph)
