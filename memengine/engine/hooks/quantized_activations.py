"""Quantised activations from a config."""

from __future__ import annotations

from collections.abc import Sequence
from logging import Logger
from typing import Any, Literal

from mmengine.hooks import Hook
from torch import Tensor, nn

from memengine.engine.hooks.compression import check_compressed
from memengine.engine.step import unwrap
from memengine.registry import HOOKS
from memengine.techniques.compression.quantized_activations import (
    PRESETS,
    Bits,
    QuantizedActivations,
    quantize_activations,
)

__all__ = ['QuantizedActivationsHook']


@HOOKS.register_module()
class QuantizedActivationsHook(Hook):
    """Applies :func:`memengine.techniques.quantize_activations` for the time of training.

    The config's key ``quantized_activations=True`` is short for this hook; it takes a dict of the
    hook's arguments, too. What was coded in the first iteration is logged.

    Args:
        bits: For each element, everywhere or by need or name.
        level: One of GACT's names for settings: ``'L1'`` (4 bits), ``'L1.1'`` (8), ``'L1.2'`` (2),
            ``'L2'``, ``'L2.1'`` and ``'L2.2'`` (4, 3 and 2 on average). Replaces ``bits`` and
            ``average_bits``.
        average_bits: Allot this mean by sensitivity, which is measured before the first
            iteration, on its batch; None for ``bits`` as stated.
        allot_every: Iterations after which it is measured again; 0 for once.
        modules: Where; None for everywhere.
        exclude: Where not.
        group_size: Elements that share a range.
        ranges: ``'group'``, or ``'running'`` as Mesa does.
        min_numel: Smaller tensors stay as they are.
        strict: Whether it is an error when the first iteration codes nothing.

    Raises:
        ValueError: As that function; for an unknown level; after the first iteration, when it
            coded nothing.
    """

    def __init__(
        self,
        bits: Bits = 8,
        level: str | None = None,
        average_bits: float | None = None,
        allot_every: int = 0,
        modules: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] = (),
        group_size: int = 256,
        ranges: Literal['group', 'running'] = 'group',
        min_numel: int = 1024,
        strict: bool = True,
    ) -> None:
        if level is not None and level not in PRESETS:
            raise ValueError(
                f'quantized_activations: level is one of {", ".join(PRESETS)}, got {level!r}'
            )
        if allot_every and level is None and average_bits is None:
            raise ValueError(
                f'quantized_activations: allot_every={allot_every} has nothing to allot; set '
                'average_bits, or a level that has a mean'
            )
        self.bits, self.average_bits = (bits, average_bits) if level is None else PRESETS[level]
        self.allot_every = allot_every
        self.modules = modules
        self.exclude = exclude
        self.group_size = group_size
        self.ranges = ranges
        self.min_numel = min_numel
        self.strict = strict
        self._handle: QuantizedActivations | None = None
        self._is_checked = False

    def before_train(self, runner: Any) -> None:
        """Begin under MMEngine's own Runner, which does not call ``apply``."""
        if self._handle is None:
            self.apply(unwrap(runner.model), runner.logger)

    def apply(self, model: nn.Module, logger: Logger) -> None:
        """Begin; called by :func:`memengine.engine.apply.apply_to_model`."""
        if self.average_bits is not None and self.ranges == 'running':
            raise ValueError(
                "quantized_activations: ranges='running' works at 8 bits, and average_bits="
                f'{self.average_bits:g} wants others; leave one out'
            )
        self._handle = quantize_activations(
            model,
            self.bits,
            modules=self.modules,
            exclude=self.exclude,
            group_size=self.group_size,
            ranges=self.ranges,
            min_numel=self.min_numel,
        )

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Measure sensitivity, when it is time."""
        if self._handle is None or self.average_bits is None:
            return
        is_time = self.allot_every and runner.iter % self.allot_every == 0
        if self._handle.bits_of and not is_time:
            return
        module: Any = unwrap(runner.model)

        def loss() -> Tensor:
            batch = module.data_preprocessor(data_batch, True)
            with runner.optim_wrapper.optim_context(module):
                losses = module(**batch, mode='loss')
            return module.parse_losses(losses)[0]

        bits = self._handle.allot(self.average_bits, loss)
        widths = sorted(set(bits.values()))
        spread = ', '.join(f'{list(bits.values()).count(w)} places {w} bits' for w in widths)
        runner.logger.info(
            f'Quantised activations: {self.average_bits:g} bits on average: {spread}'
        )

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Say once what was coded."""
        if self._handle is None or self._is_checked:
            return
        self._is_checked = True
        check_compressed('quantized_activations', self._handle.kept, self.strict, runner.logger)

    def after_train(self, runner: Any) -> None:
        """Leave the model as it was."""
        if self._handle is not None:
            self._handle.undo()
            self._handle = None
