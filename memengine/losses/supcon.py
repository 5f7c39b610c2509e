"""Supervised contrastive loss, and SimCLR's where there are no labels.

Shapes: B samples, V views of each, D features; M anchors among N contrasts (the first M).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memengine.techniques.precision import at_least_fp32, autocast_off

__all__ = [
    'SupConLoss',
    'contrastive_rows',
    'log_partition',
    'mean_of_rows',
    'positive_pairs',
    'views_first',
]

CONTRAST_MODES = ('all', 'one')


def log_partition(anchors: Tensor, contrasts: Tensor, temperature: float) -> Tensor:
    """``log sum_{n != m} exp(a_m . c_n / temperature)``: each anchor against all but itself.

    Args:
        anchors: [M, D].
        contrasts: [N, D], beginning with the anchors, N >= M.
        temperature: Positive.

    Returns:
        [M]; very negative, but finite and without gradient, for an anchor with no contrast.
    """
    logits = (anchors / temperature) @ contrasts.T  # [M, N]
    logits.diagonal().fill_(torch.finfo(logits.dtype).min)
    return logits.logsumexp(dim=1)


def contrastive_rows(
    anchors: Tensor, contrasts: Tensor, pairs: Tensor | None, batch_size: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Contrastive loss of each anchor: log-partition minus mean similarity to its positives.

    Rows come in blocks of B samples, block after block; row ``m`` is of sample ``m % B``. Anchor
    and contrast are a positive pair where ``pairs`` says so of their samples, and never with
    themselves. The similarities to the positives are summed in feature space, so that only the
    log-partition needs all M x N of them.

    Args:
        anchors: [M, D].
        contrasts: [N, D], beginning with the anchors.
        pairs: Weight of sample b' as a positive of sample b, [B, B]; None for the identity.
        batch_size: B.
        temperature: Positive.

    Returns:
        Losses [M], 0 for an anchor without positives, and which anchors have positives, bool [M].
    """
    blocks = contrasts.unflatten(0, (-1, batch_size))  # [N / B, B, D]
    summed = blocks.sum(dim=0)  # [B, D]
    if pairs is None:
        itself = weight = contrasts.new_ones(batch_size)  # [B]
    else:
        itself, weight = pairs.diagonal(), pairs.sum(dim=1)
        summed = pairs @ summed
    copies = len(anchors) // batch_size
    count = (len(blocks) * weight - itself).repeat(copies)  # [M], positives of each anchor
    positive = torch.linalg.vecdot(anchors, summed.repeat(copies, 1))
    positive = positive - itself.repeat(copies) * torch.linalg.vecdot(anchors, anchors)
    has_positive = count > 0
    mean_positive = positive / (temperature * count.where(has_positive, 1))
    losses = log_partition(anchors, contrasts, temperature) - mean_positive
    return losses.where(has_positive, 0), has_positive


def positive_pairs(
    batch_size: int, labels: Tensor | None, mask: Tensor | None, like: Tensor
) -> Tensor | None:
    """Which samples are positives of each other, from labels or as given.

    Returns:
        [B, B] in the type and on the device of ``like``; None when each is its own only.

    Raises:
        ValueError: When both are given, or either has another shape.
    """
    if labels is not None and mask is not None:
        raise ValueError('give labels or mask, not both')
    if labels is not None:
        if labels.shape not in ((batch_size,), (batch_size, 1)):
            raise ValueError(
                f'labels must be one per sample, [{batch_size}], got {tuple(labels.shape)}'
            )
        labels = labels.flatten().to(like.device)
        return (labels[:, None] == labels[None, :]).to(like.dtype)
    if mask is None:
        return None
    if mask.shape != (batch_size, batch_size):
        raise ValueError(
            f'mask must say for each pair of samples whether they are positives, '
            f'[{batch_size}, {batch_size}], got {tuple(mask.shape)}'
        )
    return mask.to(like)


def views_first(features: Tensor) -> Tensor:
    """[B, V, ...] to [V, B, D], in fp32 or wider.

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
    return at_least_fp32(features.flatten(start_dim=2))[0].transpose(0, 1)


def mean_of_rows(losses: Tensor, temperature: float, base_temperature: float) -> Tensor:
    """Mean over anchors [M], in units of ``base_temperature``. Scalar."""
    return temperature / base_temperature * losses.mean()


def check_options(temperature: float, contrast_mode: str, base_temperature: float) -> None:
    """Raise ValueError for a temperature that is not positive or an unknown mode."""
    if not temperature > 0:
        raise ValueError(f'temperature must be positive, got {temperature}')
    if not base_temperature > 0:
        raise ValueError(f'base_temperature must be positive, got {base_temperature}')
    if contrast_mode not in CONTRAST_MODES:
        raise ValueError(f'contrast_mode must be one of {CONTRAST_MODES}, got {contrast_mode!r}')


class SupConLoss(nn.Module):
    """Supervised contrastive loss; SimCLR's NT-Xent when neither labels nor mask are given.

    For anchor ``i`` with positives ``P(i)`` among all other views ``A(i)``:
    ``-(temperature / base_temperature) * mean_{p in P(i)} log(exp(z_i.z_p / temperature) /
    sum_{a in A(i)} exp(z_i.z_a / temperature))``, averaged over the anchors.

    An anchor without positives (a label that occurs once, with one view) adds 0 to the mean and
    counts in it, as in the SupContrast repository.

    Args:
        temperature: Of the similarities; right down to 0.01 and below.
        contrast_mode: ``'all'`` views are anchors, or ``'one'``: the first of each sample only.
        base_temperature: The loss is in units of ``temperature / base_temperature``.

    Raises:
        ValueError: For a temperature that is not positive or an unknown mode.

    Cost: for M anchors and N = B * V contrasts, 2MND FLOPs forward and 4MND backward; autograd
    keeps one [M, N] matrix of similarities (4MN bytes, 8MN for fp64), and [B, B] with labels.

    Half-precision features are computed with in fp32, also under autocast.

    Source: Khosla et al., Supervised Contrastive Learning (2020), L_out.
    """

    def __init__(
        self,
        temperature: float = 0.07,
        contrast_mode: str = 'all',
        base_temperature: float = 0.07,
    ) -> None:
        super().__init__()
        check_options(temperature, contrast_mode, base_temperature)
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
                sample i. Need not be symmetric.

        Returns:
            Scalar, in fp32 or wider.

        Raises:
            ValueError: For another shape, or when both labels and mask are given.
        """
        views = views_first(features)  # [V, B, D]
        with autocast_off(features.device.type):
            pairs = positive_pairs(views.shape[1], labels, mask, like=views)
            contrasts = views.flatten(0, 1)  # [V * B, D]
            anchors = contrasts if self.contrast_mode == 'all' else views[0]
            losses, _ = contrastive_rows(
                anchors, contrasts, pairs, views.shape[1], self.temperature
            )
            return mean_of_rows(losses, self.temperature, self.base_temperature)
