"""AdamW whose two averages are kept in 8 or 4 bits, by torchao, an optional package.

torchao does the work; here its optimisers learn to take learning rates that schedules set as
numbers, and the state of AdamW.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from memengine.suggest import import_optional
from memengine.technique import Settings, Technique, setting
from memengine.techniques.sharding.clipping import local_part

_SIGNED_STATES = {'exp_avg': True, 'exp_avg_sq': False, 'max_exp_avg_sq': False}


def in_full_precision(tensor: Tensor) -> Tensor:
    """An average of few bits as the numbers that it stands for; any other tensor as it is.

    Its codes lie in blocks of the part that a rank holds, and nothing but torchao reads them: ranks
    can neither put them together nor cut them anew.
    """
    local = local_part(tensor)
    if not type(local).__module__.startswith('torchao.optim'):
        return tensor
    coded: Any = local
    numbers: Tensor = coded.dequantize()
    if not isinstance(tensor, DTensor):
        return numbers
    mesh, placements = tensor.device_mesh, tensor.placements
    whole = DTensor.from_local(
        numbers, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return whole.to(tensor.device)  # offloaded shards are not on the mesh's device


@functools.cache
def _low_bit(name: str) -> Any:
    base: Any = getattr(import_optional('torchao.optim', f"optimizer.type='{name}'"), name)
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
                    if type(local_part(state[key])) is Tensor:
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


@dataclass(frozen=True)
class AdamW8bitSettings(Settings):
    """Settings of :func:`AdamW8bit`."""

    block_size: int = setting(256, help='numbers that share a scale', low=1)


@dataclass(frozen=True)
class AdamW4bitSettings(Settings):
    """Settings of :func:`AdamW4bit`."""

    block_size: int = setting(128, help='numbers that share a scale', low=1)


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
