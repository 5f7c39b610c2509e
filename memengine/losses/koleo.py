"""KoLeo: features are spread evenly by pushing each away from its nearest neighbour.

Shapes: B samples, D features.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from memengine.losses.batch_loss import BatchLoss, l2_normalize, mean_over_ranks, own_rows, ranks_of
from memengine.losses.gather import Gather


def koleo_loss(
    features: Tensor, eps: float = 1e-8, process_group: dist.ProcessGroup | None = None
) -> Tensor:
    """Minus the mean logarithm of each row's distance to its nearest neighbour.

    That is the Kozachenko-Leonenko estimate of the features' entropy, but for constants, with the
    sign turned.

    Args:
        features: [B, D]; they are l2-normalised here.
        eps: Added to the distances, so that equal rows have a finite loss; their gradient is zero.
        process_group: Ranks whose rows are one batch; None for this process alone. The value is
            then that of the whole batch, and the gradient as
            :mod:`memengine.losses.disco` promises.

    Returns:
        Scalar, in fp32 or wider.

    Raises:
        ValueError: For another shape, or fewer than two rows in all.

    Cost: 2B²D FLOPs forward without graph, for the neighbours; autograd keeps three [B, D]. With
    ranks the features travel, and their gradients.

    Source: Sablayrolles et al., Spreading Vectors for Similarity Search (2019), equation 3;
    beside DINO's loss: Oquab et al., DINOv2 (2023).
    """
    group = ranks_of(process_group)
    if features.dim() != 2 or features.numel() == 0:
        raise ValueError(f'koleo_loss: expected features [B, D], got {tuple(features.shape)}')
    with torch.autocast(features.device.type, enabled=False):
        z = l2_normalize(features)
        everything = z if group is None else Gather(z, group)
        if len(everything) < 2:
            raise ValueError('koleo_loss: a single sample has no neighbour; use a larger batch')
        with torch.no_grad():
            similarities = z @ everything.T  # [B, B of all ranks]
            similarities.diagonal(own_rows(z, group).start).fill_(-torch.inf)
            nearest = similarities.argmax(dim=1)  # [B]
        distances = torch.linalg.vector_norm(z - everything[nearest], dim=1)  # [B]
        return mean_over_ranks(-(distances + eps).log(), group)


class KoLeoLoss(BatchLoss):
    """:func:`koleo_loss` as a module, which can be given a group of ranks.

    Args:
        eps: See :func:`koleo_loss`.

    Raises:
        ValueError: For an ``eps`` that is not positive.
    """

    def __init__(self, eps: float = 1e-8) -> None:
        super().__init__()
        if not eps > 0:
            raise ValueError(f'KoLeoLoss: eps must be positive, got {eps}')
        self.eps = eps

    def forward(self, features: Tensor) -> Tensor:
        """Features [B, D] to the batch's loss; see :func:`koleo_loss`."""
        with self.checked_by_all(features, width=features.shape[1:]):
            if features.dim() != 2 or features.numel() == 0:
                raise ValueError(
                    f'KoLeoLoss: expected features [B, D], got {tuple(features.shape)}'
                )
        return koleo_loss(features, self.eps, self.process_group)
