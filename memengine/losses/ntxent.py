"""Normalised temperature-scaled cross-entropy (SimCLR).

Shapes: B samples, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from memengine.losses.batch_loss import (
    BatchLoss,
    Precision,
    Products,
    log_partition,
    mean_over_ranks,
    ranks_of,
)


class NTXentLoss(BatchLoss):
    """NT-Xent: each view finds the other view of its sample among all 2B - 1 others.

    Similarities are cosines: the embeddings are l2-normalised here. On normalised embeddings
    it is :class:`~memengine.losses.supcon.SupConLoss` without labels, at ``base_temperature ==
    temperature``.

    Args:
        temperature: Of the similarities; a learned one gets its gradient.
        tile_size: See :class:`~memengine.losses.batch_loss.BatchLoss`, also for the loss over
            several ranks.
        precision: See there, too.

    Raises:
        ValueError: When the temperature is not positive.

    Cost: untiled 8B²D FLOPs forward and 16B²D backward; autograd keeps one [2B, 2B] matrix (16B²
    bytes). In tiles, and on ranks:
    :func:`~memengine.losses.logsumexp.others_logsumexp` for 2B rows.

    Half-precision embeddings are normalised in fp32 and rounded once to be multiplied; all else is
    fp32, also under autocast.

    Source: Chen et al., A Simple Framework for Contrastive Learning (2020), equation 1.
    """

    def __init__(
        self,
        temperature: float | Tensor = 0.5,
        tile_size: int | str | None = None,
        precision: Precision = 'auto',
    ) -> None:
        super().__init__(tile_size, precision)
        if not temperature > 0:
            raise ValueError(f'NTXentLoss: temperature must be positive, got {temperature}')
        self.temperature = temperature

    def forward(self, view1: Tensor, view2: Tensor) -> Tensor:
        """The batch's loss.

        Args:
            view1: Embeddings of one view, [B, D].
            view2: Embeddings of the other view of the same samples, [B, D].

        Returns:
            Scalar, in fp32 or wider.

        Raises:
            ValueError: For other shapes; with ranks on all of them, also if only one has others.
        """
        with self.checked_by_all(view1, view2):
            if view1.dim() != 2 or view1.shape != view2.shape or view1.numel() == 0:
                raise ValueError(
                    f'NTXentLoss: expected two views [B, D] of the same samples, got '
                    f'{tuple(view1.shape)} and {tuple(view2.shape)}'
                )
        group = ranks_of(self.process_group)
        with torch.autocast(view1.device.type, enabled=False):
            products = Products.of(self.precision, view1, view2)
            first, second = (
                products.rounded(F.normalize(view.to(products.sums), dim=1))
                for view in (view1, view2)
            )
            views = torch.cat([first, second])  # [2B, D]
            positive = torch.linalg.vecdot(first, second) / self.temperature  # [B]
            totals = log_partition(
                views, len(views), self.temperature, products, self.tile_size, group
            )  # [2B]
            return mean_over_ranks(totals.view(2, -1).mean(dim=0) - positive, group)
