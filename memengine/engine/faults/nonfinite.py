"""Steps whose loss or gradient is not finite: found before the optimiser sees them, and kept out.

::

    forward, backward ──► StepGuard.passes(loss, norm)     one all-reduce, one synchronisation
                            │ yes ──► clipping, the optimiser's step, what hangs on it (a teacher)
                            │ no  ──► no update, on no rank
                            ▼
    NonFiniteHook           buffers put back (a centre, BatchNorm), the step captured;
                            then on_nonfinite: stop, skip, or roll back to the last checkpoint
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mmengine.hooks import CheckpointHook, Hook

from memengine.engine.faults.capture import StepStart, capture_step
from memengine.engine.faults.finite_state import NonFiniteError, each_optim_wrapper, guards_of
from memengine.engine.faults.guard import Guarded, StepGuard
from memengine.engine.step import unwrap
from memengine.registry import HOOKS


@HOOKS.register_module(name=['NonFiniteHook', 'FiniteLossHook'])
class NonFiniteHook(Hook):
    """Keeps steps whose loss or gradient is NaN or infinite out of all that training holds.

    Part of memengine's Runner. What follows such a step is set by ``optim_wrapper.on_nonfinite``
    and ``nonfinite_limit``; see :class:`~memengine.engine.optim.OptimWrapper`. Weights, optimiser
    and what follows the optimiser's step (a teacher) have not seen it, and the model's buffers
    (BatchNorm's statistics, DINO's centre) are put back. With a wrapper of MMEngine's own only the
    loss is looked at, after the update, and training stops.

    Args:
        captures: How many bad steps of a run leave a file each, ``nonfinite/iter_N.pth`` in the
            work dir, that ``memengine replay`` repeats. It is as large as the weights and a batch.

    Raises:
        ValueError: For a negative number of captures; before training, when a roll-back would find
            no optimiser in a checkpoint.
        NonFiniteError: In training, when it stops.

    Cost: the norm of the gradients once more where they are not clipped by it, a copy of the
    model's buffers, a synchronisation, an all-reduce of two numbers.
    """

    priority = 'VERY_HIGH'  # before what saves; registered after what seeds the iteration

    def __init__(self, captures: int = 3) -> None:
        if captures < 0:
            raise ValueError(f'NonFiniteHook: captures must not be negative, got {captures}')
        self.captures = captures
        self._guarded: list[Guarded] = []
        self._start: StepStart | None = None
        self._checkpoint: Any = None

    def before_train(self, runner: Any) -> None:
        """Put guards before the updates."""
        found = each_optim_wrapper(runner.optim_wrapper)
        self._guarded = [wrapper for wrapper in found if isinstance(wrapper, Guarded)]
        if self._guarded:
            self._start = StepStart(unwrap(runner.model))
        saves = [hook for hook in runner.hooks if isinstance(hook, CheckpointHook)]
        if any(wrapper.on_nonfinite == 'rollback' for wrapper in self._guarded) and not all(
            hook.save_optimizer for hook in saves
        ):
            raise ValueError(
                "optim_wrapper.on_nonfinite='rollback' takes the optimiser from the last "
                'checkpoint, and default_hooks.checkpoint.save_optimizer=False leaves it out; set '
                "it to True, or on_nonfinite to 'skip' or 'stop'"
            )

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Keep what the forward pass changes."""
        latest = runner.message_hub.get_info('last_ckpt')
        is_new, self._checkpoint = latest != self._checkpoint, latest
        for wrapper in self._guarded:
            wrapper.guard = StepGuard() if wrapper.guard is None else wrapper.guard
            wrapper.guard.bad_step = None
            if is_new:
                wrapper.guard.note_checkpoint()
        if self._start is not None:
            self._start.keep()

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Do with a bad step what the settings say."""
        for wrapper in self._guarded:
            if wrapper.guard is not None and wrapper.guard.bad_step is not None:
                return self._act(runner, wrapper, wrapper.guard, data_batch)
        if not self._guarded and isinstance(outputs, Mapping) and 'loss' in outputs:
            loss = outputs['loss'].item()
            if not math.isfinite(loss):
                raise _error(runner, f'the loss is {loss}')
        return None

    def after_train(self, runner: Any) -> None:
        """Take the guards away."""
        for wrapper in self._guarded:
            wrapper.guard = None

    def _act(self, runner: Any, wrapper: Guarded, guard: StepGuard, data_batch: Any) -> None:
        bad = guard.bad_step
        assert self._start is not None and bad is not None
        self._start.put_back_buffers()
        captured = ''
        if self.captures:
            self.captures -= 1
            captured = capture_step(runner, wrapper, self._start, bad, data_batch)
        if wrapper.on_nonfinite == 'stop':
            raise _error(runner, str(bad), captured)
        if guard.refused > wrapper.nonfinite_limit:
            limit = f'optim_wrapper.nonfinite_limit={wrapper.nonfinite_limit} steps were refused'
            raise _error(runner, f'{bad}, after {limit},', captured)
        if wrapper.on_nonfinite == 'rollback':
            if (checkpoint := runner.roll_back()) is None:
                raise _error(
                    runner, f'{bad}, and there is no checkpoint to roll back to,', captured
                )
            for each in guards_of(runner.optim_wrapper):
                each.has_updated = False
            done = f'weights and optimiser are those of {checkpoint} again, and the data go on'
        else:
            done = 'the step is skipped'
        runner.logger.warning(
            f'Iteration {runner.iter + 1}: {bad}; {done} ({guard.refused} of at most '
            f'{wrapper.nonfinite_limit} since the last checkpoint). {captured}'
        )


def _error(runner: Any, what: str, captured: str = '') -> NonFiniteError:
    return NonFiniteError(
        f'{what} in iteration {runner.iter + 1}: training stops, the last checkpoint is from '
        'before. Lower optim_wrapper.optimizer.lr, set optim_wrapper.clip_grad, or use precision '
        "bf16 or fp32, then go on with --resume; optim_wrapper.on_nonfinite='skip' leaves such "
        f'steps out. {captured}'.rstrip()
    )
