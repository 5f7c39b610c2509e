"""Supervised classification.

Shapes: B samples, D width of the features, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memengine.models.algorithms.base import Algorithm
from memengine.models.batch_checks import check_labels, check_one_view, labels_of
from memengine.registry import MODELS, ModelConfig
from memengine.techniques.slices.slicing import Slice


@MODELS.register_module()
class Classifier(Algorithm):
    """A backbone and a linear layer, trained with cross-entropy; a linear probe when frozen.

    Args:
        backbone: Config of a backbone with ``num_features``, e.g. a ``TimmBackbone``.
        num_classes: Number of classes K.
        label_smoothing: Share of the target that is spread over all classes.
        freeze_backbone: Train the linear layer only, on the backbone's features as they are.
        **kwargs: Of :class:`Algorithm`.

    Raises:
        ValueError: For a setting out of range, or a batch of several views or without labels.

    Where ``data_samples`` has ``label_weights`` [B, K] (see ``MixedBatches``), these are what is
    learned in place of the labels.

    The loss is the mean over the samples, hence additive: the sum of the slices' losses, each
    divided by B. Logged beside it: ``train_top1``, percent of the batch that is classified rightly;
    of mixed images the class with most weight counts.
    """

    coupled = False

    def __init__(
        self,
        backbone: ModelConfig,
        num_classes: int,
        label_smoothing: float = 0.0,
        freeze_backbone: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if num_classes < 1:
            raise ValueError(f'Classifier: num_classes must be at least 1, got {num_classes}')
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f'Classifier: label_smoothing must be 0 to 1, got {label_smoothing}')
        self.backbone = MODELS.build(backbone)
        self.head = nn.Linear(self.backbone.num_features, num_classes)
        self.label_smoothing = label_smoothing
        if freeze_backbone:
            self.freeze(self.backbone)

    def targets(self, inputs: Any, data_samples: Any = None, size: Any = None) -> Tensor:
        """Labels [B], or weights of the classes [B, K]; they and the inputs are checked here."""
        check_one_view(inputs, 'Classifier')
        labels = labels_of(data_samples, 'Classifier')
        self.check_batch(data_samples)
        classes = self.head.out_features
        weights = data_samples.get('label_weights')
        if weights is None:
            return labels
        if weights.shape[1] != classes:
            raise ValueError(
                f'Classifier: label_weights are of {weights.shape[1]} classes, but '
                f'model.num_classes={classes}; set num_classes of MixedBatches to it'
            )
        return weights

    def check_batch(self, data_samples: Any) -> None:
        """Labels must be of classes that there are."""
        classes = self.head.out_features
        if isinstance(data_samples, Mapping) and 'label' in data_samples:
            labels = data_samples['label']
            check_labels(labels, range(classes), 'Classifier', f'model.num_classes={classes}')

    def embed(self, inputs: Tensor, data_samples: Any = None) -> Tensor:
        """Images [B, C, H, W] to logits [B, K]."""
        return self.head(self.backbone(inputs))

    def embedding_loss(
        self, embeddings: Tensor, targets: Tensor, data_samples: Any = None
    ) -> dict[str, Tensor]:
        """Cross-entropy of logits [B, K], and how many are right."""
        return self._losses(embeddings, targets, len(targets))

    def slice_loss(self, embeddings: Tensor, targets: Tensor, piece: Slice) -> dict[str, Tensor]:
        """The slice's share of the batch's mean."""
        assert isinstance(piece.rows, range)
        labels = targets[piece.rows.start : piece.rows.stop]
        return self._losses(embeddings, labels, piece.total)

    def _losses(self, logits: Tensor, labels: Tensor, total: int) -> dict[str, Tensor]:
        loss = F.cross_entropy(
            logits, labels, reduction='sum', label_smoothing=self.label_smoothing
        )
        with torch.no_grad():
            classes = labels.argmax(dim=1) if labels.dim() == 2 else labels
            right = (logits.argmax(dim=1) == classes).sum() * (100.0 / total)
        return {'loss': loss / total, 'train_top1': right}

    def features(self, inputs: Tensor) -> Tensor:
        """Backbone features [B, D] of images [B, C, H, W]."""
        return self.backbone(inputs)

    def predict(self, inputs: Any, data_samples: Any = None) -> list[dict[str, Tensor]]:
        """``feature`` [D] and ``logits`` [K] of each image."""
        check_one_view(inputs, 'Classifier')
        features = self.features(inputs)
        pairs = zip(features, self.head(features), strict=True)
        return [{'feature': feature, 'logits': logits} for feature, logits in pairs]
