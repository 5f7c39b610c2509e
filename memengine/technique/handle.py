"""A technique at work on a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # settings are looked at before torch is imported
    from torch import Tensor


@dataclass(frozen=True)
class StepInfo:
    """What a technique may want to know before a training step.

    Attributes:
        iteration: Iterations done.
        loss: Computes the loss of the step's batch, with graph.
        log: Takes a sentence for the run's log.
    """

    iteration: int
    loss: Callable[[], Tensor]
    log: Callable[[str], Any]


@dataclass(frozen=True)
class Report:
    """What a technique has done in the first step.

    Attributes:
        done: A sentence on what was done; empty when nothing was, which is an error unless the
            settings say ``strict=False``.
        left: A sentence on what was left as it was, and what to do about it.
    """

    done: str = ''
    left: str = ''


class Handle:
    """A technique at work on a model: what ``apply`` returns.

    Attributes:
        is_settled: Whether it does in the first step what it does in those that follow.
    """

    is_settled = False

    def before_step(self, step: StepInfo) -> None:
        """Called before each training step, for what changes while training goes on."""

    def report(self) -> Report | None:
        """What has been done; None while that is not known. Asked after each step until it is."""
        return None

    def run_state(self) -> dict[str, Any]:
        """What later steps follow from beside settings and weights, for checkpoints."""
        return {}

    def load_run_state(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`run_state` gave; of several ranks it is the first one's."""

    def undo(self) -> None:
        """Leave the model as it was."""
        raise NotImplementedError

    def paused(self) -> AbstractContextManager[Any]:
        """A context in which the model runs as if the technique had not been applied.

        Raises:
            NotImplementedError: Where there is no such way; ``verify_exactness`` is refused then.
        """
        raise NotImplementedError


class PausableHandle(Handle):
    """A handle whose technique looks at ``is_paused`` in each forward pass."""

    is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which the model runs as if the technique had not been applied."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False
