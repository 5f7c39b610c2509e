"""Log-sum-exp of each row's similarities that never holds more than a tile of them.

What autograd keeps are the rows and one number for each; backward computes every tile again.

Shapes: M rows against N rows, D features; t the tile size.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from memengine.losses.gather import all_gather_rows, rows_per_rank
from memengine.losses.tiles import (
    Tile,
    choose_tile_size,
    first_derivative_only,
    grid,
    least_exponent,
    tiles,
    upper_tiles,
)

if TYPE_CHECKING:
    from memengine.losses.batch_loss import Products

__all__ = ['RunningLogSumExp', 'add_tile', 'others_logsumexp', 'softmax_slope']


def exp_of_difference(logits: Tensor, shift: Tensor, out: Tensor) -> Tensor:
    """``exp(logits - shift)``, in ``out``."""
    torch.sub(logits, shift, out=out)
    return out.clamp_min_(least_exponent(out.dtype)).exp_()


class RunningLogSumExp:
    """Running log-sum-exp of many rows: a maximum and a sum of each, so that nothing overflows."""

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self._largest = torch.full((rows,), torch.finfo(dtype).min, dtype=dtype, device=device)
        self._sum = torch.zeros_like(self._largest)

    def add(self, where: slice, logits: Tensor, dim: int, room: Tensor) -> None:
        """Take in logits whose dimension ``dim`` is summed over."""
        before = self._largest[where]
        largest = torch.maximum(before, logits.amax(dim))
        exp_of_difference(logits, largest.unsqueeze(dim), room)
        self._sum[where] = self._sum[where] * (before - largest).exp_() + room.sum(dim)
        self._largest[where] = largest

    def result(self) -> Tensor:
        """The log-sum-exp of each row; the end of the sum."""
        return self._largest + self._sum.log_()


def weighted_softmax(logits: Tensor, lse: Tensor, grad: Tensor, dim: int, out: Tensor) -> Tensor:
    """Gradient of a log-sum-exp over ``dim`` with respect to the logits: softmax times ``grad``."""
    return exp_of_difference(logits, lse.unsqueeze(dim), out).mul_(grad.unsqueeze(dim))


def add_tile(
    tile: Tile,
    by_row: RunningLogSumExp,
    by_column: RunningLogSumExp | None,
    offset: int = 0,
    without_diagonal: bool = False,
) -> Tensor:
    """Take in a tile's rows, and its columns.

    Args:
        tile: Of logits.
        by_row: Of all rows.
        by_column: Of all columns, or None.
        offset: How much further than its row the column is that makes the diagonal.
        without_diagonal: Whether it is left out.

    Returns:
        The logits on the diagonal, of the tile's ``rows_on_diagonal``.
    """
    if tile.kernels is None:
        diagonal = tile.logits.diagonal(tile.shift(offset))
        true = torch.empty_like(diagonal) if without_diagonal else diagonal.clone()
        if without_diagonal:
            diagonal.fill_(torch.finfo(diagonal.dtype).min)
        by_row.add(tile.rows, tile.logits, 1, tile.spare)
        if by_column is not None:
            by_column.add(tile.cols, tile.logits, 0, tile.logits)
        return true
    of_rows, of_columns, true = tile.kernels.softmax_sums(
        tile.left,
        tile.right,
        tile.scale,
        tile.shift(offset),
        without_diagonal,
        by_column is not None,
    )
    by_row.add(tile.rows, of_rows, 0, of_rows)
    if by_column is not None:
        by_column.add(tile.cols, of_columns, 0, of_columns)
    rows, start = tile.rows_on_diagonal(offset), tile.rows.start
    return true[rows.start - start : rows.stop - start]


def softmax_slope(
    tile: Tile,
    of_rows: tuple[Tensor, Tensor],
    of_columns: tuple[Tensor, Tensor] | None,
    offset: int = 0,
    on_diagonal: Tensor | None = None,
) -> Tensor:
    """The gradient of log-sum-exps with respect to a tile's logits: softmax times gradient.

    Args:
        tile: Of logits, which are lost.
        of_rows: Log-sum-exp of each of all rows, and its gradient.
        of_columns: The same of columns, or None to leave them out.
        offset: How much further than its row the column is that makes the diagonal.
        on_diagonal: What is subtracted there, by row; None makes it zero there.

    Returns:
        [t, t], as operand.
    """
    rows = of_rows[0][tile.rows], of_rows[1][tile.rows]
    columns = None if of_columns is None else (of_columns[0][tile.cols], of_columns[1][tile.cols])
    if tile.kernels is not None:
        less = None if on_diagonal is None else on_diagonal[tile.rows]
        return tile.kernels.softmax_slope(
            tile.left, tile.right, tile.scale, tile.shift(offset), rows, columns, less
        )
    slope = weighted_softmax(tile.logits, *rows, 1, tile.spare)
    if columns is not None:
        slope += weighted_softmax(tile.logits, *columns, 0, tile.logits)
    diagonal = slope.diagonal(tile.shift(offset))
    if on_diagonal is None:
        diagonal.zero_()
    else:
        diagonal -= on_diagonal[tile.rows_on_diagonal(offset)]
    return tile.products.narrowed(slope)


def others_logsumexp(
    z: Tensor,
    anchors: int,
    scale: Tensor | float,
    tile_size: int | str,
    products: Products,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Log-sum-exp of ``scale * z_m . z_n`` over all n but m, for the first rows m.

    Args:
        z: [N, D].
        anchors: Number M of rows to sum for, the first; all N are summed over.
        scale: Of the similarities, positive; gets its gradient.
        tile_size: Rows and columns of a tile, or ``'auto'``.
        products: How the similarities are computed, and their gradients.
        group: With ranks, the sum is over the rows of all.

    Returns:
        [M] in fp32 or wider; very negative, but finite and without gradient, for an anchor that
        has no other.

    Cost: similarity is symmetric, so each pair of anchors is met once and serves both: N²D FLOPs
    forward and 3N²D backward if all are anchors, where the untiled form needs 2N²D and 4N²D
    (a tile of each N rows is met in full). With ranks, each computes its own rows against all,
    2MND forward and 4N_local ND backward, and its gradient without another's help: on the wire
    are the rows received in forward and two numbers for each row in backward. Bytes: two tiles
    and the gradient. A second derivative is refused.
    """
    size = choose_tile_size(tile_size, len(z), z.device, products.sums)
    scale = products.scalar(scale, z.device)
    if group is None:
        return _OthersLogSumExp.apply(z, anchors, scale, size, products)
    ranks = rows_per_rank(z, group)
    return _OthersOnRanks.apply(z, anchors, scale, size, products, ranks, group)


class _OthersLogSumExp(torch.autograd.Function):
    """Each pair of anchors from one tile, which sums over its rows and over its columns."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, anchors: int, scale: Tensor, tile_size: int, products: Products
    ) -> Tensor:
        ctx.dtype, z = z.dtype, products.narrowed(z)
        total = RunningLogSumExp(anchors, products.sums, z.device)
        visits = upper_tiles(anchors, len(z), tile_size)
        for tile in tiles(z, z, scale, visits, tile_size, products):
            of_columns = total if tile.rows.start < tile.cols.start < anchors else None
            add_tile(tile, total, of_columns, without_diagonal=True)
        lse = total.result()
        ctx.save_for_backward(z, lse, scale)
        ctx.tile_size, ctx.products = tile_size, products
        return lse

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, lse, scale = ctx.saved_tensors
        anchors, products = len(lse), ctx.products
        unit = products.unit(grad)
        grad = grad / unit
        grad_z = torch.zeros(z.shape, dtype=lse.dtype, device=z.device)
        visits = upper_tiles(anchors, len(z), ctx.tile_size)
        for tile in tiles(z, z, scale, visits, ctx.tile_size, products):
            rows, cols = tile.rows, tile.cols
            of_columns = (lse, grad) if rows.start < cols.start < anchors else None
            slope = softmax_slope(tile, (lse, grad), of_columns)
            right = tile.right if products.is_half else tile.right.mul(scale)
            products.add(grad_z[rows], slope, right)
            products.add(grad_z[cols], slope.T, tile.left)
        if products.is_half:
            grad_z *= unit * scale
        grad_scale = _of_scale(z, grad_z, scale) if ctx.needs_input_grad[2] else None
        return grad_z.to(ctx.dtype), None, grad_scale, None, None


class _OthersOnRanks(torch.autograd.Function):
    """This rank's rows against all; what others have of a row's gradient is computed here too."""

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        anchors: int,
        scale: Tensor,
        tile_size: int,
        products: Products,
        ranks: list[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.dtype, z = z.dtype, products.narrowed(z)
        everything, first = all_gather_rows(z, ranks, group), sum(ranks[: dist.get_rank(group)])
        total = RunningLogSumExp(anchors, products.sums, z.device)
        visits = grid(anchors, len(everything), tile_size)
        for tile in tiles(z, everything, scale, visits, tile_size, products):
            add_tile(tile, total, None, first, without_diagonal=True)
        lse = total.result()
        ctx.save_for_backward(everything, lse, scale)
        ctx.tile_size, ctx.products = tile_size, products
        ctx.ranks, ctx.group = ranks, group
        return lse

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        everything, lse, scale = ctx.saved_tensors
        products = ctx.products
        rank = dist.get_rank(ctx.group)
        first, mine = sum(ctx.ranks[:rank]), ctx.ranks[rank]
        z = everything[first : first + mine]
        # A row that is no anchor has no softmax: exp(logit - inf) = 0.
        own = lse.new_zeros(mine, 2)
        own[:, 0] = math.inf
        own[: len(lse)] = torch.stack([lse, grad], dim=1)
        everyone = all_gather_rows(own, ctx.ranks, ctx.group)
        unit = products.unit(everyone[:, 1])
        everyone[:, 1] /= unit
        all_lse, all_grad = everyone.unbind(1)
        of_all, part = (all_lse, all_grad), slice(first, first + mine)
        of_own = all_lse[part], all_grad[part]
        grad_z = torch.zeros(z.shape, dtype=lse.dtype, device=z.device)
        visits = grid(mine, len(everything), ctx.tile_size)
        for tile in tiles(z, everything, scale, visits, ctx.tile_size, products):
            slope = softmax_slope(tile, of_own, of_all, first)
            products.add(grad_z[tile.rows], slope, tile.right)
        grad_z *= unit * scale
        grad_scale = _of_scale(z, grad_z, scale) if ctx.needs_input_grad[2] else None
        return grad_z.to(ctx.dtype), None, grad_scale, *[None] * 4


def _of_scale(z: Tensor, grad_z: Tensor, scale: Tensor) -> Tensor:
    """The scale's gradient; all is a function of ``scale * z_m . z_n``, in which z stands twice."""
    return torch.dot(z.to(grad_z.dtype).flatten(), grad_z.flatten()) / (2 * scale)
