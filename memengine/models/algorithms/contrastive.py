"""Contrastive learning of one network: SimCLR and SupCon.

Shapes: B samples, V views of each, D width of the embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from memengine.losses.batch_loss import l2_normalize
from memengine.models.algorithms.base import Algorithm, rows_of, spread
from memengine.models.batch_checks import check_has_labels, labels_of
from memengine.models.build import build_head, build_loss
from memengine.registry import MODELS, HeadConfig, ModelConfig


class _ContrastiveAlgorithm(Algorithm):
    """A backbone and a projection head, on views of one size."""

    def __init__(
        self,
        backbone: ModelConfig,
        head: HeadConfig,
        loss: ModelConfig | str = 'NTXentLoss',
        freeze_backbone: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.backbone = MODELS.build(backbone)
        self.head = build_head(head, self.backbone.num_features)
        self.loss = build_loss(loss)
        self.freeze_backbone = freeze_backbone
        if freeze_backbone:
            self.freeze(self.backbone)

    def targets(self, inputs: Any, data_samples: Any = None, size: Any = None) -> int:
        """Number of views; they are checked here, once per batch."""
        views = len(inputs) if isinstance(inputs, (list, tuple)) else 1
        self._check_views(views)
        self.check_batch(data_samples)
        return views

    def _check_views(self, views: int) -> None:
        raise NotImplementedError

    def frozen(self, name: str | None) -> nn.Module | None:
        """The backbone, if it is."""
        return self.backbone if self.freeze_backbone else None

    def embed(self, inputs: Tensor | Sequence[Tensor], data_samples: Any = None) -> Tensor:
        """Views to embeddings [V * B, D], view by view, not normalised."""
        return self.head(self.backbone(rows_of(inputs)))

    def features(self, inputs: Tensor) -> Tensor:
        """Backbone features [B, D] of images [B, C, H, W], without the head."""
        return self.backbone(inputs)


@MODELS.register_module()
class SimCLR(_ContrastiveAlgorithm):
    """Contrast of two views of an image with all other images of the batch; no labels.

    Args:
        backbone: Config of a backbone with ``num_features``, e.g. a ``TimmBackbone``.
        head: Config of the projection head; ``in_dim`` is filled in.
        loss: Config or name of a loss that is called with the two views' embeddings [B, D].
        freeze_backbone: Train the head only.
        **kwargs: Of :class:`Algorithm`.

    Raises:
        ValueError: For a batch of other than two views.

    Logged beside the loss: ``feature_std``, the spread of the normalised embeddings times
    sqrt(D), 1 when isotropic and 0 when all are alike; ``feature_rank``, the number of dimensions
    in which they are spread.

    Source: Chen et al., A Simple Framework for Contrastive Learning (2020).
    """

    def _check_views(self, views: int) -> None:
        if views != 2:
            raise ValueError(
                f'SimCLR: a batch must hold two views of each image, got {views}; set '
                "dict(type='MultiCrop', views=[dict(num=2, pipeline=...)]) in the pipeline"
            )

    def embedding_loss(
        self, embeddings: Tensor, targets: int, data_samples: Any = None
    ) -> dict[str, Tensor]:
        """The loss of embeddings [2 * B, D], their spread and their rank."""
        return {'loss': self.loss(*embeddings.chunk(2)), **spread(embeddings)}


@MODELS.register_module()
class SupCon(_ContrastiveAlgorithm):
    """Supervised contrast: images of one class attract each other, those of others repel.

    Args:
        backbone: Config of a backbone with ``num_features``, e.g. a ``TimmBackbone``.
        head: Config of the projection head; ``in_dim`` is filled in.
        loss: Config or name of a loss that is called with normalised embeddings [B, V, D] and
            ``labels=`` [B].
        use_labels: Without them a sample's positives are its own other views, as in SimCLR.
        freeze_backbone: Train the head only.
        **kwargs: Of :class:`Algorithm`.

    Raises:
        ValueError: For a batch without labels, or, without ``use_labels``, of a single view.

    Logged beside the loss: ``feature_std``, as for :class:`SimCLR`, and without labels
    ``feature_rank``.

    Source: Khosla et al., Supervised Contrastive Learning (2020).
    """

    def __init__(
        self,
        backbone: ModelConfig,
        head: HeadConfig,
        loss: ModelConfig | str = 'SupConLoss',
        use_labels: bool = True,
        freeze_backbone: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, head, loss, freeze_backbone, **kwargs)
        self.use_labels = use_labels

    def check_batch(self, data_samples: Any) -> None:
        """Images without a label are of no class, and not of one."""
        if self.use_labels:
            check_has_labels(data_samples, 'SupCon')

    def _check_views(self, views: int) -> None:
        if views < 2 and not self.use_labels:
            raise ValueError(
                'SupCon: without labels a sample needs several views, got 1; set use_labels=True, '
                "or dict(type='MultiCrop', views=[dict(num=2, pipeline=...)]) in the pipeline"
            )

    def embedding_loss(
        self, embeddings: Tensor, targets: int, data_samples: Any = None
    ) -> dict[str, Tensor]:
        """The loss of embeddings [V * B, D], and their spread."""
        features = l2_normalize(embeddings).unflatten(0, (targets, -1)).transpose(0, 1)  # [B, V, D]
        labels = labels_of(data_samples, 'SupCon') if self.use_labels else None
        # Of two classes one direction is all that labels ask for.
        figures = spread(embeddings, with_rank=not self.use_labels)
        return {'loss': self.loss(features, labels=labels), **figures}
