"""The loss of SigLIP: every image-text pair is a binary classification of its own.

Shapes: B image-text pairs, D features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import softplus

from memengine.losses.batch_loss import BatchLoss, Products, mean_over_ranks, own_rows, ranks_of
from memengine.losses.clip import check_towers, pairwise_gradients, pairwise_logits
from memengine.losses.gather import Gather, all_gather_rows, rows_per_rank
from memengine.losses.tiles import (
    Tile,
    choose_tile_size,
    first_derivative_only,
    grid,
    least_exponent,
    tiles,
)

__all__ = ['SigLipLoss', 'tiled_losses', 'untiled_losses']


def untiled_losses(
    a: Tensor,
    b: Tensor,
    scale: Tensor | float,
    bias: Tensor | float,
    products: Products,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The reference of :func:`tiled_losses`."""
    first = own_rows(b, group).start
    if group is not None:
        b = Gather(b, group)
    margins = (pairwise_logits(a, b, scale, products) + bias).neg()
    margins.diagonal(first).neg_()
    return -F.logsigmoid(margins).sum(dim=1)


def tiled_losses(
    a: Tensor,
    b: Tensor,
    scale: Tensor | float,
    bias: Tensor | float,
    tile_size: int | str,
    products: Products,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """``sum_n log(1 + exp(-z_mn * (scale * a_m . b_n + bias)))``, z_mn = 1 for m = n and else -1.

    Args:
        a: [M, D].
        b: [M, D].
        scale: Scalar; gets its gradient, as ``bias`` does.
        bias: Scalar.
        tile_size: Rows and columns of a tile, or ``'auto'``.
        products: How the similarities are computed, and their gradients.
        group: With ranks, the sum is over all ranks' ``b``.

    Returns:
        [M] in fp32 or wider.

    With ranks, the gradient of ``a`` is complete on its rank, and that of ``b`` is summed.
    """
    scale, bias = (products.scalar(value, a.device) for value in (scale, bias))
    ranks = None if group is None else rows_per_rank(b, group)
    size = choose_tile_size(tile_size, len(a), a.device, products.sums)
    return _TiledLosses.apply(a, b, scale, bias, size, products, ranks, group)


def negated_agreement(tile: Tile, bias: Tensor, first: int) -> Tensor:
    """``-z * (logits + bias)``, in place of the tile's logits."""
    wrong = tile.logits.add_(bias)
    wrong.diagonal(tile.shift(first)).neg_()
    return wrong.clamp_min_(least_exponent(wrong.dtype))


def sigmoid_sums(tile: Tile, bias: Tensor, first: int) -> Tensor:
    """The losses of a tile's pairs, summed by row, [t]."""
    if tile.kernels is not None:
        operands = tile.left, tile.right, tile.scale, bias
        return tile.kernels.sigmoid_sums(*operands, tile.shift(first)).sum(dim=0)
    softplus(negated_agreement(tile, bias, first), 1, 40, out=tile.spare)  # type: ignore[call-arg]
    return tile.spare.sum(dim=1)


def sigmoid_slope(tile: Tile, bias: Tensor, first: int, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of :func:`sigmoid_sums` with respect to the logits, as operand, and its sum.

    Args:
        tile: Of logits, which are lost.
        bias: Scalar.
        first: How much further than its row the column is that is its own.
        grad: Of each of all rows' sums.
    """
    if tile.kernels is not None:
        operands = tile.left, tile.right, tile.scale, bias
        return tile.kernels.sigmoid_slope(*operands, tile.shift(first), grad[tile.rows])
    slope = negated_agreement(tile, bias, first).sigmoid_()
    slope *= grad[tile.rows].unsqueeze(1)
    slope.diagonal(tile.shift(first)).neg_()
    return tile.products.narrowed(slope), slope.sum()


class _TiledLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        scale: Tensor,
        bias: Tensor,
        tile_size: int,
        products: Products,
        ranks: list[int] | None,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.dtypes = a.dtype, b.dtype
        a, b, first = products.narrowed(a), products.narrowed(b), 0
        if ranks is not None:
            b, first = all_gather_rows(b, ranks, group), sum(ranks[: dist.get_rank(group)])
        ctx.save_for_backward(a, b, scale, bias)
        ctx.first, ctx.tile_size, ctx.products = first, tile_size, products
        ctx.ranks, ctx.group = ranks, group
        losses = torch.zeros(len(a), dtype=scale.dtype, device=a.device)
        visits = grid(len(a), len(b), tile_size)
        for tile in tiles(a, b, scale, visits, tile_size, products):
            losses[tile.rows] += sigmoid_sums(tile, bias, first)
        return losses

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, scale, bias = ctx.saved_tensors
        unit = ctx.products.unit(grad)
        grad = grad / unit
        grad_bias = torch.zeros_like(bias)

        def slope_of(tile: Tile) -> Tensor:
            slope, total = sigmoid_slope(tile, bias, ctx.first, grad)
            grad_bias.add_(total)
            return slope

        gradients = pairwise_gradients(ctx, a, b, scale, unit, slope_of)
        return *gradients, grad_bias * unit if ctx.needs_input_grad[3] else None, *[None] * 4


class SigLipLoss(BatchLoss):
    """Pairwise sigmoid loss between paired images and texts.

    Takes open_clip's call.

    Args:
        tile_size: See :class:`~memengine.losses.batch_loss.BatchLoss`, also for the loss over
            several ranks.
        precision: See there, too.

    Cost: untiled 2B²D FLOPs forward and 4B²D backward; autograd keeps the [B, B] margins, on CPU
    also their exponentials. In tiles, and on ranks, as
    :class:`~memengine.losses.clip.ClipLoss`.

    Half-precision features are multiplied as they are and all else is fp32, also under autocast.

    Source: Zhai et al., Sigmoid Loss for Language Image Pre-Training (2023).
    """

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The batch's loss.

        Args:
            image_features: [B, D], as a rule l2-normalised.
            text_features: [B, D], row i belongs to image i.
            logit_scale: Scalar factor of the similarities, already exponentiated; gets its
                gradient.
            logit_bias: Scalar added to every logit (about -10 at the start of training); gets
                its gradient.
            output_dict: Return ``{'contrastive_loss': loss}`` instead.

        Returns:
            Scalar, in fp32 or wider: the sum over all pairs divided by B.

        Raises:
            ValueError: For other shapes; with ranks on all of them, also if only one has others.
        """
        bias = 0.0 if logit_bias is None else logit_bias
        with self.checked_by_all(image_features, text_features, logit_scale, bias):
            check_towers('SigLipLoss', image_features, text_features)
        group = ranks_of(self.process_group)
        with torch.autocast(image_features.device.type, enabled=False):
            towers = image_features, text_features
            products = Products.of(self.precision, *towers)
            if self.tile_size is None:
                losses = untiled_losses(*towers, logit_scale, bias, products, group)
            else:
                losses = tiled_losses(*towers, logit_scale, bias, self.tile_size, products, group)
            loss = mean_over_ranks(losses, group)
        return {'contrastive_loss': loss} if output_dict else loss
