"""Images and texts that are contrasted, and texts that are said of their images.

Shapes: B pairs of the batch, b of a slice, L tokens of a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from memengine.models.algorithms.base import Algorithm
from memengine.models.algorithms.clip import CLIP, TOWERS
from memengine.models.build import build_head
from memengine.registry import MODELS, HeadConfig, ModelConfig
from memengine.techniques.slices.slicing import Slice


@MODELS.register_module()
class CoCa(CLIP):
    """CLIP that also learns to say what is in an image.

    In the contrastive loss pairs meet, the loss of captions is each pair's own: in slices the
    first goes through the gradient cache, the second through the same backward.

    Args:
        image: Config of a ``TimmBackbone``, whose places the captions look at.
        text: As :class:`CLIP`'s.
        caption: Config of the head; ``in_dim`` is filled in.
        caption_weight: Weight of the captions' loss beside the contrastive one.
        **kwargs: Of :class:`CLIP`.

    Raises:
        ValueError: As :class:`CLIP`; for a negative weight.

    Logged beside what :class:`CLIP` logs: ``loss_contrastive`` and ``loss_caption``, the latter
    with its weight: the mean over the texts of the cross-entropy of their tokens.

    Source: Yu et al., CoCa: Contrastive Captioners are Image-Text Foundation Models (2022). Its
    text decoder is one network in two halves; here the text encoder and the captions' decoder are
    two, so that each can come from elsewhere.
    """

    additive = True

    def __init__(
        self,
        image: ModelConfig,
        text: ModelConfig,
        caption: HeadConfig,
        caption_weight: float = 2.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(image, text, **kwargs)
        if caption_weight < 0:
            raise ValueError(f'CoCa: caption_weight must not be negative, got {caption_weight}')
        self.caption: Any = build_head(caption, self._image.backbone.place_width)
        self.caption_weight = caption_weight

    @property
    def _image(self) -> Any:
        return self.towers['image']

    def embed(self, inputs: Tensor | None, data_samples: Any = None) -> dict[str, Tensor]:
        """``image`` and ``text`` [b, D], not normalised, and the loss of each ``caption`` [b]."""
        tokens = data_samples['tokens']
        features, places = self._image.backbone.with_places(inputs)
        return {
            'image': self._image.projection(features),
            'text': self.towers['text'](tokens),
            'caption': self.caption(places, tokens),
        }

    def embedding_loss(
        self, embeddings: dict[str, Tensor], targets: Any = None, data_samples: Any = None
    ) -> dict[str, Tensor]:
        """Both losses, the scale, the spread and the rank."""
        caption = self.caption_weight * embeddings['caption'].mean()
        return {'loss_caption': caption, **self.coupled_loss(embeddings, targets, data_samples)}

    def coupled_loss(
        self, embeddings: dict[str, Tensor], targets: Any = None, data_samples: Any = None
    ) -> dict[str, Tensor]:
        """The contrastive loss, and what :class:`CLIP` logs."""
        losses = super().embedding_loss(embeddings, targets, data_samples)
        return {'loss_contrastive': losses.pop('loss'), **losses}

    def coupled_part(self, embeddings: dict[str, Tensor], piece: Slice) -> dict[str, Tensor]:
        """The embeddings that are contrasted."""
        return {tower: embeddings[tower] for tower in TOWERS}

    def slice_loss(
        self, embeddings: dict[str, Tensor], targets: Any, piece: Slice
    ) -> dict[str, Tensor]:
        """The slice's share of the captions' loss."""
        share = embeddings['caption'].sum() / piece.total
        return {'loss_caption': self.caption_weight * share}

    def slices(
        self, inputs: Tensor, data_samples: Any, size: int | Mapping[str, int]
    ) -> list[Slice]:
        """By pairs: captions need the image and the text of each."""
        self.targets(inputs, data_samples)
        if isinstance(size, Mapping):
            raise ValueError(
                f'CoCa is cut by pairs: the size of a slice must be a number, got {dict(size)}'
            )
        return Algorithm.slices(self, inputs, {'tokens': data_samples['tokens']}, size)

    def captions(self, inputs: Tensor) -> Tensor:
        """Images [B, C, H, W] to the likeliest tokens, Long[B, L]."""
        return self.caption.captions(self._image.backbone.with_places(inputs)[1])
