"""From a model's parameters to an optimiser's parameter groups."""

from __future__ import annotations

import logging
from typing import Any

from mmengine.logging import MMLogger
from mmengine.optim import DefaultOptimWrapperConstructor as _DefaultOptimWrapperConstructor
from torch import nn

from memengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from memengine.suggest import did_you_mean


def _merge_equal_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put parameters with the same settings into one group, in order of first appearance."""
    merged: dict[Any, dict[str, Any]] = {}
    for group in groups:
        settings = {key: value for key, value in group.items() if key != 'params'}
        key = tuple(sorted((name, repr(value)) for name, value in settings.items()))
        merged.setdefault(key, {'params': [], **settings})['params'] += group['params']
    return list(merged.values())


def _decaying_by_keys(
    groups: list[dict[str, Any]], without_keys: list[dict[str, Any]], base_decay: float | None
) -> int:
    """How many parameters have the full weight decay only for a key that says nothing of it."""
    return sum(
        'decay_mult' not in group
        and group.get('weight_decay', base_decay) == base_decay
        and plain.get('weight_decay', base_decay) != base_decay
        for group, plain in zip(groups, without_keys, strict=True)
    )


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class DefaultOptimWrapperConstructor(_DefaultOptimWrapperConstructor):
    """MMEngine's constructor, with one group for each setting instead of one for each parameter.

    ``paramwise_cfg`` means what it means in MMEngine: a parameter that one of ``custom_keys`` names
    is left out of ``bias_decay_mult``, ``norm_decay_mult`` and their like, which a warning says; a
    bias is what is called ``bias`` (not the ``in_proj_bias`` of torch's attention). Few large
    groups let the optimiser's multi-tensor kernels work, and the log says in a line a group what
    MMEngine says in one a parameter.
    """

    paramwise_cfg: dict[str, Any]

    def _validate_cfg(self) -> None:
        """Check ``paramwise_cfg``, as MMEngine does; what it multiplies must be there."""
        multiples = [key for key in self.paramwise_cfg if key.endswith('decay_mult')]
        for name, settings in (self.paramwise_cfg.get('custom_keys') or {}).items():
            multiples += [f'custom_keys.{name}.decay_mult'] if 'decay_mult' in settings else []
        if self.base_wd is None and multiples:
            raise ValueError(
                'optim_wrapper.optimizer.weight_decay is not set, but optim_wrapper.paramwise_cfg '
                f'multiplies it ({", ".join(multiples)}): set it, to 0 for no weight decay'
            )
        super()._validate_cfg()

    def add_params(
        self,
        params: list[dict[str, Any]],
        module: nn.Module,
        prefix: str = '',
        is_dcn_module: int | float | None = None,
    ) -> None:
        """Add the parameters below ``module`` to ``params``, merged at the root."""
        if prefix:
            super().add_params(params, module, prefix, is_dcn_module)
            return
        self._refuse_keys_of_nothing(module)
        logger = MMLogger.get_current_instance()
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            super().add_params(params, module, prefix, is_dcn_module)
            without_keys = self._params_without_keys(module)
        finally:
            logger.setLevel(level)
        if decaying := _decaying_by_keys(params, without_keys, self.base_wd):
            logger.warning(
                f'optim_wrapper.paramwise_cfg: {decaying} tensors that custom_keys name have the '
                'weight decay that others of their kind are spared: MMEngine leaves '
                'bias_decay_mult, norm_decay_mult and their like out where a key names a '
                'parameter. Give the key a decay_mult, which holds for all that it names (1.0 if '
                'this is meant), or the norms and biases longer keys of their own'
            )
        params[:] = _merge_equal_groups(params)
        for group in params:
            settings = {key: value for key, value in group.items() if key != 'params'}
            numbers = sum(p.numel() for p in group['params'])
            tensors = len(group['params'])
            logger.info(f'Optimiser group of {tensors} tensors ({numbers:,} numbers): {settings}')

    def _params_without_keys(self, module: nn.Module) -> list[dict[str, Any]]:
        """The groups that there would be without ``custom_keys``."""
        found: list[dict[str, Any]] = []
        given = self.paramwise_cfg
        self.paramwise_cfg = {**given, 'custom_keys': {}}
        try:
            super().add_params(found, module)
        finally:
            self.paramwise_cfg = given
        return found

    def _refuse_keys_of_nothing(self, model: nn.Module) -> None:
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        for key in self.paramwise_cfg.get('custom_keys', {}):
            if not any(key in name for name in names):
                parts = {part for name in names for part in name.split('.')}
                raise ValueError(
                    f'optim_wrapper.paramwise_cfg.custom_keys.{key}: no parameter has this in its '
                    f'name{did_you_mean(key, parts)}'
                )
