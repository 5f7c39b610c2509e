"""The optimiser's step inside backward, by config.

The technique is :mod:`memengine.techniques.optimizer_memory.in_backward`.
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
from memengine.techniques.optimizer_memory.in_backward import (
    TECHNIQUE,
    check_steps_alone,
    fuse_where_possible,
    step_in_backward,
)
from memengine.techniques.sharding.clipping import local_part


@OPTIM_WRAPPERS.register_module()
class OptimizerInBackwardOptimWrapper(OptimWrapper):
    """Updates each parameter inside backward and frees its gradient.

    Args:
        optimizer: The optimiser.
        **kwargs: As :class:`OptimWrapper`'s, as far as no setting needs whole gradients:
            ``precision`` ``'fp32'`` or ``'bf16'``, ``clip_grad`` of type ``'each_norm'`` or
            ``'value'``, no ``accumulative_counts``, ``on_nonfinite`` ``'stop'`` or ``'rollback'``:
            a bad step has changed weights by the time it is found.

    Raises:
        ValueError: For such a setting; in a step, when the model is wrapped by DDP.
        TypeError: For an optimiser that cannot update one parameter alone.

    See :func:`memengine.techniques.step_in_backward` for costs and for hooks of the optimiser.
    """

    updates_in_backward = True

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
        if self.on_nonfinite == 'skip':
            raise TECHNIQUE.refusal('optim_wrapper.on_nonfinite=skip')
        self._later: dict[nn.Parameter, None] = {}
        self._norms: list[Tensor] = []
        self._logs_norm = (clip_grad or {}).get('type') == 'each_norm'
        check_steps_alone(optimizer)
        fuse_where_possible(optimizer)

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
        self._norms = []

        def look(parameter: nn.Parameter) -> None:
            gradient: Any = parameter.grad
            norm = torch.linalg.vector_norm(local_part(gradient))
            if self.clip_grad_kwargs:
                norm_of_all_ranks = self.clip_func([parameter], **self.clip_grad_kwargs)
                norm = norm if norm_of_all_ranks is None else norm_of_all_ranks
            self._norms.append(norm)

        needs_look = self.clip_grad_kwargs or self.guard is not None
        with step_in_backward(self.optimizer, look if needs_look else None, self._later):
            super().backward(loss, **kwargs)
        for parameter in self._later if needs_look else ():
            if parameter.grad is not None:
                look(parameter)

    def _grad_norms(self) -> Tensor | None:
        """Those that were found in backward."""
        return (
            torch.stack([n.to(self._norms[0].device) for n in self._norms]) if self._norms else None
        )

    def _clip_grad(self, norms: Tensor | None = None) -> None:
        """Log the norm of all gradients; nothing is left to clip behind backward."""
        if norms is not None and self._logs_norm:
            # The guard has read it; to read it once more is to wait for the device once more.
            norm = torch.linalg.vector_norm(norms) if self.guard is None else self.guard.grad_norm
            self.message_hub.update_scalar(f'train/{self.grad_name}', norm)
