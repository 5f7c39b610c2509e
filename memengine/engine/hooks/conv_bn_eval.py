"""Frozen BatchNorm that keeps no activation of its own, from a config."""

from __future__ import annotations

from collections.abc import Sequence
from logging import Logger
from typing import Any

from mmengine.hooks import Hook
from torch import nn

from memengine.engine.step import unwrap
from memengine.registry import HOOKS
from memengine.techniques.conv_bn.conv_bn_eval import ConvBNEval, efficient_conv_bn_eval

__all__ = ['EfficientConvBNEvalHook']


@HOOKS.register_module()
class EfficientConvBNEvalHook(Hook):
    """Applies :func:`memengine.techniques.efficient_conv_bn_eval` for the time of training.

    Args:
        modules: Names of modules of the model, e.g. ``['backbone']``, or patterns; None for all.
        strict: Whether it is an error when the first iteration fuses nothing.

    Raises:
        ValueError: As that function, in the first iteration at the latest.

    Cost: see that function. The config's key ``efficient_conv_bn_eval=['backbone']`` is short for
    this hook with these ``modules``; it takes a dict of the hook's arguments, too.
    """

    def __init__(self, modules: str | Sequence[str] | None = None, strict: bool = True) -> None:
        self.modules = modules
        self.strict = strict
        self._found: ConvBNEval | None = None

    def before_train(self, runner: Any) -> None:
        """Begin under MMEngine's own Runner, which does not call ``apply``."""
        if self._found is None:
            self.apply(unwrap(runner.model), runner.logger)

    def apply(self, model: nn.Module, logger: Logger) -> None:
        """Begin; called by :func:`memengine.engine.apply.apply_to_model`."""
        self._found = efficient_conv_bn_eval(
            model, self.modules, strict=self.strict, report=logger.info
        )

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """A step that never called the model itself has not been looked at yet."""
        if self._found is not None and not self._found.is_checked:
            self._found.check()

    def after_train(self, runner: Any) -> None:
        """Leave the model as it was."""
        if self._found is not None:
            self._found.remove()
            self._found = None
