"""MMEngine's training loops, made resumable at any iteration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from mmengine.dataset import InfiniteSampler
from mmengine.dist import get_world_size
from mmengine.hooks import EMAHook
from mmengine.optim import OptimWrapper
from mmengine.runner import EpochBasedTrainLoop as _EpochBasedTrainLoop
from mmengine.runner import IterBasedTrainLoop as _IterBasedTrainLoop
from torch import nn
from torch.utils.data import DataLoader

from memengine.engine.data_order import batches_from, train_loader
from memengine.engine.faults.finite_state import each_optim_wrapper
from memengine.engine.faults.stopping import EvaluationStopped, StopRequest
from memengine.registry import LOOPS

_Loop: TypeAlias = 'EpochBasedTrainLoop | IterBasedTrainLoop'

# In the message hub, and so in checkpoints: the evaluation of this place has yet to be done.
_EVALUATION_DUE = 'evaluation_due'

# Beside it: the epoch, the iteration that it began at, and its length.
_EPOCH_BEGAN = 'epoch_began'


def _save_and_stop(loop: _Loop, evaluation_due: bool = False) -> None:
    """Save a checkpoint from which training goes on as if it had not stopped."""
    loop.stop_training = True
    runner = loop.runner
    if evaluation_due:
        runner.message_hub.update_info(_EVALUATION_DUE, True)
    name = runner.save_to_go_on(loop.epoch, loop.iter)
    runner.logger.info(f'Stopped after iteration {loop.iter}; saved {name}, go on with --resume.')


def _has_updated(loop: _Loop) -> bool:
    """Whether no gradients are gathered for an update to come (``accumulative_counts``)."""
    wrappers = each_optim_wrapper(loop.runner.optim_wrapper)
    return all(each.should_update() for each in wrappers if isinstance(each, OptimWrapper))


def _evaluation_is_due(loop: _Loop, done: int, last: int) -> bool:
    due = done >= loop.val_begin and (done % loop.val_interval == 0 or done == last)
    return due and loop.runner.val_loop is not None


def _evaluate(loop: _Loop) -> None:
    """Evaluate; if that is broken off, save a checkpoint that begins with it."""
    try:
        loop.runner.val_loop.run()
    except EvaluationStopped:
        loop.runner.end_evaluation()
        for hook in loop.runner.hooks:
            if isinstance(hook, EMAHook):  # the model has the average in place of its weights
                hook.after_val_epoch(loop.runner)
        _save_and_stop(loop, evaluation_due=True)


def _finish_evaluation(loop: _Loop) -> None:
    """Do the evaluation in which, or before which, the run stopped that is resumed."""
    if loop.runner.message_hub.get_info(_EVALUATION_DUE, False):
        loop.runner.message_hub.update_info(_EVALUATION_DUE, False)
        _evaluate(loop)


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
        self._stop = StopRequest(stop_at_iter)
        runner.register_hook(self._stop)

    def run(self) -> nn.Module:
        """Train, from wherever the runner was resumed."""
        self.runner.call_hook('before_train')
        self.stop_training |= self._stop.after(self._iter)
        self._note_begin(self._resumed_begin())
        with self._stop as stop:
            _finish_evaluation(self)
            while self._epoch < self._max_epochs and not self.stop_training:
                epoch = self._epoch
                self.run_epoch()
                if self._epoch > epoch:
                    self._decide_current_val_interval()
                    if _evaluation_is_due(self, self._epoch, self._max_epochs):
                        _evaluate(self)
        self.runner.call_hook('after_train')
        stop.raise_interrupted()
        return self.runner.model

    def run_epoch(self) -> None:
        """Train the rest of the current epoch, or up to where training is to stop."""
        self.runner.call_hook('before_train_epoch')
        self.runner.model.train()
        done = self._iter - self._began
        for index, batch in enumerate(batches_from(self.dataloader, done), start=done):
            self.run_iter(index, batch)
            if self._stop.after(self._iter, _has_updated(self)):
                return _save_and_stop(self)
        self.runner.call_hook('after_train_epoch')
        self._epoch += 1
        self._note_begin(self._iter)
        return None

    def _note_begin(self, iteration: int) -> None:
        self._began = iteration
        noted = [self._epoch, iteration, len(self.dataloader)]
        self.runner.message_hub.update_info(_EPOCH_BEGAN, noted)

    def _resumed_begin(self) -> int:
        """Where the present epoch began: those before may have been of another length."""
        now = len(self.dataloader)
        epoch, began, length = self.runner.message_hub.get_info(_EPOCH_BEGAN, (None, 0, now))
        if epoch is None:  # of a run that did not note it
            began = self._epoch * now
            began = began if began <= self._iter <= began + now else self._iter
        elif epoch != self._epoch:
            began = self._iter
        elif self._iter - began >= length:  # all of it, but for its end
            began = self._iter - now
        if length != now:
            self.runner.logger.warning(
                f'An epoch has {now} batches, and had {length} when the checkpoint was written: '
                f'epoch {self._epoch + 1} goes on after {self._iter - began} of them, and '
                'schedules that go by iterations end where they would have ended'
            )
        return began


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
        self._stop = StopRequest(stop_at_iter)
        runner.register_hook(self._stop)

    @property
    def passes(self) -> int:
        """Passes over the data that are done."""
        drawn, size = self._draws(self._iter)
        return drawn // size

    @property
    def max_passes(self) -> int:
        """Passes over the data in all; the last one may be cut short."""
        drawn, size = self._draws(self._max_iters)
        return -(-drawn // size)

    def _draws(self, iters: int) -> tuple[int, int]:
        """How far so many iterations come, and how far a pass does: in batches, or in samples."""
        sampler = self._sampler
        if isinstance(sampler, InfiniteSampler):  # whose passes may end within a batch
            return iters * (self.dataloader.batch_size or 1) * get_world_size(), sampler.size
        return iters, len(self.dataloader)

    @property
    def _sampler(self) -> Any:
        return getattr(self.dataloader.sampler, 'sampler', self.dataloader.sampler)

    def run(self) -> nn.Module:
        """Train, from wherever the runner was resumed."""
        self.runner.call_hook('before_train')
        self.runner.call_hook('before_train_epoch')
        with self._stop as stop:
            _finish_evaluation(self)
            for batch in self._batches():
                self.runner.model.train()
                self.run_iter(batch)
                self._decide_current_val_interval()
                evaluation_due = _evaluation_is_due(self, self._iter, self._max_iters)
                stops = stop.after(self._iter, _has_updated(self))
                by_signal = stops and stop.signal is not None
                if stops:
                    _save_and_stop(self, evaluation_due and by_signal)
                if evaluation_due and not by_signal:
                    _evaluate(self)
                if self._iter >= self._max_iters or self.stop_training:
                    break
        self.runner.call_hook('after_train_epoch')
        self.runner.call_hook('after_train')
        stop.raise_interrupted()
        return self.runner.model

    def _batches(self) -> Iterator[Any]:
        """Batches without end, pass after pass, from the current iteration on."""
        if self._iter >= self._max_iters or self._stop.after(self._iter):
            return
        if isinstance(self._sampler, InfiniteSampler):  # one endless pass
            passes, start = 0, self._iter
        else:
            passes, start = divmod(self._iter, len(self.dataloader))
        while True:
            if hasattr(self.dataloader.sampler, 'set_epoch'):
                self.dataloader.sampler.set_epoch(passes)
            yield from batches_from(self.dataloader, start)
            passes, start = passes + 1, 0
