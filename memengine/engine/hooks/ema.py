"""MMEngine's moving average of the weights, of steps that were carried out."""

from __future__ import annotations

from typing import Any

from mmengine.hooks import EMAHook as MMEngineEMAHook

from memengine.engine.faults.finite_state import each_optim_wrapper
from memengine.engine.optim.optim_wrapper import OptimWrapper
from memengine.registry import HOOKS


@HOOKS.register_module()
class EMAHook(MMEngineEMAHook):
    """MMEngine's, without the steps that were refused as not finite.

    A step that is skipped leaves the average as it is, and a roll-back takes the average of the
    checkpoint, too. Settings are MMEngine's.
    """

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Average, unless there was no update."""
        ours = (w for w in each_optim_wrapper(runner.optim_wrapper) if isinstance(w, OptimWrapper))
        if all(wrapper.guard is None or wrapper.guard.bad_step is None for wrapper in ours):
            super().after_train_iter(runner, batch_idx, data_batch, outputs)

    def before_roll_back(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Take the average, and for the model the weights in whose place it was saved."""
        if 'ema_state_dict' in checkpoint:
            self._swap_ema_state_dict(checkpoint)
            self.ema_model.load_state_dict(checkpoint['ema_state_dict'], strict=self.strict_load)
