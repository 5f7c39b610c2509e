"""How a step's gradient becomes an update: precision, clipping, accumulation over iterations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, get_args

import torch
from mmengine.optim import OptimWrapper as _OptimWrapper
from torch import Tensor, nn
from torch.optim import Optimizer

from memengine._torch_private.grad_scaler import GradScaler, forget_half_made_state
from memengine._torch_private.ops import do_not_compile
from memengine.engine.faults.guard import OnNonFinite, StepGuard
from memengine.engine.step import SlicedModel, plain_step, unwrap
from memengine.registry import OPTIM_WRAPPERS
from memengine.techniques.modules.forward_state import computing_device
from memengine.techniques.sharding.clipping import (
    clip_each_grad_norm_,
    clip_grad_norm_,
    clip_grad_value_,
    grad_norms,
)

# In place of torch's own, which refuse sharded gradients beside plain ones.
_CLIP_FUNCTIONS = {
    'norm': clip_grad_norm_,
    'value': clip_grad_value_,
    'each_norm': clip_each_grad_norm_,
}


_DTYPES = {
    **dict.fromkeys(('fp32', 'float32'), torch.float32),
    **dict.fromkeys(('bf16', 'bfloat16'), torch.bfloat16),
    **dict.fromkeys(('fp16', 'float16'), torch.float16),
}


class Precision:
    """What a step computes in.

    Args:
        optimizer: Holds the parameters, on whose device it is.
        name: ``'fp32'`` (no autocast), ``'bf16'`` or ``'fp16'`` (or torch's names for them).
        loss_scale: For fp16: ``'dynamic'``, a fixed number, or arguments of ``GradScaler``.

    Raises:
        ValueError: For another name or loss scale.

    Attributes:
        scaler: The gradient scaler in fp16, else None.
    """

    def __init__(
        self, optimizer: Optimizer, name: str, loss_scale: str | float | dict[str, Any] = 'dynamic'
    ) -> None:
        if name not in _DTYPES:
            raise ValueError(f'precision must be fp32, bf16 or fp16, got {name!r}')
        self.dtype = _DTYPES[name]
        self._optimizer = optimizer
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
            self.scaler = GradScaler(_device_type(optimizer), **options)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which the model and the loss run."""
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(_device_type(self._optimizer), dtype=self.dtype)

    def scaled(self, loss: Tensor) -> Tensor:
        """What backward starts from: in fp16 the loss times its scale."""
        if self.scaler is None:
            return loss
        forget_half_made_state(self.scaler)
        scaled: Tensor = self.scaler.scale(loss)
        return scaled


def _device_type(optimizer: Optimizer) -> str:
    """Where the parameters are computed with now; they may have moved since."""
    return computing_device(optimizer.param_groups[0]['params'][0]).type


def _refuse_coupled(module: nn.Module, counts: int) -> None:
    if isinstance(module, SlicedModel) and module.coupled:
        raise ValueError(
            f'optim_wrapper.accumulative_counts={counts}: samples meet in the loss of '
            f'{type(module).__name__}, but those of different iterations do not, so this would '
            f'train another objective than a batch that is {counts} times as large. For that one, '
            f'multiply train_dataloader.batch_size by {counts} and set optim_wrapper.type='
            "'GradCacheOptimWrapper' with chunk_size, the images that fit; to train this one, set "
            'optim_wrapper.accumulate_coupled=True'
        )


@OPTIM_WRAPPERS.register_module()
class OptimWrapper(_OptimWrapper):
    """MMEngine's OptimWrapper with precision as a setting.

    Args:
        optimizer: The optimiser.
        accumulative_counts: Iterations whose gradients are averaged before an update.
        accumulate_coupled: Do so also where samples meet in the loss. Those of different iterations
            do not, so that is another objective than the loss of all of them.
        clip_grad: ``dict(max_norm=...)`` clips the norm of all gradients together,
            ``dict(type='value', clip_value=...)`` each entry, ``dict(type='each_norm',
            max_norm=...)`` each parameter's norm on its own, as DINO does.
        precision: ``'fp32'``, ``'bf16'`` or ``'fp16'``; on CPU as well as on a GPU.
        loss_scale: For fp16: ``'dynamic'``, a fixed number, or arguments of ``GradScaler``.
        on_nonfinite: What follows a step whose loss or gradient is NaN or infinite on any rank,
            and which is never carried out: ``'stop'`` ends training, ``'skip'`` goes on with the
            next batch, ``'rollback'`` does so from the last checkpoint's weights and optimiser.
        nonfinite_limit: Most such steps since the last checkpoint; at one more training ends.

    Raises:
        ValueError: For a setting out of range; in a step, when samples meet in the loss of a model
            whose gradients are to be accumulated, unless ``accumulate_coupled``.

    In fp16 a step whose gradient overflowed is skipped and the scale is lowered, as always; only
    what does not end so is a step that is not finite.

    Attributes:
        guard: Asked before each update, if there is one; the Runner sets it.
        on_gradient: Called once a step's gradient is there, as its backward has left it.
        updates_in_backward: Whether parameters have changed by then.
    """

    updates_in_backward = False
    _inner_count: int

    def __init__(
        self,
        optimizer: Optimizer,
        accumulative_counts: int = 1,
        clip_grad: dict[str, Any] | None = None,
        precision: Literal['fp32', 'bf16', 'fp16'] = 'fp32',
        loss_scale: str | float | dict[str, Any] = 'dynamic',
        on_nonfinite: OnNonFinite = 'stop',
        nonfinite_limit: int = 10,
        accumulate_coupled: bool = False,
    ) -> None:
        if accumulative_counts < 1:
            raise ValueError(f'accumulative_counts must be at least 1, got {accumulative_counts}')
        if on_nonfinite not in get_args(OnNonFinite):
            raise ValueError(
                f"on_nonfinite must be 'stop', 'skip' or 'rollback', got {on_nonfinite!r}"
            )
        if nonfinite_limit < 1:
            raise ValueError(f'nonfinite_limit must be at least 1, got {nonfinite_limit}')
        clip_grad = dict(clip_grad) if clip_grad else None
        kind = clip_grad.get('type', 'norm') if clip_grad else 'norm'
        if clip_grad and kind == 'each_norm':
            del clip_grad['type']
        super().__init__(optimizer, accumulative_counts, clip_grad)
        self.clip_func: Any = _CLIP_FUNCTIONS[kind]
        self.precision = Precision(optimizer, precision, loss_scale)
        self.on_nonfinite: OnNonFinite = on_nonfinite
        self.nonfinite_limit = nonfinite_limit
        self.accumulate_coupled = accumulate_coupled
        self.guard: StepGuard | None = None
        self.on_gradient: Callable[[], None] | None = None
        self._counts_steps = True
        self._loss: Tensor | None = None
        self._is_spoilt = False  # by an iteration of those whose gradients are accumulated
        self._first_count = 0  # iterations done when this run began, or went on

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes that a step is cut into, by their settings."""
        return {}

    def train_step(self, model: nn.Module, data: Any) -> dict[str, Tensor]:
        """Carry out one training step; see :func:`memengine.engine.step.run_step`."""
        if self._accumulative_counts > 1 and not self.accumulate_coupled:
            _refuse_coupled(unwrap(model), self._accumulative_counts)
        log_vars = self._carry_out(model, data)
        return log_vars if self.guard is None else self.guard.to_log(log_vars)

    def _carry_out(self, model: nn.Module, data: Any) -> dict[str, Tensor]:
        return plain_step(model, data, self, self.sync_context)

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """The context of forward: autocast, and no synchronisation before the last iteration."""
        with self.sync_context(model), self.precision.autocast():
            yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Backward of the loss, scaled in fp16."""
        self._loss = loss.detach()
        super().backward(self.precision.scaled(loss), **kwargs)

    def add_gradient(self, loss: Tensor) -> None:
        """Backward of a part of the step: scaled as the whole, but not counted as an iteration."""
        self.precision.scaled(self.scale_loss(loss)).backward()

    @contextmanager
    def sync_context(self, model: nn.Module) -> Iterator[None]:
        """No synchronisation of gradients before the last of ``accumulative_counts`` iterations."""
        with super().optim_context(model):
            yield

    @contextmanager
    def gradients_only(self) -> Iterator[None]:
        """Steps that are carried out here add their gradient, and are counted nowhere."""
        count: int = self._inner_count
        self._counts_steps = False
        try:
            yield
        finally:
            self._inner_count = count
            self._counts_steps = True

    def update_params(
        self,
        loss: Tensor,
        step_kwargs: dict[str, Any] | None = None,
        zero_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Backward of the loss, and the update if it is time."""
        self.backward(self.scale_loss(loss))
        self._end_iteration(loss, step_kwargs, zero_kwargs)

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Begin, or go on, after so many iterations of so many in all (-1: that is not known)."""
        super().initialize_count_status(model, init_counts, max_counts)
        self._first_count = init_counts

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss's share of the mean over those iterations that make the next update.

        A run that goes on within them (``accumulative_counts`` may have changed) has the later ones
        only, for which MMEngine divides by the number of all.
        """
        counts, first = self._accumulative_counts, self._first_count
        end = first - first % counts + counts
        if first % counts == 0 or self._inner_count >= end:
            return super().scale_loss(loss)
        last = end if self._max_counts == -1 else min(end, self._max_counts)
        return loss / (last - first)

    def finish_step(self, loss: Tensor) -> None:
        """Count the iteration whose gradient has been added, and update if it is time."""
        self._inner_count += 1
        self._end_iteration(loss)

    @do_not_compile
    def _end_iteration(
        self,
        loss: Tensor,
        step_kwargs: dict[str, Any] | None = None,
        zero_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if self.on_gradient is not None:
            self.on_gradient()
        if not self._counts_steps:
            return
        self._loss = loss.detach()
        if self.should_update():
            self.step(**(step_kwargs or {}))
            self.zero_grad(**(zero_kwargs or {}))
        elif not self._passes(self._grad_norms()):  # found where it happens, not at the update
            self.zero_grad()
            self._is_spoilt = True

    def step(self, **kwargs: Any) -> None:
        """Clip the gradients if set, and update the parameters, unless the guard is against it."""
        scaler, guard = self.precision.scaler, self.guard
        if scaler is not None and (guard is not None or self.clip_grad_kwargs):
            scaler.unscale_(self.optimizer)
        norms = self._grad_norms()
        may_update = self._passes(norms) and not self._is_spoilt
        self._is_spoilt = False
        if may_update:
            self._clip_grad(norms)
            if scaler is None or guard is not None:
                self.optimizer.step(**kwargs)
            else:
                scaler.step(self.optimizer, **kwargs)  # which looks for overflows itself
            if guard is not None:
                guard.has_updated = True
        if scaler is not None:
            is_bad = guard is not None and guard.bad_step is not None
            scaler.update(scaler.get_scale() if is_bad else self.precision.fixed_scale)

    def _parameters(self) -> list[Tensor]:
        """The parameters that have a gradient."""
        groups = self.optimizer.param_groups
        return [p for group in groups for p in group['params'] if p.grad is not None]

    def _grad_norms(self) -> Tensor | None:
        """Norm of each gradient, [P]; None if there are none, or nobody asks."""
        grads = [p.grad for p in self._parameters() if p.grad is not None]
        nobody_asks = self.guard is None and not self.clip_grad_kwargs
        return None if not grads or nobody_asks else grad_norms(grads, self._norm_type)

    @property
    def accumulative_counts(self) -> int:
        """Iterations whose gradients are averaged before an update."""
        return int(self._accumulative_counts)

    @property
    def _norm_type(self) -> float:
        return float((self.clip_grad_kwargs or {}).get('norm_type', 2.0))

    def _passes(self, norms: Tensor | None) -> bool:
        """Whether loss and gradient so far are finite, or nobody asks."""
        if self.guard is None:
            return True
        norm = (
            torch.zeros(()) if norms is None else torch.linalg.vector_norm(norms, self._norm_type)
        )
        loss = norm.new_zeros(()) if self._loss is None else self._loss
        may_overflow = self.precision.scaler is not None
        if may_overflow and not self.should_update():  # the scaler looks at the sum only
            norm, may_overflow = torch.zeros_like(norm), False
        return self.guard.passes(loss, norm, self._parameters(), may_overflow)

    def _clip_grad(self, norms: Tensor | None = None) -> None:
        """Clip the gradients, whose norms are known, and log the norm of all."""
        parameters = self._parameters()
        if not self.clip_grad_kwargs or not parameters:
            return
        norm = self.clip_func(parameters, **self.clip_grad_kwargs, norms=norms)
        if norm is not None:
            norm = float(norm) if self.guard is None else self.guard.grad_norm
            self.message_hub.update_scalar(f'train/{self.grad_name}', norm)

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
    on_nonfinite: OnNonFinite = 'stop',
    nonfinite_limit: int = 10,
    accumulate_coupled: bool = False,
) -> OptimWrapper:
    """MMEngine's name for an :class:`OptimWrapper` in half precision.

    Args:
        dtype: ``'float16'`` or ``'bfloat16'``; None is fp16 on a GPU and bf16 on CPU. The others
            are :class:`OptimWrapper`'s.
    """
    if dtype is None:
        dtype = 'bf16' if _device_type(optimizer) == 'cpu' else 'fp16'
    precision: Any = str(dtype).removeprefix('torch.')
    return OptimWrapper(
        optimizer,
        accumulative_counts,
        clip_grad,
        precision,
        loss_scale,
        on_nonfinite,
        nonfinite_limit,
        accumulate_coupled,
    )
