"""Activation checkpointing from a config."""

from __future__ import annotations

from collections.abc import Sequence
from logging import Logger
from typing import Any

from mmengine.hooks import Hook
from torch import nn

from memengine.engine.step import unwrap
from memengine.registry import HOOKS
from memengine.techniques.checkpointing.checkpoint_activations import (
    Checkpointing,
    checkpoint_activations,
)
from memengine.techniques.modules.blocks import BLOCKS

__all__ = ['ActivationCheckpointingHook']


@HOOKS.register_module()
class ActivationCheckpointingHook(Hook):
    """Applies :func:`memengine.techniques.checkpoint_activations` for the time of training.

    The config's key ``activation_checkpointing=['blocks']`` is short for this hook with these
    ``modules``; it takes a dict of the hook's arguments, too.

    Args:
        modules: Which modules of the model; see
            :func:`~memengine.techniques.modules.blocks.select_modules`.
        every: Every k-th of them.
        keep: Ops whose outputs are kept, e.g. ``['matmuls', 'attention']``.
        budget: In place of ``keep``: bytes as a fraction of the plain step's, 0 to 1.
        strict: Whether it is an error when the first iteration computes nothing again. (Some of
            several modules that do not are a warning.)

    Raises:
        ValueError: As that function; after the first iteration, when it computed nothing again.
    """

    def __init__(
        self,
        modules: str | Sequence[str] = BLOCKS,
        every: int = 1,
        keep: str | Sequence[str] = (),
        budget: float | None = None,
        strict: bool = True,
    ) -> None:
        self.modules = modules
        self.every = every
        self.keep = keep
        self.budget = budget
        self.strict = strict
        self._handle: Checkpointing | None = None
        self._is_checked = False

    def before_train(self, runner: Any) -> None:
        """Begin under MMEngine's own Runner, which does not call ``apply``."""
        if self._handle is None:
            self.apply(unwrap(runner.model), runner.logger)

    def apply(self, model: nn.Module, logger: Logger) -> None:
        """Begin; called by :func:`memengine.engine.apply.apply_to_model`."""
        self._handle = checkpoint_activations(
            model, self.modules, every=self.every, keep=self.keep, budget=self.budget
        )
        names = self._handle.names
        logger.info(f'Activation checkpointing: {len(names)} modules, {names[0]} to {names[-1]}')

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Say once which modules had nothing to compute again."""
        if self._handle is None or self._is_checked:
            return
        self._is_checked = True
        unused = self._handle.unused()
        if not unused:
            return
        name, reason = next(iter(unused.items()))
        message = (
            f'activation_checkpointing: {len(unused)} of {len(self._handle.names)} modules were '
            f'not computed again in the first iteration, e.g. {name}: {reason}'
        )
        if self.strict and len(unused) == len(self._handle.names):
            raise ValueError(f'{message}; name modules that are trained, or set strict=False')
        runner.logger.warning(message)

    def after_train(self, runner: Any) -> None:
        """Leave the model as it was."""
        if self._handle is not None:
            self._handle.undo()
            self._handle = None
