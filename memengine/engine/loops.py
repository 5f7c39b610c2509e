"""MMEngine's training loops, made resumable at any iteration."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mmengine.dataset import InfiniteSampler
from mmengine.dist import is_distributed
from mmengine.runner import EpochBasedTrainLoop as _EpochBasedTrainLoop
from mmengine.runner import IterBasedTrainLoop as _IterBasedTrainLoop
from torch import Tensor, nn
from torch.utils.data import DataLoader

from memengine.engine.data_order import batches_from, train_loader
from memengine.engine.distributed.processes import cpu_group
from memengine.registry import LOOPS

__all__ = ['EpochBasedTrainLoop', 'IterBasedTrainLoop']

# A launcher may send a Ctrl-C again that the terminal has sent to all: no second one until then.
DUPLICATE_SIGNAL_S = 3.0


class _StopRequest:
    """Whether training is to end after the current iteration, and why.

    Ctrl-C and SIGTERM ask for it, so that the state can be saved; a second Ctrl-C ends at once.
    Several ranks stop together, once any of them was asked: they vote during each iteration and
    hear the result after it, so that no rank waits for the vote. It takes a few bytes on gloo.
    """

    def __init__(self, stop_at_iter: int | None) -> None:
        self._stop_at_iter = stop_at_iter
        self._listens = threading.current_thread() is threading.main_thread()
        self._previous: dict[int, Any] = {}
        self._received_at: float | None = None
        self._vote: tuple[dist.Work, Tensor] | None = None
        self.interrupted = False

    def __enter__(self) -> _StopRequest:
        if self._listens:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type | None, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._vote is not None and kind is None:  # all ranks have cast it
            self._vote[0].wait()
        self._vote = None

    def _receive(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self._received_at is None:
            self._received_at = now
        elif not is_distributed() or now - self._received_at > DUPLICATE_SIGNAL_S:
            raise KeyboardInterrupt

    def after(self, iterations: int) -> bool:
        """Whether to stop, ``iterations`` iterations having been done."""
        self.interrupted = self._poll_ranks()
        stop_at = self._stop_at_iter
        return self.interrupted or (stop_at is not None and iterations >= stop_at)

    def _poll_ranks(self) -> bool:
        asked = self._received_at is not None
        if not is_distributed():
            return asked
        answer = False
        if self._vote is not None:
            work, votes = self._vote
            work.wait()
            answer = bool(votes.item())
        votes = torch.tensor(float(asked))
        work = dist.all_reduce(votes, dist.ReduceOp.MAX, cpu_group('stopping'), async_op=True)
        self._vote = (work, votes)
        return answer


def _save_and_stop(loop: EpochBasedTrainLoop | IterBasedTrainLoop) -> None:
    """Save a checkpoint from which training goes on as if it had not stopped."""
    loop.stop_training = True
    runner = loop.runner
    name = f'iter_{loop.iter}{runner.checkpoint_suffix}'
    meta = dict(epoch=loop.epoch, iter=loop.iter)
    mark = partial(runner.mark_last_checkpoint, Path(runner.work_dir) / name)
    runner.save_checkpoint(runner.work_dir, name, meta=meta, on_complete=mark)
    runner.logger.info(f'Stopped after iteration {loop.iter}; saved {name}, go on with --resume.')


def _validate_if_due(loop: EpochBasedTrainLoop | IterBasedTrainLoop, done: int, last: int) -> None:
    due = done >= loop.val_begin and (done % loop.val_interval == 0 or done == last)
    if due and loop.runner.val_loop is not None:
        loop.runner.val_loop.run()


@LOOPS.register_module()
class EpochBasedTrainLoop(_EpochBasedTrainLoop):
    """MMEngine's loop over epochs, which also resumes in the middle of one.

    Args:
        runner: The runner.
        dataloader: A data loader or its config.
        max_epochs: Epochs to train.
        val_begin: First epoch to validate after.
        val_interval: Epochs between validations.
        dynamic_intervals: Milestones and intervals of validation, as in MMEngine.
        stop_at_iter: Save and stop after this iteration; schedules still aim at ``max_epochs``.
    """

    def __init__(
        self,
        runner: Any,
        dataloader: DataLoader | dict[str, Any],
        max_epochs: int,
        val_begin: int = 1,
        val_interval: int = 1,
        dynamic_intervals: list[tuple[int, int]] | None = None,
        stop_at_iter: int | None = None,
    ) -> None:
        dataloader = train_loader(runner, dataloader)
        super().__init__(runner, dataloader, max_epochs, val_begin, val_interval, dynamic_intervals)
        self._stop = _StopRequest(stop_at_iter)

    def run(self) -> nn.Module:
        """Train, from wherever the runner was resumed."""
        self.runner.call_hook('before_train')
        self.stop_training |= self._stop.after(self._iter)
        with self._stop as stop:
            while self._epoch < self._max_epochs and not self.stop_training:
                epoch = self._epoch
                self.run_epoch()
                if self._epoch > epoch:
                    self._decide_current_val_interval()
                    _validate_if_due(self, self._epoch, self._max_epochs)
        self.runner.call_hook('after_train')
        if stop.interrupted:
            raise KeyboardInterrupt
        return self.runner.model

    def run_epoch(self) -> None:
        """Train the rest of the current epoch, or up to where training is to stop."""
        self.runner.call_hook('before_train_epoch')
        self.runner.model.train()
        done = self._iter - self._epoch * len(self.dataloader)
        for index, batch in enumerate(batches_from(self.dataloader, done), start=done):
            self.run_iter(index, batch)
            if self._stop.after(self._iter):
                return _save_and_stop(self)
        self.runner.call_hook('after_train_epoch')
        self._epoch += 1
        return None


@LOOPS.register_module()
class IterBasedTrainLoop(_IterBasedTrainLoop):
    """MMEngine's loop over iterations, which resumes without loading what was trained on.

    Args:
        runner: The runner.
        dataloader: A data loader or its config.
        max_iters: Iterations to train.
        val_begin: First iteration to validate after.
        val_interval: Iterations between validations.
        dynamic_intervals: Milestones and intervals of validation, as in MMEngine.
        stop_at_iter: Save and stop after this iteration; schedules still aim at ``max_iters``.
    """

    def __init__(
        self,
        runner: Any,
        dataloader: DataLoader | dict[str, Any],
        max_iters: int,
        val_begin: int = 1,
        val_interval: int = 1000,
        dynamic_intervals: list[tuple[int, int]] | None = None,
        stop_at_iter: int | None = None,
    ) -> None:
        dataloader = train_loader(runner, dataloader)
        super().__init__(runner, dataloader, max_iters, val_begin, val_interval, dynamic_intervals)
        del self.dataloader_iterator  # it has begun at the first batch, before any resume
        self._stop = _StopRequest(stop_at_iter)

    def run(self) -> nn.Module:
        """Train, from wherever the runner was resumed."""
        self.runner.call_hook('before_train')
        self.runner.call_hook('before_train_epoch')
        with self._stop as stop:
            for batch in self._batches():
                self.runner.model.train()
                self.run_iter(batch)
                self._decide_current_val_interval()
                if stop.after(self._iter):
                    _save_and_stop(self)
                _validate_if_due(self, self._iter, self._max_iters)
                if self._iter >= self._max_iters or self.stop_training:
                    break
        self.runner.call_hook('after_train_epoch')
        self.runner.call_hook('after_train')
        if stop.interrupted:
            raise KeyboardInterrupt
        return self.runner.model

    def _batches(self) -> Iterator[Any]:
        """Batches without end, pass after pass, from the current iteration on."""
        if self._iter >= self._max_iters or self._stop.after(self._iter):
            return
        sampler = getattr(self.dataloader.sampler, 'sampler', self.dataloader.sampler)
        if isinstance(sampler, InfiniteSampler):  # one endless pass
            passes, start = 0, self._iter
        else:
            passes, start = divmod(self._iter, len(self.dataloader))
        while True:
            if hasattr(self.dataloader.sampler, 'set_epoch'):
                self.dataloader.sampler.set_epoch(passes)
            yield from batches_from(self.dataloader, start)
            passes, start = passes + 1, 0
