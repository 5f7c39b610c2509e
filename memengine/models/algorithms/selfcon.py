"""Self-contrastive learning: a network against its own sub-networks.

Shapes: B samples, V views of each, n outputs of the network, D width of the embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memengine.losses.batch_loss import l2_normalize
from memengine.models.algorithms.base import Algorithm, rows_of, spread
from memengine.models.batch_checks import check_has_labels, labels_of
from memengine.models.build import build_head, build_loss
from memengine.registry import MODELS, HeadConfig, ModelConfig


@MODELS.register_module()
class SelfCon(Algorithm):
    """Contrast of a network's output with those of exits from its intermediate stages.

    One view of an image is enough, since its outputs are its views.

    Args:
        backbone: Config of a ``TimmBackbone``, or of one's own with ``num_features``,
            ``exit_widths(exits)`` and ``with_exits(images, exits)``.
        head: Config of the projection head; ``in_dim`` is filled in.
        exits: Stages after which the network is left, as places in timm's ``feature_info`` (for a
            ViT the blocks, from 0); negative ones count from the end.
        sub_head: Config of the head of each exit, on the stage's pooled features; None for
            ``head``.
        loss: Config or name of a loss that is called with normalised embeddings [B, n, D], the
            backbone's own output last, and ``labels=`` [B].
        use_labels: Without them a sample's positives are its own other outputs.
        **kwargs: Of :class:`Algorithm`.

    Raises:
        ValueError: For no exit, one that the backbone does not have, or a batch without labels.

    Several views of one image go in as further outputs, [B, V * n, D].

    Logged beside the loss: ``feature_std``, the spread of the backbone's normalised embeddings
    times sqrt(D), 1 when isotropic and 0 when all are alike; without labels ``feature_rank``, the
    number of dimensions in which they are spread.

    Source: Bae et al., Self-Contrastive Learning (2021).
    """

    def __init__(
        self,
        backbone: ModelConfig,
        head: HeadConfig,
        exits: Sequence[int],
        sub_head: HeadConfig | None = None,
        loss: ModelConfig | str = 'ConLoss',
        use_labels: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not exits:
            raise ValueError('SelfCon: exits must name at least one stage, got none')
        self.backbone = MODELS.build(backbone)
        self.exits = list(exits)
        self.sub_heads = nn.ModuleList(
            build_head(sub_head or head, width) for width in self.backbone.exit_widths(self.exits)
        )
        self.head = build_head(head, self.backbone.num_features)
        self.loss = build_loss(loss)
        self.use_labels = use_labels

    def check_batch(self, data_samples: Any) -> None:
        """Images without a label are of no class, and not of one."""
        if self.use_labels:
            check_has_labels(data_samples, 'SelfCon')

    def targets(self, inputs: Any, data_samples: Any = None, size: Any = None) -> int:
        """Number of views; the labels are checked here, once per batch."""
        self.check_batch(data_samples)
        return len(inputs) if isinstance(inputs, (list, tuple)) else 1

    def embed(self, inputs: Tensor | Sequence[Tensor], data_samples: Any = None) -> Tensor:
        """Views to embeddings [V * B, n, D], the backbone's own output last, not normalised."""
        features, early = self.backbone.with_exits(rows_of(inputs), self.exits)
        outputs = [head(stage) for head, stage in zip(self.sub_heads, early, strict=True)]
        return torch.stack([*outputs, self.head(features)], dim=1)

    def embedding_loss(
        self, embeddings: Tensor, targets: int, data_samples: Any = None
    ) -> dict[str, Tensor]:
        """The loss of embeddings [V * B, n, D], and the spread of the backbone's."""
        views = l2_normalize(embeddings).unflatten(0, (targets, -1))  # [V, B, n, D]
        labels = labels_of(data_samples, 'SelfCon') if self.use_labels else None
        # Of two classes one direction is all that labels ask for.
        figures = spread(embeddings[:, -1], with_rank=not self.use_labels)
        return {'loss': self.loss(torch.cat(list(views), dim=1), labels=labels), **figures}

    def features(self, inputs: Tensor) -> Tensor:
        """Backbone features [B, D] of images [B, C, H, W], without the heads."""
        return self.backbone(inputs)
