"""The one place where techniques are applied to a model, in the one order they are written in.

Before the wrapper: what replaces modules or parameters, which DDP and FSDP must see.
After the weights are initialised and before a checkpoint is loaded: what changes how forward
and backward are carried out and leaves names and parameters alone.
"""

from __future__ import annotations

from functools import partial
from logging import Logger
from typing import Any

from mmengine.runner.activation_checkpointing import turn_on_activation_checkpointing
from torch import nn

from memengine.techniques.conv_bn_eval import efficient_conv_bn_eval
from memengine.techniques.sync_batchnorm import convert_sync_batchnorm

__all__ = ['apply_before_wrapping', 'apply_to_model']


def apply_before_wrapping(model: nn.Module, cfg: Any, distributed: bool) -> None:
    """Apply ``sync_bn`` of the config, in place.

    MMEngine's own ``sync_bn='torch'`` works on GPUs only; this one on any backend.
    """
    if distributed and cfg.get('sync_bn') == 'torch':
        convert_sync_batchnorm(model)
        cfg.pop('sync_bn')


def apply_to_model(model: nn.Module, cfg: Any, logger: Logger) -> None:
    """Apply the model techniques that the config's own keys name, in order.

    Args:
        model: The bare model.
        cfg: The run's config; keys ``efficient_conv_bn_eval`` and ``activation_checkpointing``.
        logger: Told what was applied.
    """
    for key, turn_on in (
        ('efficient_conv_bn_eval', partial(efficient_conv_bn_eval, report=logger.info)),
        ('activation_checkpointing', turn_on_activation_checkpointing),
    ):
        modules = cfg.get(key)
        if modules:
            logger.info(f'Applying {key} to {modules}')
            turn_on(model, modules)
