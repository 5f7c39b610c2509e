"""The frozen part of an encoder, run once in a step that embeds every slice twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memengine._torch_private.autograd import version_of
from memengine.techniques.modules.forward_state import RandomState
from memengine.techniques.modules.wrapped_forward import WrappedForward


class FrozenPart(WrappedForward):
    """Keeps what a module returns in the first pass, and returns it in the second.

    Args:
        part: A module without trainable parameters, called with a tensor [N, ...] once in each
            forward pass.

    Raises:
        ValueError: When it has trainable parameters, as they would get no gradient.

    A part that draws random numbers, or returns anything but one tensor [N, ...], is run again: the
    second pass has to go on from the same random state. So is one whose output the rest of the
    encoder writes to (an activation in place at the start of a head).
    """

    setting = 'frozen part'

    def __init__(self, part: nn.Module) -> None:
        trained = [name for name, p in part.named_parameters() if p.requires_grad]
        if trained:
            raise ValueError(f'{type(part).__name__} is not frozen: {trained[0]} is trained')
        super().__init__(type(part).__name__, part)
        self._kept: list[Tensor] = []
        self._versions: list[int] = []  # of what the first pass has kept
        self._repeatable = True
        self._keeps = True  # otherwise it returns what it has kept

    @contextmanager
    def first_pass(self) -> Iterator[None]:
        """Around the forward pass of some slices, in their order."""
        with self._installed(keeps=True):
            yield
        if self._versions != [version_of(outputs) for outputs in self._kept]:
            self._repeatable = False
            self._kept, self._versions = [], []

    @contextmanager
    def second_pass(self) -> Iterator[None]:
        """Around the forward pass of the same slices, one by one."""
        if not self._repeatable:
            yield
            return
        with self._installed(keeps=False):
            yield

    @contextmanager
    def _installed(self, keeps: bool) -> Iterator[None]:
        self._keeps = keeps
        self.begin()
        try:
            yield
        finally:
            self.undo()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the part and keep its outputs, or return them."""
        return self._run_and_keep(args, kwargs) if self._keeps else self._next_kept(_rows(args)[0])

    def _run_and_keep(self, args: Any, kwargs: Any) -> Any:
        state = RandomState.of(self.module)
        outputs = self.plain(*args, **kwargs)
        rows = isinstance(outputs, Tensor) and outputs.shape[:1] == _rows(args)
        self._repeatable &= rows and state.unchanged()
        if self._repeatable:
            self._kept.append(outputs)
            self._versions.append(version_of(outputs))
        return outputs

    def _next_kept(self, count: int) -> Tensor:
        if len(self._kept[0]) < count:
            self._kept = [torch.cat(self._kept)]
        first = self._kept[0]
        self._kept[:1] = [first[count:]] if len(first) > count else []
        return first[:count]


def _rows(args: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(args[0].shape[:1]) if args and isinstance(args[0], Tensor) else ()
