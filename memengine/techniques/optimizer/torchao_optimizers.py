"""Optimisers of torchao, an optional package: states in 8 and 4 bits, and states in host memory.

torchao does the work; here its optimisers learn what this engine asks of one: learning rates that
schedules set as numbers, weights that are loaded after the optimiser is built, gradients that
change between backward and step, and checkpoints of another optimiser.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from memengine.technique import Settings, Technique, setting

__all__ = ['AdamW4bit', 'AdamW8bit', 'cpu_offload_optimizer']

_SIGNED_STATES = {'exp_avg': True, 'exp_avg_sq': False, 'max_exp_avg_sq': False}


def _torchao(name: str) -> Any:
    """Class ``name`` of torchao."""
    try:
        return getattr(importlib.import_module('torchao.optim'), name)
    except ImportError as error:
        raise ImportError(
            f"optimizer.type='{name}' is torchao's, which cannot be imported ({error}); run: "
            'pip install torchao'
        ) from error


# ------------------------------------------------------------------ 8 and 4 bits


@functools.cache
def _low_bit(name: str) -> Any:
    base: Any = _torchao(name)
    base_step = base.step
    if hasattr(base_step, 'hooked'):  # torch would run the hooks of a step within a step
        base_step = base_step.__wrapped__

    class LowBit(base):
        def add_param_group(self, param_group: dict[str, Any]) -> None:
            rate = float(param_group.get('lr', self.defaults['lr']))
            super().add_param_group(param_group)
            self.param_groups[-1]['lr'] = rate

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            """torchao's step, which wants rates in tensors and compiles itself, on CPU for long."""
            rates = [group['lr'] for group in self.param_groups]
            devices = {p.device.type for group in self.param_groups for p in group['params']}
            eager = devices == {'cpu'}
            for group, rate in zip(self.param_groups, rates, strict=True):
                group['lr'] = torch.as_tensor(rate, dtype=torch.float32)
            try:
                with torch.compiler.set_stance('force_eager') if eager else nullcontext():
                    return base_step(self, closure)
            finally:
                for group, rate in zip(self.param_groups, rates, strict=True):
                    group['lr'] = rate

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Load a state of this optimiser or of AdamW, which is quantised."""
            super().load_state_dict(state_dict)
            for parameter, state in self.state.items():
                for key in _SIGNED_STATES.keys() & state.keys():
                    if type(state[key]) is Tensor:
                        buffer = self._new_buffer(parameter, _SIGNED_STATES[key])
                        state[key] = buffer.copy_(state[key])

    LowBit.__name__ = LowBit.__qualname__ = name
    return LowBit


def AdamW8bit(  # noqa: N802 (what it makes is an object of a class of that name)
    params: Iterable[Any],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    block_size: int = 256,
) -> Optimizer:
    """torchao's AdamW with both averages in 8 bits, quantised in blocks.

    Args:
        params, lr, betas, eps, weight_decay: As of ``torch.optim.AdamW``.
        block_size: Numbers that share a scale.

    Raises:
        ImportError: When torchao is not installed.

    Cost: 2 bytes of state per parameter instead of 8, and per tensor and average a table of 1 KiB
    and 4 bytes per block. Tensors of less than 4096 numbers, or of a number that ``block_size``
    does not divide, stay in full precision. On a GPU torchao compiles the update once per
    shape, which takes some seconds each in the first step; on CPU it is run uncompiled.

    Lossy: forward and gradients are untouched; see ``docs/techniques/optimizer_memory.md``.

    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (2022); torchao.
    """
    return _low_bit('AdamW8bit')(params, lr, tuple(betas), eps, weight_decay, block_size=block_size)


def AdamW4bit(  # noqa: N802 (what it makes is an object of a class of that name)
    params: Iterable[Any],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    block_size: int = 128,
) -> Optimizer:
    """torchao's AdamW with both averages in 4 bits: 1 byte of state per parameter instead of 8.

    Args and all else are as for :func:`AdamW8bit`. Source: Li et al., Memory Efficient Optimizers
    with 4-bit States (2023); torchao.
    """
    return _low_bit('AdamW4bit')(params, lr, tuple(betas), eps, weight_decay, block_size=block_size)


# ------------------------------------------------------------------ host memory


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != 'params'}


@functools.cache
def _offload_class() -> Any:
    base: Any = _torchao('CPUOffloadOptimizer')

    class Offloading(base):
        def __init__(self, groups: list[Any], optimizer_class: Any, **kwargs: Any) -> None:
            super().__init__([dict(group) for group in groups], optimizer_class, **kwargs)
            part = next(iter(self.optim_dict.values()), self.d_opt)
            # What Optimizer's constructor would have made: defaults, and hooks of the step.
            Optimizer.__setstate__(self, {'defaults': dict(part.defaults)})
            self._groups = [{**self.defaults, **group} for group in groups]
            self._host_has_weights = False

        @property
        def param_groups(self) -> list[dict[str, Any]]:
            """The parameters on the device; torchao's own are those on the host, one a group."""
            return self._groups

        def _parts(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
            """Each group with those of the optimisers that carry it out."""
            parts = {p: part.param_groups[0] for p, part in self.optim_dict.items()}
            for part in self.d_opt.param_groups if self.d_opt else ():
                parts.update(dict.fromkeys(part['params'], part))
            for group in self._groups:
                for parameter in parts.keys() & set(group['params']):
                    yield group, parts[parameter]

        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            """torchao's step, from the gradients, settings and, at first, weights as they are now.

            torchao copies gradients within backward, before clipping, unscaling and DDP's
            reduction, and weights when it is built, before they are initialised or loaded.
            """
            for group, part in self._parts():
                part.update(_settings(group))
            self.stream.synchronize()  # torchao's copies would else come after these
            for on_device, on_host in self.param_d2h_map.items():
                if not self._host_has_weights:
                    on_host.copy_(on_device)
                if on_device.grad is None:
                    self.queue.pop(on_device, None)
                else:
                    on_host.grad.copy_(on_device.grad)
            self._host_has_weights = True
            return super().step(closure)

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Load what ``state_dict`` gave; the weights are taken from the device again."""
            super().load_state_dict(state_dict)
            for group, part in self._parts():
                group.update(_settings(part))
            self._host_has_weights = False

    Offloading.__name__ = Offloading.__qualname__ = 'CPUOffloadOptimizer'
    return Offloading


def cpu_offload_optimizer(
    params: Iterable[Any],
    optimizer_class: type[Optimizer] = torch.optim.AdamW,
    minimal_size: int = 4096,
    **kwargs: Any,
) -> Optimizer:
    """torchao's optimiser that keeps its states, and a copy of the weights, in host memory.

    Args:
        params: Parameters or groups, on a GPU.
        optimizer_class: The optimiser that runs on the host.
        minimal_size: Tensors of fewer numbers stay with their state on the GPU.
        **kwargs: Settings of that optimiser, such as ``lr``.

    Raises:
        ImportError: When torchao is not installed.
        ValueError: When the parameters are on no GPU.

    Cost: no state on the GPU (AdamW: 8 bytes per parameter less); pinned host memory for weights,
    gradients and states (16 bytes per parameter). Per update each gradient goes to the host twice
    (torchao's copy within backward, and its final value after clipping and reduction), each weight
    comes back once, and the CPU does the arithmetic.

    Exact: the update is that of the optimiser on the host. Its checkpoint is torchao's own, which
    other optimisers cannot load.
    """
    params = list(params)
    groups = [{**g} for g in params] if isinstance(params[0], dict) else [{'params': params}]
    for group in groups:
        one = isinstance(group['params'], Tensor)
        group['params'] = [group['params']] if one else list(group['params'])
    trained = [p for group in groups for p in group['params'] if p.requires_grad]
    if {p.device.type for p in trained} - {'cuda', 'xpu'}:
        raise ValueError(
            "optimizer.type='CPUOffloadOptimizer' moves the state of parameters on a GPU to host "
            'memory, but these are there already; use '
            f"optimizer.type='{optimizer_class.__name__}'"
        )
    return _offload_class()(groups, optimizer_class, minimal_size=minimal_size, **kwargs)


# ------------------------------------------------------------------ descriptions


@dataclass(frozen=True)
class AdamW8bitSettings(Settings):
    """Settings of :func:`AdamW8bit`."""

    block_size: int = setting(256, help='numbers that share a scale', low=1)


@dataclass(frozen=True)
class AdamW4bitSettings(Settings):
    """Settings of :func:`AdamW4bit`."""

    block_size: int = setting(128, help='numbers that share a scale', low=1)


@dataclass(frozen=True)
class CPUOffloadOptimizerSettings(Settings):
    """Settings of :func:`cpu_offload_optimizer`."""

    optimizer_class: Any = setting('AdamW', help='the optimiser that runs on the host')
    minimal_size: int = setting(4096, help='tensors of fewer numbers stay on the GPU', low=0)


ADAMW_8BIT = Technique(
    key='adamw_8bit',
    title='AdamW with states in 8 bits',
    settings=AdamW8bitSettings,
    switch='optim_wrapper.optimizer.type=AdamW8bit',
    exactness='rounding',
    use_when="the optimiser's state does not fit",
    saves="three quarters of the optimiser's state",
    price='rounding and unrounding its averages; needs torchao',
    page='optimizer_memory.md',
)

ADAMW_4BIT = Technique(
    key='adamw_4bit',
    title='AdamW with states in 4 bits',
    settings=AdamW4bitSettings,
    switch='optim_wrapper.optimizer.type=AdamW4bit',
    exactness='rounding',
    use_when="the optimiser's state does not fit, in 8 bits either",
    saves="seven eighths of the optimiser's state",
    price='rounding and unrounding its averages; needs torchao',
    page='optimizer_memory.md',
)

OPTIMIZER_OFFLOAD = Technique(
    key='optimizer_offload',
    title='optimiser states on the host',
    settings=CPUOffloadOptimizerSettings,
    switch='optim_wrapper.optimizer.type=CPUOffloadOptimizer',
    conflicts={
        'verify_exactness': 'it moves gradients to the host inside backward; use '
        "optim_wrapper.optimizer.type='AdamW' for the time of the check"
    },
    use_when="the optimiser's state does not fit on the GPU, and host memory is free",
    saves="the optimiser's state, all of it, on the GPU",
    price='gradients to the host, weights back, and the CPU does the update; needs torchao',
    page='optimizer_memory.md',
)
