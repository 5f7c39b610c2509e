"""Supervised contrastive loss, and SimCLR's where there are no labels.

Shapes: B samples, V views of each, D features; M anchors among N contrasts (the first M).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from memengine.losses.batch_loss import (
    BatchLoss,
    Precision,
    Products,
    log_partition,
    mean_over_ranks,
    own_rows,
    ranks_of,
)
from memengine.losses.disco import sum_over_ranks
from memengine.losses.gather import Gather

__all__ = [
    'Positives',
    'SupConLoss',
    'check_positives',
    'contrastive_rows',
    'given_positives',
    'positives_of',
    'views_first',
]

CONTRAST_MODES = ('all', 'one')


class Positives(NamedTuple):
    """What each of B samples has for positives; its own weight is in all of these."""

    summed: Tensor  # [B, D], sum of the positives' contrasts, by weight
    weight: Tensor  # [B], sum of the weights
    itself: Tensor  # [B], the sample's own weight


def positives_of(
    blocks: Tensor,
    labels: Tensor | None,
    mask: Tensor | None,
    group: dist.ProcessGroup | None = None,
) -> Positives:
    """Sum each sample's positives in feature space, from labels or a mask as given.

    Args:
        blocks: [N / B, B, D], the contrasts in blocks of B samples.
        labels: [B] or [B, 1]; equal labels are positives.
        mask: [B, B], or with ranks [B, all ranks' B]: weights. Without both, each is its own.
        group: The ranks among whose samples the positives are.

    Raises:
        ValueError: When the mask has another number of columns.
    """
    own = own_rows(blocks.transpose(0, 1), group)
    samples = blocks.sum(dim=0)
    ones = samples.new_ones(len(samples))
    if labels is not None:
        labels = labels.flatten().to(samples.device)
        everyone = labels if group is None else Gather(labels, group)
        members, classes = _numbered(everyone)
        sums = samples.new_zeros(classes, samples.shape[1])
        sums = sum_over_ranks(sums.index_add(0, members[own], samples), group)  # [classes, D]
        counts = members.new_zeros(classes).index_add(0, members, torch.ones_like(members))
        return Positives(sums[members[own]], counts[members[own]].to(samples.dtype), ones)
    if mask is None:
        return Positives(samples, ones, ones)
    everyone = samples if group is None else Gather(samples, group)
    if mask.shape[1] != len(everyone):
        raise ValueError(
            'mask must say for each sample and each of the batch (of all ranks) whether they are '
            f'positives, [{len(samples)}, {len(everyone)}], got {tuple(mask.shape)}'
        )
    mask = mask.to(samples)
    return Positives(mask @ everyone, mask.sum(dim=1), mask.diagonal(own.start))


def _numbered(labels: Tensor) -> tuple[Tensor, int]:
    """Each label's number among the different ones, [N], and how many there are at most."""
    if labels.is_cpu:
        classes, members = labels.unique(return_inverse=True)
        return members, len(classes)
    ordered, order = labels.sort()  # the host would wait for unique(), to learn how many there are
    numbers = F.pad(ordered[1:].ne(ordered[:-1]).cumsum(0), (1, 0))
    return torch.empty_like(order).scatter(0, order, numbers), len(labels)


def check_positives(batch_size: int, labels: Tensor | None, mask: Tensor | None) -> None:
    """Raise ValueError when both are given, or either is not one row for each of B samples."""
    if labels is not None and mask is not None:
        raise ValueError('give labels or mask, not both')
    if labels is not None and labels.shape not in ((batch_size,), (batch_size, 1)):
        raise ValueError(
            f'labels must be one per sample, [{batch_size}], got {tuple(labels.shape)}'
        )
    if mask is not None and (mask.dim() != 2 or len(mask) != batch_size):
        raise ValueError(
            'mask must have a row for each sample and (over ranks) a column for each of all, '
            f'in one process [{batch_size}, {batch_size}], got {tuple(mask.shape)}'
        )


def given_positives(labels: Tensor | None, mask: Tensor | None) -> str:
    """What tells the positives; over ranks, the same on all."""
    if labels is not None:
        return f'labels of {labels.dtype}'
    return 'none' if mask is None else f'mask [b, *{list(mask.shape[1:])}]'


def contrastive_rows(
    contrasts: Tensor,
    anchors: int,
    positives: Positives,
    temperature: Tensor | float,
    products: Products,
    tile_size: int | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Contrastive loss of each anchor: log-partition minus mean similarity to its positives.

    Rows come in blocks of B samples, block after block; row ``m`` is of sample ``m % B``. Anchor
    and contrast are a positive pair where their samples are, and never with themselves. The
    similarities to the positives are summed in feature space, so that only the log-partition
    needs all M x N of them.

    Args:
        contrasts: [N, D], beginning with the anchors.
        anchors: Their number M.
        positives: Of the B samples.
        temperature: Positive.
        products: As in :func:`~memengine.losses.batch_loss.log_partition`.
        tile_size: As in :func:`~memengine.losses.batch_loss.log_partition`.
        group: As in :func:`~memengine.losses.batch_loss.log_partition`.

    Returns:
        Losses [M], 0 for an anchor without positives, and which anchors have positives, bool [M].
    """
    batch_size = len(positives.weight)
    blocks, copies = len(contrasts) // batch_size, anchors // batch_size
    z = contrasts[:anchors].view(copies, batch_size, -1)
    count = blocks * positives.weight - positives.itself  # [B]
    similarity = torch.linalg.vecdot(z, positives.summed)  # [M / B, B]
    similarity = similarity - positives.itself * torch.linalg.vecdot(z, z)
    has_positive = count > 0
    mean_positive = similarity / (temperature * count.where(has_positive, 1))
    totals = log_partition(contrasts, anchors, temperature, products, tile_size, group)
    losses = totals.view(copies, batch_size) - mean_positive
    return losses.where(has_positive, 0).flatten(), has_positive.repeat(copies)


def views_first(features: Tensor, products: Products) -> Tensor:
    """[B, V, ...] to [V, B, D], in fp32 or wider, rounded to the operands of the products.

    Raises:
        ValueError: For fewer than three dimensions, or an empty one.
    """
    if features.dim() < 3:
        raise ValueError(
            f'features must be [B, V, D] (V views of B samples), got {tuple(features.shape)}; '
            'one view per sample is features.unsqueeze(1)'
        )
    if features.numel() == 0:
        raise ValueError(f'features must not be empty, got {tuple(features.shape)}')
    return products.rounded(features.flatten(start_dim=2)).transpose(0, 1)


class SupConLoss(BatchLoss):
    """Supervised contrastive loss; SimCLR's NT-Xent when neither labels nor mask are given.

    For anchor ``i`` with positives ``P(i)`` among all other views ``A(i)``:
    ``-(temperature / base_temperature) * mean_{p in P(i)} log(exp(z_i.z_p / temperature) /
    sum_{a in A(i)} exp(z_i.z_a / temperature))``, averaged over the anchors.

    An anchor without positives (a label that occurs once, with one view) adds 0 to the mean and
    counts in it, as in the SupContrast repository.

    Args:
        temperature: Of the similarities; right down to 0.01 and below. A learned one gets its
            gradient.
        contrast_mode: ``'all'`` views are anchors, or ``'one'``: the first of each sample only.
        base_temperature: The loss is in units of ``temperature / base_temperature``.
        tile_size: See :class:`~memengine.losses.batch_loss.BatchLoss`, also for the loss over
            several ranks.
        precision: See there, too.

    Raises:
        ValueError: For a temperature that is not positive or an unknown mode.

    Cost: for M anchors and N = B * V contrasts, untiled 2MND FLOPs forward and 4MND backward;
    autograd keeps one [M, N] matrix of similarities (4MN bytes, 8MN for fp64). In tiles, and on
    ranks: :func:`~memengine.losses.logsumexp.others_logsumexp`. With labels on ranks, the sums of
    the classes travel too, D numbers for each class, forward and backward.

    Half-precision features are multiplied as they are, but summed over positives in fp32; so is all
    else, also under autocast.

    Source: Khosla et al., Supervised Contrastive Learning (2020), L_out.
    """

    def __init__(
        self,
        temperature: float | Tensor = 0.07,
        contrast_mode: Literal['all', 'one'] = 'all',
        base_temperature: float = 0.07,
        tile_size: int | str | None = None,
        precision: Precision = 'auto',
    ) -> None:
        super().__init__(tile_size, precision)
        if not temperature > 0:
            raise ValueError(f'temperature must be positive, got {temperature}')
        if not base_temperature > 0:
            raise ValueError(f'base_temperature must be positive, got {base_temperature}')
        if contrast_mode not in CONTRAST_MODES:
            raise ValueError(
                f'contrast_mode must be one of {CONTRAST_MODES}, got {contrast_mode!r}'
            )
        self.temperature = temperature
        self.contrast_mode = contrast_mode
        self.base_temperature = base_temperature

    def forward(
        self, features: Tensor, labels: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """The batch's loss.

        Args:
            features: Embeddings [B, V, D], as a rule l2-normalised; further dimensions are
                flattened into D.
            labels: [B]; equal labels are positives.
            mask: [B, B]; ``mask[i, j]`` true (or its weight) where sample j is a positive of
                sample i. Need not be symmetric. Over ranks, this rank's rows of it: [B, all B].

        Returns:
            Scalar, in fp32 or wider.

        Raises:
            ValueError: For another shape, or when both labels and mask are given; with ranks on
                all of them, also if only one is given such.
        """
        given = given_positives(labels, mask)
        with self.checked_by_all(features, mode=self.contrast_mode, positives=given):
            products = Products.of(self.precision, features)
            views = views_first(features, products)  # [V, B, D]
            check_positives(len(features), labels, mask)
        anchor_views = 1 if self.contrast_mode == 'one' else len(views)
        return self._mean(views, anchor_views, (len(features), labels, mask), products)

    def _mean(
        self,
        views: Tensor,
        anchor_views: int,
        positives: tuple[int, Tensor | None, Tensor | None],
        products: Products,
        of_positives: bool = False,
    ) -> Tensor:
        """The mean of the anchors' losses.

        Args:
            views: [V, n, D].
            anchor_views: How many of the V are anchors, the first.
            positives: B, and ``labels`` [B] or ``mask`` [B, B], or None and None.
            products: How the similarities are computed, and their gradients.
            of_positives: Whether it is the mean over the anchors that have positives.
        """
        batch_size, labels, mask = positives
        group = ranks_of(self.process_group)
        with torch.autocast(views.device.type, enabled=False):
            contrasts = views.flatten(0, 1)  # [N, D], in blocks of B samples
            blocks = contrasts.view(-1, batch_size, contrasts.shape[1])
            losses, has_positive = contrastive_rows(
                contrasts,
                anchor_views * views.shape[1],
                positives_of(blocks, labels, mask, group),
                self.temperature,
                products,
                self.tile_size,
                group,
            )
            loss = mean_over_ranks(losses, group)
            if of_positives:
                share = mean_over_ranks(has_positive.to(losses), group)
                loss = loss / share.clamp_min(torch.finfo(losses.dtype).tiny)
            return self.temperature / self.base_temperature * loss
