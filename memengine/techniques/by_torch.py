"""What torch itself does to spend less memory: described here, switched on by the engine."""

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


MIXED_PRECISION = Technique(
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

DATA_PARALLEL = Technique(
    key='data_parallel',
    title='data parallel',
    settings=Settings,
    switch='model_wrapper_cfg.type=MMDistributedDataParallel',
    needs_ranks=True,
    use_when='there are several ranks, each of which holds the model; what ranks do by default',
    saves="activations: all but those of a rank's part of the batch",
    price='gradients on the wire, once a step',
    page='../launching.md',
)
