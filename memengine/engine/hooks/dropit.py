"""DropIT from a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from logging import Logger
from typing import Any, Literal

import torch
from mmengine.hooks import Hook
from torch import nn

from memengine.engine.hooks.compression import check_compressed
from memengine.engine.step import unwrap
from memengine.registry import HOOKS
from memengine.techniques.codecs.codec import Codec
from memengine.techniques.codecs.quantized import Quantizer
from memengine.techniques.codecs.sparse import Cast
from memengine.techniques.compression.dropit import DropIT, drop_activations

__all__ = ['DropITHook']


@HOOKS.register_module()
class DropITHook(Hook):
    """Applies :func:`memengine.techniques.drop_activations` for the time of training.

    The config's key ``dropit=True`` is short for this hook; it takes a dict of the hook's
    arguments, too. What was dropped in the first iteration is logged.

    Args:
        strategy: ``'mink'``, ``'block_mink'`` or ``'random'``.
        gamma: Share of elements to drop, or a dict of it by globs of modules' names.
        modules: Where; None for everywhere.
        exclude: Where not.
        schedule: Pairs of an iteration and the share from there on, linear in between:
            ``[(0, 0.5), (1000, 0.9)]``. Replaces ``gamma``.
        block_size: For ``'block_mink'`` only: elements of a block, by default 256, or ``'row'``.
        value_bits: What is kept in 16 bits (bfloat16), or quantised to 8, 4 or 2; 32 for as it is.
        strict: Whether it is an error when the first iteration with a gamma drops nothing.

    Raises:
        ValueError: As that function; for a schedule that is not in order; after the first
            iteration, when it dropped nothing.
    """

    def __init__(
        self,
        strategy: str = 'mink',
        gamma: float | Mapping[str, float] = 0.9,
        modules: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] = (),
        schedule: Sequence[tuple[int, float]] | None = None,
        block_size: int | Literal['row'] | None = None,
        value_bits: int = 32,
        strict: bool = True,
    ) -> None:
        self.strategy = strategy
        self.gamma = gamma
        self.modules = modules
        self.exclude = exclude
        self.schedule = schedule
        self.block_size = block_size
        self.value_bits = value_bits
        self.strict = strict
        self._handle: DropIT | None = None
        self._is_checked = False
        if schedule is not None:
            _check_schedule(schedule)

    def before_train(self, runner: Any) -> None:
        """Begin under MMEngine's own Runner, which does not call ``apply``."""
        if self._handle is None:
            self.apply(unwrap(runner.model), runner.logger)

    def apply(self, model: nn.Module, logger: Logger) -> None:
        """Begin; called by :func:`memengine.engine.apply.apply_to_model`."""
        self._handle = drop_activations(
            model,
            self.strategy,
            self.gamma if self.schedule is None else self.schedule[0][1],
            modules=self.modules,
            exclude=self.exclude,
            block_size=self.block_size,
            values=_codec_of(self.value_bits),
        )
        logger.info(f'DropIT: {self.strategy}, gamma {self._handle.gamma:g}')

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Follow the schedule."""
        if self.schedule is not None and self._handle is not None:
            self._handle.gamma = _gamma_at(self.schedule, runner.iter)

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Say once what was dropped."""
        if self._handle is None or self._is_checked or not self._handle.gamma:
            return
        self._is_checked = True
        check_compressed('dropit', self._handle.kept, self.strict, runner.logger)

    def after_train(self, runner: Any) -> None:
        """Leave the model as it was."""
        if self._handle is not None:
            self._handle.undo()
            self._handle = None


def _codec_of(value_bits: int) -> Codec | None:
    if value_bits == 32:
        return None
    if value_bits == 16:
        return Cast(torch.bfloat16)
    if value_bits in (2, 4, 8):
        return Quantizer(value_bits)
    raise ValueError(f'dropit: value_bits is 32, 16, 8, 4 or 2, got {value_bits!r}')


def _check_schedule(schedule: Sequence[tuple[int, float]]) -> None:
    iterations = [entry[0] for entry in schedule if len(entry) == 2]
    if len(iterations) != len(schedule) or not schedule or sorted(set(iterations)) != iterations:
        raise ValueError(
            'dropit: schedule is pairs of an iteration and a gamma, in order, such as '
            f'[(0, 0.5), (1000, 0.9)], got {schedule!r}'
        )
    for _, gamma in schedule:
        if not 0 <= gamma < 1:
            raise ValueError(f'dropit: schedule: gamma is from 0 to below 1, got {gamma!r}')


def _gamma_at(schedule: Sequence[tuple[int, float]], iteration: int) -> float:
    before = [entry for entry in schedule if entry[0] <= iteration]
    after = [entry for entry in schedule if entry[0] > iteration]
    if not before or not after:
        return (before[-1] if before else after[0])[1]
    (start, first), (end, last) = before[-1], after[0]
    return first + (last - first) * (iteration - start) / (end - start)
