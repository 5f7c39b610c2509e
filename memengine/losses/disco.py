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

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memengine.losses.gather import Gather, by_rank, compare_ranks, needs_grad, rows_per_rank
from memengine.losses.logsumexp import others_logsumexp
from memengine.losses.precision import (
    Precision,
    Products,
    check_precision,
    scaled_product,
)
from memengine.losses.tiles import check_tile_size, first_derivative_only
from memengine.technique import Settings, Technique

__all__ = [
    'BatchLoss',
    'at_least_fp32',
    'combine_logsumexp',
    'log_partition',
    'mean_over_ranks',
    'own_rows',
    'ranks_of',
    'sum_over_ranks',
]


class BatchLoss(nn.Module):
    """What the contrastive losses share.

    Args:
        tile_size: How many rows and columns of the similarities are held at a time. None: all of
            them, kept for backward, as is fastest for small batches. ``'auto'``: as many as suit
            the device (:func:`~memengine.losses.tiles.choose_tile_size`).
        precision: The type in which embeddings are multiplied; results are summed in fp32 or wider.
            ``'auto'``: half-precision embeddings as they are, all others in fp32 or wider, as torch
            is set. ``'bf16'`` or ``'fp16'``: rounded to it, as suits embeddings that autocast's
            normalisation returned in fp32. ``'fp32'``: in fp32 or wider, on GPUs without TF32.
            ``'tf32'``: fp32 ones in TF32 on GPUs.

    Attributes:
        process_group: The ranks whose rows are one batch, see this module; None for this process.
    """

    def __init__(self, tile_size: int | str | None = None, precision: Precision = 'auto') -> None:
        super().__init__()
        check_tile_size(tile_size)
        check_precision(precision)
        self.tile_size = tile_size
        self.precision = precision
        self.process_group: dist.ProcessGroup | None = None

    @contextmanager
    def checked_by_all(self, embeddings: Tensor, *others: Any, **settings: Any) -> Iterator[None]:
        """Within, a rank checks what it was given; if one raises ValueError, all ranks do.

        Otherwise the others would wait for it in the first exchange.

        Args:
            embeddings: This rank's.
            *others: What else the loss is of. Each needs a gradient on all ranks or on none.
            **settings: What else has to be the same on all ranks.

        Raises:
            ValueError: On every rank, when a check failed on one, or when ranks differ.

        On the wire are two numbers of each rank.
        """
        group = ranks_of(self.process_group)
        if group is None:
            yield
            return
        problem: ValueError | None = None
        try:
            yield
        except ValueError as error:
            problem = error
        learned = [isinstance(x, Tensor) and needs_grad(x) for x in (embeddings, *others)]
        settings |= {'tiled': self.tile_size is not None, 'precision': self.precision}
        settings |= {'require gradients': learned}
        said = ', '.join(f'{name}: {value}' for name, value in settings.items())
        kind = str(problem) if problem else said
        refused, differing = compare_ranks(bool(problem), kind, kind, embeddings.device, group)
        if any(refused) and differing:
            raise ValueError(f'refused on all ranks: {by_rank(differing, refused)}') from problem
        if differing:
            raise ValueError(
                f'{type(self).__name__}: the ranks must call it alike, got {by_rank(differing)}'
            )
        if problem is not None:
            raise problem


def at_least_fp32(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in one common type, which is fp32 or wider.

    Returns:
        The same tensors when nothing is to be cast; gradients come back in the original types.
    """
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)


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
    return tensor if group is None else _SumOverRanks.apply(tensor, group)


def mean_over_ranks(losses: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The mean of the rows [b] of all ranks. Scalar."""
    if group is None:
        return losses.mean()
    count = sum_over_ranks(losses.new_full((), float(len(losses))), group)
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


def log_partition(
    contrasts: Tensor,
    anchors: int,
    temperature: float,
    products: Products,
    tile_size: int | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """``log sum_{n != m} exp(c_m . c_n / temperature)``: each anchor against all but itself.

    Args:
        contrasts: [N, D], beginning with the anchors.
        anchors: Their number M.
        temperature: Positive.
        products: How the similarities are computed, and their gradients.
        tile_size: None for the reference, else see
            :func:`~memengine.losses.logsumexp.others_logsumexp`.
        group: Ranks whose contrasts are all met.

    Returns:
        [M]; very negative, but finite and without gradient, for an anchor with no contrast.
    """
    if tile_size is not None:
        return others_logsumexp(contrasts, anchors, 1 / temperature, tile_size, products, group)
    first = own_rows(contrasts, group).start
    everything = contrasts if group is None else Gather(contrasts, group)
    if products.is_plain:
        logits = (contrasts[:anchors] / temperature) @ everything.T  # [M, N]
    else:
        logits = scaled_product(contrasts[:anchors], everything.T, 1 / temperature, products)
    logits.diagonal(first).fill_(torch.finfo(logits.dtype).min)
    return logits.logsumexp(dim=1)


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
