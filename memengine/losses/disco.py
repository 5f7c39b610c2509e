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
from torch import Tensor

from memengine.losses.tiles import first_derivative_only
from memengine.technique import Settings, Technique

__all__ = ['combine_logsumexp', 'sum_over_ranks']


def sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum of all ranks' tensors; its gradient is the sum of all ranks' gradients."""
    return tensor if group is None else _SumOverRanks.apply(tensor, group)


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


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


TECHNIQUE = Technique(
    key='disco',
    title='contrastive losses over ranks (DisCo)',
    settings=Settings,
    switch='model_wrapper_cfg.type=DisCoDistributedDataParallel',
    loss='coupled',
    needs_ranks=True,
    use_when='samples meet in the loss, and there are several ranks, which follow one process '
    'with the whole batch',
    saves='of the similarities, and of their FLOPs, all but 1/N on each rank',
    price='the embeddings of one side on the wire, and their gradients',
    page='disco.md',
)
