"""MMEngine's moving average of the weights, of steps that were carried out."""

from __future__ import annotations

from typing import Any

from mmengine.hooks import EMAHook as MMEngineEMAHook

from memengine.engine.faults.finite_state import each_optim_wrapper, guards_of
from memengine.registry import HOOKS


@HOOKS.register_module()
class EMAHook(MMEngineEMAHook):
    """MMEngine's, of updates and not of iterations.

    What is no update leaves the average as it is: an iteration whose gradient is kept for a later
    one (``accumulative_counts``), an overflow in fp16, a step that was refused as not finite. A
    batch in several iterations then has the average of a batch in one. A roll-back takes the
    average of the checkpoint, too. Settings are MMEngine's; ``interval`` counts updates.
    """

    _has_updated = False

    def before_train(self, runner: Any) -> None:
        """Check the settings, as MMEngine does, and have the optimisers tell of their steps."""
        super().before_train(runner)
        for wrapper in each_optim_wrapper(runner.optim_wrapper):
            wrapper.optimizer.register_step_post_hook(self._note_update)

    def _note_update(self, optimizer: Any, *_: Any) -> None:
        # Fused optimisers are called on an overflow, too, which the scaler has them look for.
        overflow = getattr(optimizer, 'found_inf', None)
        self._has_updated |= overflow is None or not bool(overflow)

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Average, unless there was no update."""
        has_updated, self._has_updated = self._has_updated, False
        if not has_updated:
            return
        if all(guard.bad_step is None for guard in guards_of(runner.optim_wrapper)):
            super().after_train_iter(runner, batch_idx, data_batch, outputs)

    def before_roll_back(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Take the average, and for the model the weights in whose place it was saved."""
        if 'ema_state_dict' in checkpoint:
            self._swap_ema_state_dict(checkpoint)
            self.ema_model.load_state_dict(checkpoint['ema_state_dict'], strict=self.strict_load)
