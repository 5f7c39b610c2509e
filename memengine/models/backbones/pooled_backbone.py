"""Backbones of other libraries of MMEngine's kind, which give feature maps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from memengine.registry import MODELS, ModelConfig


@MODELS.register_module()
class PooledBackbone(nn.Module):
    """A backbone that gives feature maps, as mmpretrain's and mmdet's do; the last is averaged.

    Args:
        backbone: Its config, e.g. ``dict(type='mmpretrain.ResNet', depth=50)``. It maps images
            [B, C, H, W] to a map [B, D, h, w], features [B, D], or a sequence whose last is one.
        num_features: Width D of the last, e.g. 2048.

    Raises:
        ValueError: For features of another width.
    """

    def __init__(self, backbone: ModelConfig, num_features: int) -> None:
        super().__init__()
        self.backbone = MODELS.build(backbone)
        self.num_features = num_features

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] to features [B, D]."""
        features: Tensor | Sequence[Tensor] = self.backbone(images)
        last = features if isinstance(features, Tensor) else features[-1]
        if last.ndim < 2 or last.shape[1] != self.num_features:
            raise ValueError(
                f'PooledBackbone: num_features={self.num_features}, but '
                f'{type(self.backbone).__name__} gives features of shape {tuple(last.shape)}'
            )
        return last.flatten(2).mean(-1) if last.ndim > 2 else last
