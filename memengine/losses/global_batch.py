"""A loss over the batch of all ranks, of which each rank holds its rows.

Every contrastive loss here is a module with an attribute ``process_group``. None, as it is made:
the loss is that of this process's own batch. Set to a group of ranks (whoever wraps a model sets it
on each of its modules that has the attribute), the loss is that of all their rows together:

* each rank gives its own rows, of which ranks may hold different numbers, and its own labels;
* each rank's loss is the loss of the whole batch;
* backward, which every rank has to run, gives each rank the gradient of the *sum of all ranks'
  losses* with respect to what it holds. All being the same loss L, that is N dL for its rows, and
  for the scale and the bias N times its share of dL, with N ranks.

DDP's mean over ranks then makes the parameters' gradients exactly those of one process with the
whole batch, those of a learned scale among them. It is the contract of
:func:`~memengine.losses.gather.Gather`, and there is no factor to put in under DDP; without DDP,
where gradients of parameters are *summed* over ranks, divide the loss by N.

Shapes: N ranks, b rows of this rank, B rows of all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from memengine.losses.gather import rows_per_rank
from memengine.losses.tiles import check_tile_size

__all__ = [
    'BatchLoss',
    'own_rows',
    'combine_logsumexp',
    'mean_over_ranks',
    'ranks_of',
    'sum_over_ranks',
]


class BatchLoss(nn.Module):
    """What the contrastive losses share.

    Args:
        tile_size: How many rows and columns of the similarities are held at a time. None: all of
            them, kept for backward, as is fastest for small batches. ``'auto'``: as many as suit
            the device (:func:`~memengine.losses.tiles.choose_tile_size`).

    Attributes:
        process_group: The ranks whose rows are one batch, see this module; None for this process.
    """

    def __init__(self, tile_size: int | str | None = None) -> None:
        super().__init__()
        check_tile_size(tile_size)
        self.tile_size = tile_size
        self.process_group: dist.ProcessGroup | None = None


def ranks_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group, or None where it is one process."""
    if group is None or dist.get_world_size(group) == 1:
        return None
    return group


def own_rows(tensor: Tensor, group: dist.ProcessGroup | None) -> slice:
    """Where this rank's rows stand among those of all."""
    if group is None:
        return slice(0, len(tensor))
    start = sum(rows_per_rank(tensor, group)[: dist.get_rank(group)])
    return slice(start, start + len(tensor))


def sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum of all ranks' tensors; its gradient is the sum of all ranks' gradients."""
    return tensor if group is None else _Sum.apply(tensor, group)


def mean_over_ranks(losses: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The mean of the rows [b] of all ranks. Scalar."""
    if group is None:
        return losses.mean()
    count = sum_over_ranks(losses.new_tensor(float(len(losses))), group)
    return sum_over_ranks(losses.sum(), group) / count


def combine_logsumexp(partial: Tensor, rows: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Log-sum-exp of each of B columns over one rank's rows, to that over all: own columns [b].

    Args:
        partial: [B], this rank's.
        rows: How many columns each rank owns.
        group: The ranks.
    """
    mine = rows[dist.get_rank(group)]
    received = partial.new_empty(len(rows) * mine)
    dist.all_to_all_single(received, partial, [mine] * len(rows), rows, group=group)
    return received.view(len(rows), mine).logsumexp(dim=0)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
