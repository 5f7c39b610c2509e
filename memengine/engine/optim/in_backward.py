"""The optimiser's step inside backward, by config.

The technique is :mod:`memengine.techniques.optimizer.in_backward`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from memengine.engine.optim.optim_wrapper import OptimWrapper
from memengine.registry import OPTIM_WRAPPERS
from memengine.techniques.optimizer.in_backward import check_steps_alone, step_in_backward

__all__ = ['OptimizerInBackwardOptimWrapper']


@OPTIM_WRAPPERS.register_module()
class OptimizerInBackwardOptimWrapper(OptimWrapper):
    """Updates each parameter inside backward and frees its gradient.

    Args:
        optimizer: The optimiser.
        **kwargs: As :class:`OptimWrapper`'s, as far as no setting needs whole gradients:
            ``precision`` ``'fp32'`` or ``'bf16'``, ``clip_grad`` of type ``'each_norm'`` or
            ``'value'``, no ``accumulative_counts``.

    Raises:
        ValueError: For such a setting; in a step, when the model is wrapped by DDP.
        TypeError: For an optimiser that cannot update one parameter alone.

    See :func:`memengine.techniques.optimizer.in_backward.step_in_backward` for what it costs and
    for hooks of the optimiser.
    """

    def __init__(self, optimizer: Optimizer, **kwargs: Any) -> None:
        super().__init__(optimizer, **kwargs)
        name = type(self).__name__
        if self._accumulative_counts != 1:
            raise ValueError(
                f'{name}: accumulative_counts={self._accumulative_counts} adds up gradients of '
                'several iterations, but here none outlives its update; use '
                "optim_wrapper.type='OptimWrapper'"
            )
        clip_grad = kwargs.get('clip_grad')
        if clip_grad and clip_grad.get('type', 'norm') == 'norm':
            raise ValueError(
                f'{name}: clip_grad={dict(clip_grad)} needs the norm of all gradients '
                "together, but here they are never there at once; set clip_grad.type='each_norm' "
                "(each parameter's own norm, as DINO does) or 'value', or clip_grad=None, or use "
                "optim_wrapper.type='OptimWrapper'"
            )
        if self.precision.scaler is not None:
            raise ValueError(
                f"{name}: precision='fp16' skips a step in which any gradient overflowed, which is "
                "known only after backward; use precision='bf16', or "
                "optim_wrapper.type='OptimWrapper'"
            )
        self._later: dict[nn.Parameter, None] = {}
        check_steps_alone(optimizer)

    @contextmanager
    def sync_context(self, model: nn.Module) -> Iterator[None]:
        """Refuse DDP; see what has to wait. There are no iterations without synchronisation."""
        ddp = nn.parallel.DistributedDataParallel
        if any(isinstance(module, ddp) for module in model.modules()):
            raise ValueError(
                f'{type(self).__name__} takes gradients before DistributedDataParallel has reduced '
                'them over ranks, and DDP holds all of them in its buckets anyway; use '
                "optim_wrapper.type='OptimWrapper' with an optimiser such as AdamW8bit or "
                'AdamWBf16, or shard the model (fully_shard)'
            )
        # Sharding leaves scalars whole, and reduces their gradients at the end of backward.
        is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        self._later = dict.fromkeys(p for p in model.parameters() if is_sharded and p.ndim == 0)
        yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Backward of the loss, in which the parameters are clipped and updated one by one."""
        norms: list[Tensor] = []
        clip_func: Any = self.clip_func if self.clip_grad_kwargs else None

        def clip(parameter: nn.Parameter) -> None:
            norm = clip_func([parameter], **self.clip_grad_kwargs)
            if norm is not None:
                norms.append(norm)

        with step_in_backward(self.optimizer, clip if clip_func else None, self._later):
            super().backward(loss, **kwargs)
        for parameter in self._later if clip_func else ():
            if parameter.grad is not None:
                clip(parameter)
        if norms:
            self.message_hub.update_scalar(f'train/{self.grad_name}', torch.stack(norms).norm())

    def _clip_grad(self) -> None:
        """Nothing is left to clip behind backward."""
