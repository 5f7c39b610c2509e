"""How a step's gradient becomes an update: precision, clipping, accumulation over iterations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from mmengine.optim import OptimWrapper as _OptimWrapper
from torch import Tensor, nn
from torch.optim import Optimizer

from memengine.engine.step import plain_step
from memengine.registry import OPTIM_WRAPPERS
from memengine.techniques.sharding.clipping import (
    clip_each_grad_norm_,
    clip_grad_norm_,
    clip_grad_value_,
)
from memengine.techniques.technique import Settings, Technique, register, setting

__all__ = ['AmpOptimWrapper', 'OptimWrapper', 'Precision']

# In place of torch's own, which refuse sharded gradients beside plain ones.
_CLIP_FUNCTIONS = {
    'norm': clip_grad_norm_,
    'value': clip_grad_value_,
    'each_norm': clip_each_grad_norm_,
}


_DTYPES = {
    'fp32': torch.float32,
    'float32': torch.float32,
    'bf16': torch.bfloat16,
    'bfloat16': torch.bfloat16,
    'fp16': torch.float16,
    'float16': torch.float16,
}


class Precision:
    """What a step computes in.

    Args:
        name: ``'fp32'`` (no autocast), ``'bf16'`` or ``'fp16'`` (or torch's names for them).
        loss_scale: For fp16: ``'dynamic'``, a fixed number, or arguments of ``GradScaler``.

    Raises:
        ValueError: For another name or loss scale.

    Attributes:
        scaler: The gradient scaler in fp16, else None.
    """

    def __init__(self, name: str, loss_scale: str | float | dict[str, Any] = 'dynamic') -> None:
        if name not in _DTYPES:
            raise ValueError(f'precision must be fp32, bf16 or fp16, got {name!r}')
        self.dtype = _DTYPES[name]
        self.device = 'cuda' if torch.cuda.is_available() else 'cpu'
        self.scaler: torch.amp.GradScaler | None = None
        self.fixed_scale: float | None = None
        if isinstance(loss_scale, (int, float)):
            self.fixed_scale = float(loss_scale)
        elif loss_scale != 'dynamic' and not isinstance(loss_scale, dict):
            raise ValueError(
                f"loss_scale must be 'dynamic', a number or a dict, got {loss_scale!r}"
            )
        if self.dtype is torch.float16:
            options = loss_scale if isinstance(loss_scale, dict) else {}
            if self.fixed_scale is not None:
                options = dict(init_scale=self.fixed_scale)
            self.scaler = torch.amp.GradScaler(self.device, **options)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which the model and the loss run."""
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device, dtype=self.dtype)


@OPTIM_WRAPPERS.register_module()
class OptimWrapper(_OptimWrapper):
    """MMEngine's OptimWrapper with precision as a setting.

    Args:
        optimizer: The optimiser.
        accumulative_counts: Iterations whose gradients are averaged before an update.
        clip_grad: ``dict(max_norm=...)`` clips the norm of all gradients together,
            ``dict(type='value', clip_value=...)`` each entry, ``dict(type='each_norm',
            max_norm=...)`` each parameter's norm on its own, as DINO does.
        precision: ``'fp32'``, ``'bf16'`` or ``'fp16'``; on CPU as well as on a GPU.
        loss_scale: For fp16: ``'dynamic'``, a fixed number, or arguments of ``GradScaler``.

    Raises:
        ValueError: For a setting out of range.

    In fp16 a step whose gradient overflowed is skipped and the scale is lowered, as always.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        accumulative_counts: int = 1,
        clip_grad: dict[str, Any] | None = None,
        precision: Literal['fp32', 'bf16', 'fp16'] = 'fp32',
        loss_scale: str | float | dict[str, Any] = 'dynamic',
    ) -> None:
        if accumulative_counts < 1:
            raise ValueError(f'accumulative_counts must be at least 1, got {accumulative_counts}')
        clip_grad = dict(clip_grad) if clip_grad else None
        kind = clip_grad.get('type', 'norm') if clip_grad else 'norm'
        if clip_grad and kind == 'each_norm':
            del clip_grad['type']
        super().__init__(optimizer, accumulative_counts, clip_grad)
        self.clip_func = _CLIP_FUNCTIONS[kind]
        self.precision = Precision(precision, loss_scale)

    def train_step(self, model: nn.Module, data: Any) -> dict[str, Tensor]:
        """Carry out one training step; see :func:`memengine.engine.step.run_step`."""
        return plain_step(model, data, self, self.sync_context)

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """The context of forward: autocast, and no synchronisation before the last iteration."""
        with self.sync_context(model), self.precision.autocast():
            yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Backward of the loss, scaled in fp16."""
        scaler = self.precision.scaler
        super().backward(loss if scaler is None else scaler.scale(loss), **kwargs)

    def add_gradient(self, loss: Tensor) -> None:
        """Backward of a part of the step: scaled as the whole, but not counted as an iteration."""
        scaler, loss = self.precision.scaler, self.scale_loss(loss)
        (loss if scaler is None else scaler.scale(loss)).backward()

    @contextmanager
    def sync_context(self, model: nn.Module) -> Iterator[None]:
        """No synchronisation of gradients before the last of ``accumulative_counts`` iterations."""
        with super().optim_context(model):
            yield

    def finish_step(self) -> None:
        """Count the iteration whose gradient has been added, and update if it is time."""
        self._inner_count += 1
        if self.should_update():
            self.step()
            self.zero_grad()

    def step(self, **kwargs: Any) -> None:
        """Clip the gradients if set, and update the parameters."""
        scaler = self.precision.scaler
        if scaler is None:
            super().step(**kwargs)
            return
        if self.clip_grad_kwargs:
            scaler.unscale_(self.optimizer)
            self._clip_grad()
        scaler.step(self.optimizer, **kwargs)
        scaler.update(self.precision.fixed_scale)

    def state_dict(self) -> dict[str, Any]:
        """State of the optimiser, and of the gradient scaler in fp16."""
        state = super().state_dict()
        if self.precision.scaler is not None:
            state['loss_scaler'] = self.precision.scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave; a scaler's state is optional either way."""
        state = dict(state_dict)
        scaler_state = state.pop('loss_scaler', None)
        if scaler_state is not None and self.precision.scaler is not None:
            self.precision.scaler.load_state_dict(scaler_state)
        super().load_state_dict(state)


@OPTIM_WRAPPERS.register_module(name='AmpOptimWrapper')
def AmpOptimWrapper(  # noqa: N802 (a type name of MMEngine's config language)
    optimizer: Optimizer,
    loss_scale: str | float | dict[str, Any] = 'dynamic',
    dtype: str | torch.dtype | None = None,
    accumulative_counts: int = 1,
    clip_grad: dict[str, Any] | None = None,
) -> OptimWrapper:
    """MMEngine's name for an :class:`OptimWrapper` in half precision.

    Args:
        optimizer: The optimiser.
        loss_scale: See :class:`OptimWrapper`.
        dtype: ``'float16'`` or ``'bfloat16'``; None is fp16 on a GPU and bf16 on CPU.
        accumulative_counts: See :class:`OptimWrapper`.
        clip_grad: See :class:`OptimWrapper`.
    """
    if dtype is None:
        dtype = 'fp16' if torch.cuda.is_available() else 'bf16'
    precision: Any = str(dtype).removeprefix('torch.')
    return OptimWrapper(optimizer, accumulative_counts, clip_grad, precision, loss_scale)


@dataclass(frozen=True)
class MixedPrecisionSettings(Settings):
    """Settings of precision, as ``optim_wrapper`` takes them."""

    precision: Literal['fp32', 'bf16', 'fp16', 'float32', 'bfloat16', 'float16'] = setting(
        'fp32', help='what matrix products and their like compute in'
    )
    loss_scale: Any = setting(
        'dynamic', help="for fp16: 'dynamic', a number, or arguments of GradScaler"
    )


register(
    Technique(
        key='mixed_precision',
        title='mixed precision',
        settings=MixedPrecisionSettings,
        switch='optim_wrapper.precision=bf16',
        exactness='rounding',
        use_when='always on a GPU; on a CPU that has bf16',
        saves='about half of the activations of matrix products',
        price='none, usually faster',
        page='../config.md',
    )
)
