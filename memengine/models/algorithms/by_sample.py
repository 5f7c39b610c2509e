"""Algorithms whose network gives the losses of each sample by itself.

Shapes: B samples of the batch, b of a slice.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from memengine.models.algorithms.base import Algorithm
from memengine.techniques.slices.slicing import Slice


class LossBySample(Algorithm):
    """A batch's losses are the means of its samples' losses, hence additive.

    Subclasses define :meth:`embed`, which gives the losses of the samples in a dict of tensors
    [b], and :meth:`predict`.
    """

    coupled = False

    def embedding_loss(
        self, embeddings: dict[str, Tensor], targets: Any, data_samples: Any = None
    ) -> dict[str, Tensor]:
        """The means of the samples' losses [B]."""
        return {name: losses.mean() for name, losses in embeddings.items()}

    def slice_loss(
        self, embeddings: dict[str, Tensor], targets: Any, piece: Slice
    ) -> dict[str, Tensor]:
        """The slice's share of the means, from its samples' losses [b]."""
        return {name: losses.sum() / piece.total for name, losses in embeddings.items()}
