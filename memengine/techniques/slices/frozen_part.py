"""The frozen part of an encoder, run once in a step that embeds every slice twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memengine.techniques.modules.random_state import RandomState, accelerators_of

__all__ = ['FrozenPart']


class FrozenPart:
    """Keeps what a module returns in the first pass, and returns it in the second.

    Args:
        part: A module without trainable parameters, called with a tensor [N, ...] once in each
            forward pass.

    Raises:
        ValueError: When it has trainable parameters, as they would get no gradient.

    A part that draws random numbers, or returns anything but one tensor [N, ...], is run again: the
    second pass has to go on from the same random state.
    """

    def __init__(self, part: nn.Module) -> None:
        trained = [name for name, p in part.named_parameters() if p.requires_grad]
        if trained:
            raise ValueError(f'{type(part).__name__} is not frozen: {trained[0]} is trained')
        self._part = part
        self._kept: list[Tensor] = []
        self._repeatable = True

    @contextmanager
    def first_pass(self) -> Iterator[None]:
        """Around the forward pass of some slices, in their order."""
        forward = self._part.forward

        def keep(*args: Any, **kwargs: Any) -> Any:
            state = RandomState(accelerators_of(self._part))
            outputs = forward(*args, **kwargs)
            rows = isinstance(outputs, Tensor) and outputs.shape[:1] == _rows(args)
            self._repeatable &= rows and state.unchanged()
            if self._repeatable:
                self._kept.append(outputs)
            return outputs

        with _forward_is(self._part, keep):
            yield

    @contextmanager
    def second_pass(self) -> Iterator[None]:
        """Around the forward pass of the same slices, one by one."""
        if not self._repeatable:
            yield
            return

        def take(*args: Any, **kwargs: Any) -> Tensor:
            (count,) = _rows(args)
            if len(self._kept[0]) < count:
                self._kept = [torch.cat(self._kept)]
            first = self._kept[0]
            self._kept[:1] = [first[count:]] if len(first) > count else []
            return first[:count]

        with _forward_is(self._part, take):
            yield


def _rows(args: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(args[0].shape[:1]) if args and isinstance(args[0], Tensor) else ()


@contextmanager
def _forward_is(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = module.__dict__.get('forward')  # somebody else's, set in the same way
    module.__dict__['forward'] = forward
    try:
        yield
    finally:
        if own is None:
            del module.__dict__['forward']
        else:
            module.__dict__['forward'] = own
