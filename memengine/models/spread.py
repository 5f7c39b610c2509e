"""The spread of features, which tells collapse, from sums that add up over slices.

Shapes: N rows, D width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ['moments', 'spread']


@torch.no_grad()
def moments(features: Tensor) -> dict[str, Tensor]:
    """Sums over l2-normalised features [N, D]: of rows, values [D] and squares [D], in float64."""
    directions = F.normalize(features.double(), dim=-1)
    return {
        'rows': directions.new_tensor(len(directions)),
        'feature_sum': directions.sum(dim=0),
        'feature_square_sum': directions.square().sum(dim=0),
    }


@torch.no_grad()
def spread(sums: Mapping[str, Tensor]) -> Tensor:
    """Mean standard deviation of the normalised features times sqrt(D), from their sums.

    1 when they are isotropic, 0 when all are alike. Scalar; 0 for a single row.
    """
    rows, total, squares = sums['rows'], sums['feature_sum'], sums['feature_square_sum']
    variance = (squares - total.square() / rows).clamp_min(0) / (rows - 1).clamp_min(1)
    return variance.sqrt().mean() * math.sqrt(len(total))
