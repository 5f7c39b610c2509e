"""MMEngine's training loops, made resumable at any iteration."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mmengine.dataset import InfiniteSampler
from mmengine.runner import EpochBasedTrainLoop as _EpochBasedTrainLoop
from mmengine.runner import IterBasedTrainLoop as _IterBasedTrainLoop
from torch import nn
from torch.utils.data import DataLoader

from memengine.engine.data_order import batches_from
from memengine.registry import LOOPS

__all__ = ['EpochBasedTrainLoop', 'IterBasedTrainLoop']


class _StopRequest:
    """Whether training is to end after the current iteration, and why.

    In one process, Ctrl-C and SIGTERM ask for it, so that the state can be saved; a second
    Ctrl-C ends at once. With several ranks signals keep their usual meaning: ranks stop at
    different iterations, and a rank that waits for the others would hang.
    """

    def __init__(self, stop_at_iter: int | None, distributed: bool) -> None:
        self._stop_at_iter = stop_at_iter
        self._listens = not distributed and threading.current_thread() is threading.main_thread()
        self._previous: dict[int, Any] = {}
        self.signal: int | None = None

    def __enter__(self) -> _StopRequest:
        if self._listens:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: Any) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number

    def after(self, iterations: int) -> bool:
        """Whether to stop, ``iterations`` iterations having been done."""
        stop_at = self._stop_at_iter
        return self.signal is not None or (stop_at is not None and iterations >= stop_at)


def _save_and_stop(loop: EpochBasedTrainLoop | IterBasedTrainLoop) -> None:
    """Save a checkpoint from which training goes on as if it had not stopped."""
    loop.stop_training = True
    runner = loop.runner
    name = f'iter_{loop.iter}{runner.checkpoint_suffix}'
    meta = dict(epoch=loop.epoch, iter=loop.iter)
    mark = partial(runner.mark_last_checkpoint, Path(runner.work_dir) / name)
    runner.save_checkpoint(runner.work_dir, name, meta=meta, then=mark)
    runner.logger.info(f'Stopped after iteration {loop.iter}; saved {name}, go on with --resume.')


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
        super().__init__(runner, dataloader, max_epochs, val_begin, val_interval, dynamic_intervals)
        self._stop = _StopRequest(stop_at_iter, runner.distributed)

    def run(self) -> nn.Module:
        """Train, from wherever the runner was resumed."""
        self.runner.call_hook('before_train')
        self.stop_training |= self._stop.after(self._iter)
        with self._stop as stop:
            while self._epoch < self._max_epochs and not self.stop_training:
                epoch = self._epoch
                self.run_epoch()
                if self._epoch > epoch and self._validates():
                    self.runner.val_loop.run()
        self.runner.call_hook('after_train')
        if stop.signal is not None:
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

    def _validates(self) -> bool:
        self._decide_current_val_interval()
        due = self._epoch % self.val_interval == 0 or self._epoch == self._max_epochs
        return self.runner.val_loop is not None and self._epoch >= self.val_begin and due


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
        super().__init__(runner, dataloader, max_iters, val_begin, val_interval, dynamic_intervals)
        del self.dataloader_iterator  # it has begun at the first batch, before any resume
        self._stop = _StopRequest(stop_at_iter, runner.distributed)

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
                if self._validates():
                    self.runner.val_loop.run()
                if self._iter >= self._max_iters or self.stop_training:
                    break
        self.runner.call_hook('after_train_epoch')
        self.runner.call_hook('after_train')
        if stop.signal is not None:
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

    def _validates(self) -> bool:
        due = self._iter % self.val_interval == 0 or self._iter == self._max_iters
        return self.runner.val_loop is not None and self._iter >= self.val_begin and due
