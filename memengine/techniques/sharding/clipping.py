"""Clipping of gradients that may be spread over ranks, by the norms that one process would find.

A sharded parameter's gradient is a DTensor of which a rank holds a part, and a scalar's is a plain
tensor that all ranks hold. Norms are taken of what is there and added up in one all-reduce.

Shapes: P gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memengine._torch_private.ops import foreach_mul_, foreach_norm


def _gradients(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    return [p.grad for p in parameters if p.grad is not None]


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def grad_norms(grads: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """Norm of each gradient as a whole, [P], the same on all ranks.

    Args:
        grads: Plain tensors, or DTensors that are sharded over one dimension of their mesh (and
            replicated over the others), as ``fully_shard`` makes them.
        norm_type: p of the p-norm; may be infinite.

    Cost: one all-reduce of P numbers where any of them is sharded.
    """
    local = [local_part(grad) for grad in grads]
    local = [part.coalesce().values() if part.is_sparse else part for part in local]
    device = local[0].device
    filled = [part for part in local if part.numel()]
    held = iter(foreach_norm(filled, norm_type) if filled else ())
    norms = torch.stack(
        [next(held).to(device) if part.numel() else part.new_zeros(()).to(device) for part in local]
    )
    is_sharded = [isinstance(grad, DTensor) for grad in grads]
    if not any(is_sharded):
        return norms
    (mesh, axis) = next(_shard_axis(grad) for grad in grads if isinstance(grad, DTensor))
    parts = (norms if math.isinf(norm_type) else norms**norm_type).to(mesh.device_type)
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    dist.all_reduce(parts, op, group=mesh.get_group(axis))
    whole = parts.to(device) if math.isinf(norm_type) else parts.to(device) ** (1 / norm_type)
    return torch.where(torch.tensor(is_sharded, device=device), whole, norms)


def _shard_axis(grad: DTensor) -> tuple[Any, int]:
    """The mesh of a sharded gradient and the dimension of it that holds the shards."""
    axes = [axis for axis, placed in enumerate(grad.placements) if placed.is_shard()]
    assert len(axes) == 1, f'expected one sharded dimension, got {grad.placements}'
    return grad.device_mesh, axes[0]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    norms: Tensor | None = None,
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for parameters of which some may be sharded.

    Args:
        parameters: Plain and sharded parameters, in any mixture.
        max_norm: Largest norm of all gradients together, over all ranks.
        norm_type: p of the p-norm; may be infinite.
        error_if_nonfinite: Whether a norm that is no number is an error.
        foreach: For plain parameters, as in torch.
        norms: Those of :func:`grad_norms`, [P], if they are known already.

    Returns:
        The norm before clipping, a plain scalar, the same on all ranks.

    Raises:
        RuntimeError: For a norm that is no number, if asked for.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = _gradients(parameters)
    is_plain = not any(isinstance(grad, DTensor) for grad in grads)
    if is_plain and norms is None:
        return nn.utils.clip_grad_norm_(
            parameters, max_norm, norm_type, error_if_nonfinite, foreach
        )
    norms = grad_norms(grads, norm_type) if norms is None else norms
    total = torch.linalg.vector_norm(norms, norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f'the norm of the gradients is {total.item()}, so they cannot be clipped'
        )
    if is_plain:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total, foreach)
        return total
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for part in map(local_part, grads):
        part.mul_(scale.to(part.device))
    return total


@torch.no_grad()
def clip_each_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norms: Tensor | None = None
) -> Tensor:
    """Scale every parameter's gradient on its own to a norm of at most ``max_norm``.

    This is the clipping of DINO's training script; :func:`clip_grad_norm_` scales all gradients
    by one factor instead. Sharded parameters are clipped by the norm of the whole gradient;
    ``norms`` [P] are those of :func:`grad_norms`, if they are known already.

    Returns:
        Norm of all gradients together before clipping, scalar.
    """
    grads = _gradients(parameters)
    norms = grad_norms(grads) if norms is None else norms
    scales = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    local = [local_part(grad) for grad in grads]
    foreach_mul_(local, [s.to(part.device) for s, part in zip(scales, local, strict=True)])
    return torch.linalg.vector_norm(norms)


@torch.no_grad()
def clip_grad_value_(
    parameters: Tensor | Iterable[Tensor],
    clip_value: float,
    foreach: bool | None = None,
    norms: Tensor | None = None,
) -> None:
    """``torch.nn.utils.clip_grad_value_`` for parameters of which some may be sharded.

    ``norms`` are of no use here, and taken as the others take them.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = _gradients(parameters)
    if not any(isinstance(grad, DTensor) for grad in grads):
        nn.utils.clip_grad_value_(parameters, clip_value, foreach)
        return
    for part in map(local_part, grads):
        part.clamp_(-clip_value, clip_value)
