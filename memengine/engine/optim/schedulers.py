"""Schedules of optimiser settings other than the learning rate."""

from __future__ import annotations

import math
from typing import Any

from mmengine.optim import BaseOptimWrapper, _ParamScheduler

from memengine.registry import PARAM_SCHEDULERS


@PARAM_SCHEDULERS.register_module()
class CosineWeightDecay(_ParamScheduler):
    """Weight decay from its first value to ``end`` along half a cosine.

    Groups without weight decay (biases, norms) stay without: MMEngine's own cosine with
    ``param_name='weight_decay'`` would raise them to ``eta_min`` too.

    Args:
        optimizer: The optimiser or its wrapper.
        end_value: Weight decay at the end, of a group that has the optimiser's own
            ``weight_decay``; a group with a multiple of it ends at the same multiple.
        **kwargs: ``begin``, ``end`` (filled in from ``train_cfg``), ``by_epoch``, ``last_step``,
            ``verbose`` as in MMEngine.

    Raises:
        ValueError: For a negative ``end_value``, and one beside an optimiser without weight decay.
    """

    def __init__(self, optimizer: Any, end_value: float, **kwargs: Any) -> None:
        if not end_value >= 0:
            raise ValueError(f'CosineWeightDecay: end_value must not be negative, got {end_value}')
        self.end_value = end_value
        if end_value and not _own_weight_decay(optimizer):
            raise ValueError(
                f'CosineWeightDecay: groups go to end_value={end_value} in proportion to '
                'optim_wrapper.optimizer.weight_decay, which is 0, so that none would have any; '
                'set it to what training begins with'
            )
        super().__init__(optimizer, param_name='weight_decay', **kwargs)

    @classmethod
    def build_iter_from_epoch(
        cls, *args: Any, epoch_length: int, begin: int = 0, end: int = 10**9, **kwargs: Any
    ) -> CosineWeightDecay:
        """The same schedule counted in iterations (``convert_to_iter_based=True``)."""
        kwargs['by_epoch'] = False
        return cls(*args, begin=begin * epoch_length, end=end * epoch_length, **kwargs)

    def _get_value(self) -> list[float]:
        first = _own_weight_decay(self.optimizer)
        done = min(self.last_step / (self.end - self.begin), 1.0)
        value = self.end_value + (first - self.end_value) * (1 + math.cos(math.pi * done)) / 2
        scale = value / first if first else 0.0
        return [base * scale for base in self.base_values]


def _own_weight_decay(optimizer: Any) -> float:
    """What the optimiser was built with, for groups that say nothing else."""
    inner = optimizer.optimizer if isinstance(optimizer, BaseOptimWrapper) else optimizer
    return float(inner.defaults['weight_decay'])
