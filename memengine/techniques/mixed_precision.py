"""Mixed precision, which torch itself does.

Described here, carried out by the OptimWrapper: ``memengine/engine/optim/optim_wrapper.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from memengine.technique import Settings, Technique, setting


@dataclass(frozen=True)
class MixedPrecisionSettings(Settings):
    """Settings of precision, as ``optim_wrapper`` takes them."""

    precision: Literal['fp32', 'bf16', 'fp16', 'float32', 'bfloat16', 'float16'] = setting(
        'fp32', help='what matrix products and their like compute in'
    )
    loss_scale: Any = setting(
        'dynamic', help="for fp16: 'dynamic', a number, or arguments of GradScaler"
    )


TECHNIQUE = Technique(
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
