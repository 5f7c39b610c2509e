"""The batch of all ranks on every rank, with gradient.

Shapes: N ranks, b rows of this rank (ranks may hold different numbers), B rows of all ranks.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from memengine.losses.tiles import first_derivative_only


def Gather(  # noqa: N802 (DisCo-CLIP's name)
    tensor: Tensor, process_group: dist.ProcessGroup | None = None
) -> Tensor:
    """Concatenate the ranks' tensors; backward hands each rank the sum of all ranks' gradients.

    Takes DisCo-CLIP's call. Every rank has to call it, and to run backward through it if its
    tensor requires a gradient.

    Args:
        tensor: [b, ...]; b may differ between ranks and may be 0, all else must be the same.
        process_group: The ranks; None for all of them.

    Returns:
        [B, ...] in rank order, of the same type. The tensor itself where there is one process.

    Raises:
        ValueError: On every rank, when the tensors do not fit together.

    **The gradient.** A tensor's gradient is the sum over ranks s of d loss_s / d tensor. What a
    rank's loss is decides what that sum means, and DDP then takes the mean over ranks:

    * each rank's loss is the mean over its own b rows (against all B columns), all b equal: the
      mean of the losses is the batch's loss L, the sum is N dL, and after DDP's mean the
      parameters have the gradient of one process with the whole batch;
    * each rank computes the whole L from gathered tensors: the sum is N dL, with the same end.

    So there is no factor to put in under DDP. Without DDP, where gradients of parameters are
    *summed* over ranks, divide the loss by N. Others that gather promise other things:

    ====================================  ======================  =================================
    gather                                gradient of a tensor    under DDP's mean
    ====================================  ======================  =================================
    this one                              sum over ranks          right in both cases
    open_clip with ``gather_with_grad``   sum over ranks          right in both cases
    lightly's ``GatherLayer``             sum over ranks          right in both cases
    DisCo-CLIP's ``Gather``               mean over ranks         1/N of it in both cases
    mmpretrain's ``GatherLayer``          this rank's part alone  1/N of it if each rank computes
                                                                  the whole L, else wrong
    ====================================  ======================  =================================

    To repeat a run of DisCo-CLIP to the digit, divide the loss by N.

    Cost: B rows here and as many of gradient; on the wire per rank B - b rows received in
    forward and (N - 1) b in backward, and before that two numbers of each rank, which tell a
    mismatch from a hang. A rank with fewer rows than another sends as many as that one. The
    incoming gradient is never edited, and may be expanded or otherwise strided.

    Precision: rows travel in their own type; sums of half-precision gradients are rounded once.
    A second derivative is refused.

    Source: Chen et al., DisCo-CLIP: A Distributed Contrastive Loss for Memory Efficient CLIP
    Training (2023).
    """
    if not dist.is_initialized() or dist.get_world_size(process_group) == 1:
        return tensor
    rows = rows_per_rank(tensor, process_group)
    return _Gather.apply(tensor, rows, process_group)


_host_groups: dict[Any, Any] = {}  # by group, one of gloo with the same ranks


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, rows: list[int], group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.rows, ctx.group = rows, group
        return all_gather_rows(tensor, rows, group)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return sum_to_owners(grad, ctx.rows, ctx.group), None, None


def rows_per_rank(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[int]:
    """How many rows each rank holds; raises on every rank alike if the rest does not fit.

    Raises:
        ValueError: For a tensor without dimensions, and ranks that differ in anything but the
            number of rows: other dimensions, type, whether a gradient is required.
    """
    kind = f'{tensor.dtype} requires_grad={needs_grad(tensor)}'
    count = tensor.shape[0] if tensor.dim() else -1
    said = f'{tuple(tensor.shape)} {kind}'
    rows, differing = compare_ranks(
        count, f'{tuple(tensor.shape[1:])} {kind}', said, tensor.device, group
    )
    if min(rows) < 0 or differing:
        raise ValueError(
            'Gather: the ranks must hold tensors [b, ...] that differ in b at most, got '
            + by_rank(differing or [said] * len(rows))
        )
    return rows


def needs_grad(tensor: Tensor) -> bool:
    """Whether what is computed from a tensor now will be differentiated."""
    return tensor.requires_grad and torch.is_grad_enabled()


def compare_ranks(
    number: int, kind: str, said: str, device: torch.device, group: dist.ProcessGroup | None = None
) -> tuple[list[int], list[str]]:
    """Every rank's number, and, if they are not all of one kind, what every rank says of its own.

    Two numbers of each rank are on the wire, and text only if kinds differ. The host needs them:
    but for the first time they go over gloo, so that it does not wait for what a device computes.

    Args:
        number: This rank's.
        kind: What has to be the same on all ranks.
        said: This rank's part of a message about ranks that differ.
        device: Where collectives of the group take place.
        group: The ranks.
    """
    world_size, among = dist.get_world_size(group), group or dist.group.WORLD
    told_by = among if device.type == 'cpu' else _host_groups.get(among)
    if told_by is not None:
        device = torch.device('cpu')
    headers = torch.empty(world_size * 2, dtype=torch.int64, device=device)
    mine = torch.tensor([number, zlib.crc32(kind.encode())], dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(headers, mine, group=told_by or among)
    numbers, digests = headers.view(world_size, 2).T.tolist()
    if told_by is None:  # all ranks have come here, so none waits for another in making it
        members = dist.get_process_group_ranks(among)
        _host_groups[among] = dist.new_group(
            members, backend='gloo', use_local_synchronization=True
        )
    if len(set(digests)) == 1:
        return numbers, []
    seen: list[Any] = [None] * world_size
    dist.all_gather_object(seen, said, group=group)
    return numbers, seen


def by_rank(texts: list[str], speaking: list[int] | None = None) -> str:
    """What each rank says, or each to whose number a 1 belongs, in one sentence."""
    chosen = speaking or [1] * len(texts)
    return '; '.join(f'{text} on rank {rank}' for rank, text in enumerate(texts) if chosen[rank])


def all_gather_rows(
    tensor: Tensor, rows: list[int], group: dist.ProcessGroup | None = None
) -> Tensor:
    """[b, ...] of each rank to [B, ...] on all, without graph.

    Args:
        tensor: This rank's rows.
        rows: How many rows each rank holds.
        group: The ranks.
    """
    tensor, most = tensor.detach().contiguous(), max(rows)
    if len(tensor) < most:
        padding = tensor.new_zeros(most - len(tensor), *tensor.shape[1:])
        tensor = torch.cat([tensor, padding])
    gathered = tensor.new_empty(len(rows) * most, *tensor.shape[1:])
    dist.all_gather_into_tensor(gathered, tensor, group=group)
    if min(rows) == most:
        return gathered
    return torch.cat([part[:count] for part, count in zip(gathered.split(most), rows, strict=True)])


def sum_to_owners(
    tensor: Tensor, rows: list[int], group: dist.ProcessGroup | None = None
) -> Tensor:
    """[B, ...] of each rank, added up, to the rank that owns the rows: [b, ...], without graph.

    Args:
        tensor: One summand of every rank's rows; it is not edited.
        rows: How many rows each rank owns.
        group: The ranks.
    """
    mine = rows[dist.get_rank(group)]
    summands = tensor.new_empty(len(rows) * mine, *tensor.shape[1:])
    dist.all_to_all_single(
        summands, tensor.detach().contiguous(), [mine] * len(rows), rows, group=group
    )
    return summands.view(len(rows), mine, *tensor.shape[1:]).sum(0)
