"""torch.compile of repeated blocks from a config."""

from __future__ import annotations

from collections.abc import Sequence
from logging import Logger
from typing import Any

from mmengine.hooks import Hook
from torch import nn

from memengine.engine.step import unwrap
from memengine.registry import HOOKS
from memengine.techniques.compiling import CompiledBlocks, compile_blocks
from memengine.techniques.modules.blocks import BLOCKS

__all__ = ['CompileBlocksHook']


@HOOKS.register_module()
class CompileBlocksHook(Hook):
    """Applies :func:`memengine.techniques.compile_blocks` for the time of training.

    The config's key ``compile_blocks=True`` is short for this hook; it takes a list of modules or
    a dict of the hook's arguments, too. MMEngine's key ``compile`` compiles the whole step.

    Args:
        modules: Which modules of the model; see
            :func:`~memengine.techniques.modules.blocks.select_modules`.
        **options: Of ``torch.compile``, e.g. ``mode='max-autotune'``.

    Raises:
        ValueError: As that function.
    """

    def __init__(self, modules: str | Sequence[str] = BLOCKS, **options: Any) -> None:
        self.modules = modules
        self.options = options
        self._handle: CompiledBlocks | None = None

    def before_train(self, runner: Any) -> None:
        """Begin under MMEngine's own Runner, which does not call ``apply``."""
        if self._handle is None:
            self.apply(unwrap(runner.model), runner.logger)

    def apply(self, model: nn.Module, logger: Logger) -> None:
        """Begin; called by :func:`memengine.engine.apply.apply_to_model`."""
        self._handle = compile_blocks(model, self.modules, **self.options)
        names = self._handle.names
        logger.info(f'Compiled blocks: {len(names)} modules, {names[0]} to {names[-1]}')

    def after_train(self, runner: Any) -> None:
        """Leave the model as it was."""
        if self._handle is not None:
            self._handle.undo()
            self._handle = None
