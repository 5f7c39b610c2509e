"""Fused attention run again for its log-sum-exp, which only private operators return.

Tried on torch 2.6 to 2.15. An operation that is not in the table keeps what it saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
"""Takes the gradient, queries, keys, values, output and log-sum-exp."""


def _for_cpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **settings: Any
) -> tuple[Tensor, ...]:
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attend(q, k, v, attn_mask=mask, **settings)


def _flash(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> tuple[Tensor, ...]:
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, **settings)


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **settings: Any
) -> tuple[Tensor, ...]:
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    return attend(q, k, v, mask, compute_log_sumexp=True, **settings)


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **settings: Any
) -> tuple[Tensor, ...]:
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    return attend(q, k, v, mask, compute_log_sumexp=True, **settings)


class FusedAttention(NamedTuple):
    """What a node of it has saved in which field, and how to run it again.

    Attributes:
        log_sum: The field of the sums' logarithm.
        mask: That of a mask to add; None where there is none.
        attend: From queries, keys, values [B, heads, tokens, D] and the mask, if there is one,
            with ``is_causal`` and ``scale`` as they are saved, to output and logarithm, and more.
    """

    log_sum: str
    mask: str | None
    attend: Callable[..., tuple[Tensor, ...]]


FUSED_ATTENTION: Mapping[str, FusedAttention] = {  # by the name of autograd's node
    'ScaledDotProductFlashAttentionForCpu': FusedAttention('logsumexp', 'attn_mask', _for_cpu),
    'ScaledDotProductFlashAttention': FusedAttention('logsumexp', None, _flash),
    'ScaledDotProductEfficientAttention': FusedAttention('log_sumexp', 'attn_bias', _efficient),
    'ScaledDotProductCudnnAttention': FusedAttention('logsumexp', 'attn_bias', _cudnn),
}
