"""The loss of CLIP: image-text contrast in both directions.

Shapes: B image-text pairs, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from memengine.losses.batch_loss import (
    BatchLoss,
    Products,
    mean_over_ranks,
    own_rows,
    ranks_of,
    scaled_product,
)
from memengine.losses.disco import combine_logsumexp
from memengine.losses.gather import Gather, all_gather_rows, rows_per_rank, sum_to_owners
from memengine.losses.logsumexp import RunningLogSumExp, add_tile, softmax_slope
from memengine.losses.tiles import Tile, choose_tile_size, first_derivative_only, grid, tiles


def check_towers(name: str, image_features: Tensor, text_features: Tensor) -> None:
    """Raise ValueError unless both are [B, D] of the same pairs, B > 0."""
    shapes = tuple(image_features.shape), tuple(text_features.shape)
    if image_features.dim() != 2 or shapes[0] != shapes[1] or image_features.numel() == 0:
        raise ValueError(
            f'{name}: expected image_features and text_features [B, D] of the same pairs, '
            f'got {shapes[0]} and {shapes[1]}'
        )


def pairwise_logits(
    images: Tensor, texts: Tensor, scale: Tensor | float, products: Products
) -> Tensor:
    """``scale * image . text`` of all pairs, [B, B] in fp32 or wider, images in rows."""
    if not products.is_plain:
        return scaled_product(images, texts.T, scale, products)
    images, texts = images.to(products.sums), texts.to(products.sums)
    return (scale * images).to(images.dtype) @ texts.T


def untiled_losses(
    images: Tensor,
    texts: Tensor,
    scale: Tensor | float,
    products: Products,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The reference of :func:`tiled_losses`."""
    if group is None:
        logits = pairwise_logits(images, texts, scale, products)
        by_column, true = logits.logsumexp(dim=0), logits.diagonal()
    else:
        own = own_rows(texts, group)
        logits = pairwise_logits(images, Gather(texts, group), scale, products)  # [b, B]
        partial = Gather(logits.logsumexp(dim=0)[None], group)  # [N, B]
        by_column, true = partial[:, own].logsumexp(dim=0), logits.diagonal(own.start)
    return (logits.logsumexp(dim=1) + by_column) / 2 - true


def tiled_losses(
    images: Tensor,
    texts: Tensor,
    scale: Tensor | float,
    tile_size: int | str,
    products: Products,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Loss of each pair: the mean of the cross-entropies of its row and of its column.

    Args:
        images: [B, D].
        texts: [B, D].
        scale: Scalar; gets its gradient.
        tile_size: Rows and columns of a tile, or ``'auto'``.
        products: How the similarities are computed, and their gradients.
        group: With ranks, rows are this rank's images against all texts, and columns its texts
            against all images.

    Returns:
        [B] in fp32 or wider.

    Each tile of logits serves its rows and its columns. With ranks, the columns' sums over one
    rank's rows go to the owners of the columns, and these sums and the upstream gradients come
    back in backward; then the gradient of the images is complete, and that of the texts is summed.
    """
    scale = products.scalar(scale, images.device)
    ranks = None if group is None else rows_per_rank(texts, group)
    size = choose_tile_size(tile_size, len(images), images.device, products.sums)
    return _TiledLosses.apply(images, texts, scale, size, products, ranks, group)


def pairwise_gradients(
    ctx: Any,
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    unit: Tensor,
    slope_of: Callable[[Tile], Tensor],
) -> tuple[Tensor | None, ...]:
    """Gradients of two towers' rows and of the scale, from those of the logits, tile by tile.

    Args:
        ctx: Of a Function of ``a``, ``b`` and ``scale``, with ``dtypes`` of the first two,
            ``tile_size``, ``products``, ``ranks`` and ``group``.
        a: [M, D].
        b: [N, D]; with ranks those of all, whose gradients go back to their owners.
        scale: Scalar.
        unit: Of the gradients of logits; scalar.
        slope_of: The gradient with respect to a tile's logits, in that unit, as operand.
    """
    products = ctx.products
    for_a, for_b, for_scale = ctx.needs_input_grad[:3]
    grad_a, grad_b = (x.new_zeros(x.shape, dtype=scale.dtype) for x in (a, b))
    visits = grid(len(a), len(b), ctx.tile_size)
    for tile in tiles(a, b, scale, visits, ctx.tile_size, products):
        slope = slope_of(tile)
        if for_a or for_scale:
            products.add(grad_a[tile.rows], slope, tile.right)
        if for_b:
            products.add(grad_b[tile.cols], slope.T, tile.left)
    grad_scale = unit * torch.stack([(a[rows] * grad_a[rows]).sum() for rows, _ in visits]).sum()
    if products.is_half:
        grad_b *= unit * scale
    if ctx.ranks is not None and for_b:
        grad_b = sum_to_owners(grad_b, ctx.ranks, ctx.group)
    gradients = grad_a.mul_(unit * scale).to(ctx.dtypes[0]), grad_b.to(ctx.dtypes[1]), grad_scale
    needed = zip(gradients, ctx.needs_input_grad[:3], strict=True)
    return tuple(gradient if need else None for gradient, need in needed)


class _TiledLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        texts: Tensor,
        scale: Tensor,
        tile_size: int,
        products: Products,
        ranks: list[int] | None,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.dtypes = images.dtype, texts.dtype
        images, texts, first = products.narrowed(images), products.narrowed(texts), 0
        if ranks is not None:
            texts, first = all_gather_rows(texts, ranks, group), sum(ranks[: dist.get_rank(group)])
        by_row = RunningLogSumExp(len(images), scale.dtype, scale.device)
        by_column = RunningLogSumExp(len(texts), scale.dtype, scale.device)
        true = torch.empty(len(images), dtype=scale.dtype, device=scale.device)
        visits = grid(len(images), len(texts), tile_size)
        for tile in tiles(images, texts, scale, visits, tile_size, products):
            true[tile.rows_on_diagonal(first)] = add_tile(tile, by_row, by_column, first)
        row_lse, col_lse = by_row.result(), by_column.result()
        if ranks is not None:
            col_lse = combine_logsumexp(col_lse, ranks, group)
        ctx.save_for_backward(images, texts, scale, row_lse, col_lse)
        ctx.first, ctx.tile_size, ctx.products = first, tile_size, products
        ctx.ranks, ctx.group = ranks, group
        return (row_lse + col_lse).div_(2).sub_(true)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        images, texts, scale, row_lse, col_lse = ctx.saved_tensors
        half = of_columns = grad / 2
        if ctx.ranks is not None:
            of_columns = torch.stack([col_lse, half], dim=1)
            col_lse, of_columns = all_gather_rows(of_columns, ctx.ranks, ctx.group).unbind(1)
        unit = ctx.products.unit(torch.cat([grad, of_columns]))
        of_rows, of_all, true = (row_lse, half / unit), (col_lse, of_columns / unit), grad / unit

        def slope_of(tile: Tile) -> Tensor:
            return softmax_slope(tile, of_rows, of_all, ctx.first, true)

        return *pairwise_gradients(ctx, images, texts, scale, unit, slope_of), *[None] * 4


class ClipLoss(BatchLoss):
    """Symmetric InfoNCE between paired images and texts.

    Takes open_clip's call. One matrix of similarities serves both directions: its rows are images
    choosing a text, its columns texts choosing an image.

    Args:
        tile_size: See :class:`~memengine.losses.batch_loss.BatchLoss`, also for the loss over
            several ranks.
        precision: See there, too.

    Cost: untiled 2B²D FLOPs forward and 4B²D backward, and autograd keeps one [B, B] matrix (4B²
    bytes). In tiles 2B²D and 6B²D; beside the features and their gradients, two tiles and a few
    numbers per row. On N ranks 1/N of these FLOPs on each, which holds all texts and their
    gradients; on the wire per rank are the texts it has not, and as many rows of gradient.

    Half-precision features are multiplied as they are and all else is fp32, also under autocast;
    right at any scale (a temperature of 0.01 is a scale of 100).

    Source: Radford et al., Learning Transferable Visual Models (2021), figure 3; over ranks Chen
    et al., DisCo-CLIP (2023), here with one product for both directions.
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
            logit_scale: Scalar factor of the similarities, already exponentiated
                (``model.logit_scale.exp()``); gets its gradient.
            logit_bias: Added to every logit, which changes neither softmax: taken because
                open_clip's models hand it over, and of gradient 0.
            output_dict: Return ``{'contrastive_loss': loss}`` instead.

        Returns:
            Scalar, in fp32 or wider.

        Raises:
            ValueError: For other shapes; with ranks on all of them, also if only one has others.
        """
        with self.checked_by_all(image_features, text_features, logit_scale, logit_bias):
            check_towers('ClipLoss', image_features, text_features)
        group = ranks_of(self.process_group)
        with torch.autocast(image_features.device.type, enabled=False):
            towers = image_features, text_features
            products = Products.of(self.precision, *towers)
            if self.tile_size is None:
                losses = untiled_losses(*towers, logit_scale, products, group)
            else:
                losses = tiled_losses(*towers, logit_scale, self.tile_size, products, group)
            loss = mean_over_ranks(losses, group)
            if isinstance(logit_bias, Tensor):  # DDP wants a gradient of every parameter
                loss = loss + 0 * logit_bias.sum()
        return {'contrastive_loss': loss} if output_dict else loss
