"""Activation offload from a config."""

from __future__ import annotations

from logging import Logger
from typing import Any

from mmengine.hooks import Hook
from torch import nn

from memengine.engine.step import unwrap
from memengine.registry import HOOKS
from memengine.techniques.offload import ActivationOffload, offload_activations

__all__ = ['ActivationOffloadHook']


@HOOKS.register_module()
class ActivationOffloadHook(Hook):
    """Applies :func:`memengine.techniques.offload_activations` for the time of training.

    The config's key ``activation_offload=True`` is short for this hook; it takes a dict of the
    hook's arguments, too. What was moved in the first iteration is logged.

    Args:
        store: ``'host'`` memory, ``'disk'``, or ``'auto'``.
        folder: Where files go; a temporary folder by default.
        min_bytes: Smallest storage that moves, in bytes.
        look_ahead: How many storages are brought back before they are asked for.
        strict: Whether it is an error when the first iteration moves nothing.

    Raises:
        ValueError: As that function; after the first iteration, when it moved nothing.
    """

    def __init__(
        self,
        store: str = 'auto',
        folder: str | None = None,
        min_bytes: int = 2**20,
        look_ahead: int = 2,
        strict: bool = True,
    ) -> None:
        self.store = store
        self.folder = folder
        self.min_bytes = min_bytes
        self.look_ahead = look_ahead
        self.strict = strict
        self._handle: ActivationOffload | None = None
        self._is_checked = False

    def before_train(self, runner: Any) -> None:
        """Begin under MMEngine's own Runner, which does not call ``apply``."""
        if self._handle is None:
            self.apply(unwrap(runner.model), runner.logger)

    def apply(self, model: nn.Module, logger: Logger) -> None:
        """Begin; called by :func:`memengine.engine.apply.apply_to_model`."""
        self._handle = offload_activations(
            model,
            self.store,
            folder=self.folder,
            min_bytes=self.min_bytes,
            look_ahead=self.look_ahead,
        )

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Say once what was moved."""
        if self._handle is None or self._is_checked:
            return
        self._is_checked = True
        moved = self._handle.moved_bytes[0]
        if not moved and self.strict:
            raise ValueError(
                'activation_offload: the first iteration saved nothing of at least '
                f'min_bytes={self.min_bytes} that can be moved; lower min_bytes, or set '
                'strict=False'
            )
        runner.logger.info(
            f'Activation offload: {moved / 2**20:.1f} MiB moved in the first iteration, '
            f'{self._handle.peak_stored_bytes / 2**20:.1f} MiB of them at once'
        )

    def after_train(self, runner: Any) -> None:
        """Leave the model as it was."""
        if self._handle is not None:
            self._handle.undo()
            self._handle = None
