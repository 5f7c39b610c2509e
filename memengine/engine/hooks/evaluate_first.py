"""Evaluates the model before it is trained."""

from __future__ import annotations

from typing import Any

from mmengine.hooks import Hook

from memengine.registry import HOOKS
from memengine.techniques.modules.forward_state import RandomState, accelerators_of


@HOOKS.register_module()
class EvaluateFirstHook(Hook):
    """Validates once before the first iteration, so that curves begin at iteration 0.

    While it does, ``before_training`` is True in the message hub: so a metric knows that what it
    measures is the model before training. A run that is resumed is not evaluated again. Training
    is the same with and without the hook: random generators are left as they were.
    """

    priority = 'LOWEST'  # CheckpointHook takes part in validation, so it must be ready

    def before_train(self, runner: Any) -> None:
        """Validate, unless training has begun already."""
        runner.message_hub.update_info('before_training', False)
        if runner.iter > 0:
            return
        if runner.val_loop is None:
            raise ValueError(
                'EvaluateFirstHook: there is nothing to evaluate; set val_dataloader, val_cfg and '
                'val_evaluator, or remove the hook'
            )
        runner.message_hub.update_info('before_training', True)
        try:
            with RandomState(accelerators_of(runner.model)).replay():
                runner.val_loop.run()
        finally:
            runner.message_hub.update_info('before_training', False)
