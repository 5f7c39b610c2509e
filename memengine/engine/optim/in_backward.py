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
from memengine.techniques.optimizer.in_backward import (
    TECHNIQUE,
    check_steps_alone,
    step_in_backward,
)

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
        if self._accumulative_counts != 1:
            counts = f'accumulative_counts={self._accumulative_counts}'
            raise TECHNIQUE.refusal('accumulation_over_iterations', counts)
        clip_grad = kwargs.get('clip_grad')
        if clip_grad and clip_grad.get('type', 'norm') == 'norm':
            clipping = f'clip_grad={dict(clip_grad)}'
            raise TECHNIQUE.refusal('optim_wrapper.clip_grad.type=norm|None', clipping)
        if self.precision.scaler is not None:
            raise TECHNIQUE.refusal('optim_wrapper.precision=fp16|float16')
        self._later: dict[nn.Parameter, None] = {}
        check_steps_alone(optimizer)

    @contextmanager
    def sync_context(self, model: nn.Module) -> Iterator[None]:
        """Refuse DDP; see what has to wait. There are no iterations without synchronisation."""
        ddp = nn.parallel.DistributedDataParallel
        if any(isinstance(module, ddp) for module in model.modules()):
            raise TECHNIQUE.refusal('data_parallel')
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
