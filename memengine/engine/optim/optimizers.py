"""Optimisers that a config can name beside torch's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from timm.optim import Lars
from torch.optim import Optimizer

from memengine.registry import OPTIMIZERS
from memengine.techniques.optimizer_memory.adamw_bf16 import AdamWBf16
from memengine.techniques.optimizer_memory.adamw_low_bit import AdamW4bit, AdamW8bit
from memengine.techniques.optimizer_memory.states_on_host import cpu_offload_optimizer

__all__ = ['AdamW4bit', 'AdamW8bit', 'AdamWBf16', 'CPUOffloadOptimizer']

OPTIMIZERS.register_module(name='LARS', module=Lars)
for _kind in (AdamW4bit, AdamW8bit, AdamWBf16):
    OPTIMIZERS.register_module(module=_kind)


@OPTIMIZERS.register_module()
def CPUOffloadOptimizer(  # noqa: N802 (a type name of the config language)
    params: Iterable[Any],
    optimizer_class: str | type[Optimizer] = 'AdamW',
    minimal_size: int = 4096,
    **kwargs: Any,
) -> Optimizer:
    """:func:`~memengine.techniques.optimizer_memory.states_on_host.cpu_offload_optimizer`.

    ``optimizer_class`` may be a name, as in a config; a ValueError says if there is none.
    """
    kind = OPTIMIZERS.get(optimizer_class) if isinstance(optimizer_class, str) else optimizer_class
    if kind is None:
        raise ValueError(f"CPUOffloadOptimizer: there is no optimizer_class '{optimizer_class}'")
    return cpu_offload_optimizer(params, kind, minimal_size, **kwargs)
