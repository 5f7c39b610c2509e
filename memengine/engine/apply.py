"""The one place where techniques are applied to a model, in the one order they are written in.

Before the wrapper: what replaces modules or parameters, which DDP and FSDP must see.
After the weights are initialised and before a checkpoint is loaded: what changes how forward
and backward are carried out and leaves names and parameters alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from logging import Logger
from typing import Any

import mmengine.model
from mmengine.hooks import Hook
from torch import nn

from memengine.engine.hooks import (
    ActivationCheckpointingHook,
    ActivationOffloadHook,
    CompileBlocksHook,
    DropITHook,
    EfficientConvBNEvalHook,
    QuantizedActivationsHook,
    RecomputedActivationsHook,
)
from memengine.techniques.compression.scope import rules_of
from memengine.techniques.layers.sync_batchnorm import convert_sync_batchnorm

__all__ = ['apply_before_wrapping', 'apply_to_model', 'hooks_of_keys']

# Hooks that act on the model, by the config's key for them, in the order in which they are
# applied: what is not saved at all, how the rest is coded, which modules are computed again
# instead, then where that which is left to save goes; compiled is a block with all that is in its
# forward.
_MODEL_HOOKS: dict[str, Any] = {
    'efficient_conv_bn_eval': EfficientConvBNEvalHook,
    'recomputed_activations': RecomputedActivationsHook,
    'dropit': DropITHook,
    'quantized_activations': QuantizedActivationsHook,
    'activation_checkpointing': ActivationCheckpointingHook,
    'activation_offload': ActivationOffloadHook,
    'compile_blocks': CompileBlocksHook,
}


def apply_before_wrapping(model: nn.Module, cfg: Any) -> nn.Module:
    """The model with ``sync_bn`` of the config applied, of a run in several processes.

    MMEngine's own ``sync_bn='torch'`` works on GPUs only; this one on any backend.
    """
    if cfg.get('sync_bn') == 'torch':
        convert_sync_batchnorm(model)
    elif cfg.get('sync_bn') is not None:
        model = mmengine.model.convert_sync_batchnorm(model, cfg.sync_bn)
    return model


def hooks_of_keys(cfg: Any) -> dict[str, dict[str, Any]]:
    """Hooks that keys of the config are short for, by key.

    A key's value is the hook's arguments, its ``modules``, or True for the hook as it is.
    """
    hooks = {}
    for key, hook in _MODEL_HOOKS.items():
        value = cfg.get(key)
        if isinstance(value, str) and value[:1] == '[':  # as a shell may pass a list
            value = [name.strip() for name in value.strip('[]').split(',')]
        if isinstance(value, Mapping):
            hooks[key] = {'type': hook, **value}
        elif value:
            hooks[key] = {'type': hook} if value is True else {'type': hook, 'modules': value}
    return hooks


def apply_to_model(model: nn.Module, cfg: Any, logger: Logger, hooks: Iterable[Hook] = ()) -> None:
    """Apply the model techniques that the hooks name, in order.

    Args:
        model: The bare model.
        cfg: The run's config; its key ``compile``.
        logger: Told what was applied.
        hooks: The run's hooks, with those that keys are short for.
    """
    hooks = list(hooks)
    for kind in _MODEL_HOOKS.values():
        for hook in hooks:
            if isinstance(hook, kind):
                hook.apply(model, logger)
    if cfg.get('compile') and any(isinstance(hook, CompileBlocksHook) for hook in hooks):
        raise ValueError('compile compiles the whole step and compile_blocks its blocks; set one')
    for rule in rules_of(model) if cfg.get('compile') else ():
        raise ValueError(
            f'compile and {rule.setting} do not go together, as what compiled code saves cannot '
            'be told apart; set one'
        )
