"""Products of matrices whose operands and result differ in type, and TF32; both vary by version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from memengine._torch_private.compiled_kernels import proven_kernels

_MATMUL = torch.backends.cuda.matmul
HAS_OUT_DTYPE = 'dtype' in torch.ops.aten.mm.overloads()
"""Whether a product's result may have another type than its operands; not in 2.6."""

_HAS_FP32_PRECISION = hasattr(_MATMUL, 'fp32_precision')  # 2.6 has `allow_tf32` for it


def default_fp32_products() -> Literal['ieee', 'tf32']:
    """How GPUs multiply matrices of fp32 as torch is set."""
    is_tf32 = _MATMUL.fp32_precision == 'tf32' if _HAS_FP32_PRECISION else _MATMUL.allow_tf32
    return 'tf32' if is_tf32 else 'ieee'


@contextmanager
def fp32_products(kind: Literal['ieee', 'tf32']) -> Iterator[None]:
    """Within, GPUs multiply matrices of fp32 as they are, or rounded to TF32, on tensor cores.

    It is a setting of the whole process: to be entered around single products.
    """
    setting, value = (
        ('fp32_precision', kind) if _HAS_FP32_PRECISION else ('allow_tf32', kind == 'tf32')
    )
    before = getattr(_MATMUL, setting)
    setattr(_MATMUL, setting, value)
    try:
        yield
    finally:
        setattr(_MATMUL, setting, before)


def half_mm(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """``left @ right`` of bf16 or fp16, summed and returned in fp32.

    One product on tensor cores, where torch has it. Elsewhere operands are cast to fp32: that holds
    their products exactly, and so does TF32 the operands. Autocast changes neither form.

    Args:
        left: [M, K].
        right: [K, N].
        out: Takes the result, [M, N] in fp32.
    """
    if HAS_OUT_DTYPE and proven_kernels(__name__, left) is not None:
        return torch.mm(left, right, torch.float32, out=out)
    return _cast_mm(left, right, out)


def _cast_mm(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    with fp32_products('tf32'):
        return torch.mm(left.float(), right.float(), out=out)


def compare_with_eager(like: Tensor) -> None:
    """Compare both forms on matrices as they are, transposed, and parts of larger ones."""
    steps = torch.arange(96 * 64, device=like.device).view(96, 64)
    left, right = (steps % 7 / 7).to(like), (steps % 11 / 11 - 0.5).to(like)
    for a, b in ((left, right.T), (left.T, right), (left[:48], right[48:].T)):
        fast, plain = (like.new_empty(len(a), b.shape[1], dtype=torch.float32) for _ in range(2))
        torch.mm(a, b, torch.float32, out=fast)
        torch.testing.assert_close(fast, _cast_mm(a, b, plain), rtol=1e-5, atol=1e-5)
