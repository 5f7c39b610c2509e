"""Stopping a training run on all ranks after the same step, or within the same evaluation."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from mmengine.dist import is_distributed
from mmengine.hooks import Hook
from torch import Tensor

from memengine.engine.distributed.processes import cpu_group
from memengine.engine.faults.signals import Interrupted, stop_signals_handled_by
from memengine.registry import HOOKS

__all__ = ['EvaluationStopped', 'StopAfterHook', 'StopRequest', 'TrainingStopped']

# A launcher may send a Ctrl-C again that the terminal has sent to all: no second one until then.
DUPLICATE_SIGNAL_S = 3.0


class EvaluationStopped(Exception):  # noqa: N818 (nothing went wrong)
    """All ranks have left an evaluation after the same batch, as one of them was asked to stop."""


class TrainingStopped(Exception):  # noqa: N818 (nothing went wrong)
    """All ranks have done as many iterations as were asked for."""


@HOOKS.register_module()
class StopAfterHook(Hook):
    """Ends the training loop of another package after some iterations, with a checkpoint.

    Our own loops have ``stop_at_iter``, and go on from the checkpoint in the middle of an epoch.

    Args:
        iterations: How many.

    Raises:
        TrainingStopped: For the runner, after the last one.
    """

    priority = 'LOWEST'

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Save and stop, if this iteration was the last one."""
        done = runner.iter + 1
        if done >= self.iterations:
            name = runner.save_to_go_on(runner.epoch, done)
            runner.logger.info(f'Stopped after iteration {done}; saved {name}.')
            raise TrainingStopped


class StopRequest(Hook):
    """Whether training is to end after the current iteration, and which signal asked for it.

    While it is entered, signals that ask to stop are noted only, so that the state can be saved;
    a second Ctrl-C ends at once. Several ranks stop together, once any of them was asked: they vote
    during each iteration and hear the result after it, so that no rank waits for the vote, and all
    stop at the end of the iteration in which the signal came, or of the next one. As a hook of the
    runner it breaks off evaluations in the same way, from batch to batch.

    Args:
        stop_at_iter: The iteration after which training is to end anyway.

    Attributes:
        signal: The signal for which the ranks have agreed to stop, or None.

    Cost: 4 bytes to each rank and iteration, on gloo.
    """

    priority = 'LOWEST'  # what else follows a batch of an evaluation is done

    def __init__(self, stop_at_iter: int | None) -> None:
        self._stop_at_iter = stop_at_iter
        self._handlers = ExitStack()
        self._received: tuple[int, float] | None = None  # number, time
        self._vote: tuple[dist.Work, Tensor] | None = None
        self._shared_batches = 0
        self.signal: signal.Signals | None = None

    def __enter__(self) -> StopRequest:
        self._handlers.enter_context(stop_signals_handled_by(self._receive))
        return self

    def __exit__(self, kind: type | None, *exc: object) -> None:
        self._handlers.close()
        if self._vote is not None and kind is None:  # all ranks have cast it
            self._vote[0].wait()
        self._vote = None

    def _receive(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self._received is None:
            self._received = number, now
            return
        is_duplicate = is_distributed() and now - self._received[1] <= DUPLICATE_SIGNAL_S
        if number == signal.SIGINT == self._received[0] and not is_duplicate:
            raise Interrupted(number)

    def after(self, iterations: int, updated: bool = True) -> bool:
        """Whether to stop, ``iterations`` iterations having been done."""
        stop_at = self._stop_at_iter
        return (self._agreed() and updated) or (stop_at is not None and iterations >= stop_at)

    def before_val_epoch(self, runner: Any) -> None:
        """Find out how many batches all ranks have, as only these can be left together."""
        batches = torch.tensor(len(runner.val_dataloader))
        if is_distributed():
            dist.all_reduce(batches, dist.ReduceOp.MIN, cpu_group('stopping'))
        self._shared_batches = int(batches)

    def after_val_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Leave the evaluation, if ranks have agreed to stop."""
        if batch_idx < self._shared_batches and self._agreed():
            raise EvaluationStopped

    def raise_interrupted(self) -> None:
        """Raise what ends the process, if it was a signal that ended training."""
        if self.signal is not None:
            raise Interrupted(self.signal)

    def _agreed(self) -> bool:
        """Whether any rank was asked to stop, as far as the vote before this one knows."""
        number = 0 if self._received is None else self._received[0]
        if is_distributed():
            number = self._exchange_votes(number)
        if number:
            self.signal = signal.Signals(number)
        return self.signal is not None

    def _exchange_votes(self, number: int) -> int:
        answer = 0
        if self._vote is not None:
            work, votes = self._vote
            work.wait()
            answer = int(votes)
        votes = torch.tensor(number, dtype=torch.int32)
        group = cpu_group('stopping')
        work = dist.all_reduce(votes, dist.ReduceOp.MAX, group, async_op=True)
        self._vote = (work, votes)
        return answer
