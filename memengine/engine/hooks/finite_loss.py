"""Ends training when the loss is no number any more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mmengine.hooks import Hook

from memengine.registry import HOOKS

__all__ = ['FiniteLossHook', 'NonFiniteLossError']


class NonFiniteLossError(RuntimeError):
    """The loss became NaN or infinite."""


@HOOKS.register_module()
class FiniteLossHook(Hook):
    """Raises when an iteration's loss is NaN or infinite, before anything of it is saved.

    Part of memengine's Runner. The last checkpoint is from before; go on from it with a lower
    learning rate, clipping or a wider precision.
    """

    priority = 'VERY_HIGH'

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Check the step's loss."""
        if not isinstance(outputs, Mapping) or 'loss' not in outputs:
            return
        loss = outputs['loss'].item()
        if not math.isfinite(loss):
            raise NonFiniteLossError(
                f'the loss is {loss} in iteration {runner.iter + 1}: training stops, the last '
                'checkpoint is from before. Lower optim_wrapper.optimizer.lr, set '
                'optim_wrapper.clip_grad, or use precision bf16 or fp32, then go on with --resume'
            )
