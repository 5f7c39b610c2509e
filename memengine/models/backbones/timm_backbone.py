"""Any timm model as a feature extractor."""

from __future__ import annotations

import difflib
from typing import Any

import timm
from torch import Tensor, nn

from memengine.registry import MODELS

__all__ = ['TimmBackbone']


@MODELS.register_module()
class TimmBackbone(nn.Module):
    """A timm model without its classifier: images to pooled features.

    Args:
        model_name: Name in timm, e.g. ``'vit_small_patch16_224'`` or ``'resnet50'``.
        pretrained: Load timm's pretrained weights (needs the network or timm's cache).
        checkpoint_path: Load these weights instead (a local file in any format timm reads).
        **kwargs: Passed on to ``timm.create_model``, e.g. ``img_size``, ``patch_size``,
            ``drop_path_rate``, ``in_chans``, ``dynamic_img_size=True`` for multi-crop with a ViT
            (position embeddings are interpolated to the crop).

    Raises:
        ValueError: For a name or an argument that timm does not know.

    Attributes:
        model: The timm module.
        num_features: Width D of the features.
    """

    def __init__(
        self, model_name: str, pretrained: bool = False, checkpoint_path: str = '', **kwargs: Any
    ) -> None:
        super().__init__()
        if not timm.is_model(model_name):
            near = difflib.get_close_matches(model_name, timm.list_models(), n=3)
            hint = f'; did you mean {" or ".join(map(repr, near))}?' if near else ''
            raise ValueError(f'TimmBackbone: timm has no model_name={model_name!r}{hint}')
        try:
            self.model = timm.create_model(
                model_name,
                pretrained=pretrained,
                checkpoint_path=checkpoint_path,
                num_classes=0,
                **kwargs,
            )
        except TypeError as error:
            raise ValueError(
                f'TimmBackbone: {model_name} does not take these arguments: {error}'
            ) from error
        features: Any = self.model
        self.num_features: int = getattr(features, 'head_hidden_size', features.num_features)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] to features [B, D]."""
        return self.model(images)
