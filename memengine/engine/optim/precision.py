"""Precision of a step: autocast and, for fp16, the gradient scaler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from memengine.techniques.technique import Settings, Technique, register, setting

__all__ = ['Precision']

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
