"""Recomputed activations from a config."""

from __future__ import annotations

from collections.abc import Sequence
from logging import Logger
from typing import Any

from mmengine.hooks import Hook
from torch import nn

from memengine.engine.hooks.compression import check_compressed
from memengine.engine.step import unwrap
from memengine.registry import HOOKS
from memengine.techniques.compression.recomputed_activations import (
    RecomputedActivations,
    recompute_activations,
)

__all__ = ['RecomputedActivationsHook']


@HOOKS.register_module()
class RecomputedActivationsHook(Hook):
    """Applies :func:`memengine.techniques.recompute_activations` for the time of training.

    The config's key ``recomputed_activations=True`` is short for this hook; it takes a list of
    modules or a dict of the hook's arguments, too. What was saved in the first iteration is logged.

    Args:
        modules: Where; None for everywhere.
        exclude: Where not.
        strict: Whether it is an error when the first iteration has nothing to compute again.

    Raises:
        ValueError: As that function; after the first iteration, when there was nothing.
    """

    def __init__(
        self,
        modules: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] = (),
        strict: bool = True,
    ) -> None:
        self.modules = modules
        self.exclude = exclude
        self.strict = strict
        self._handle: RecomputedActivations | None = None
        self._is_checked = False

    def before_train(self, runner: Any) -> None:
        """Begin under MMEngine's own Runner, which does not call ``apply``."""
        if self._handle is None:
            self.apply(unwrap(runner.model), runner.logger)

    def apply(self, model: nn.Module, logger: Logger) -> None:
        """Begin; called by :func:`memengine.engine.apply.apply_to_model`."""
        self._handle = recompute_activations(model, modules=self.modules, exclude=self.exclude)

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Say once what was saved."""
        if self._handle is None or self._is_checked:
            return
        self._is_checked = True
        check_compressed('recomputed_activations', self._handle.kept, self.strict, runner.logger)

    def after_train(self, runner: Any) -> None:
        """Leave the model as it was."""
        if self._handle is not None:
            self._handle.undo()
            self._handle = None
