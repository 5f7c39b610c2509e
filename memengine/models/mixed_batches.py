"""MixUp and CutMix, by torchvision.

Shapes: B images, K classes.
"""

from __future__ import annotations

from typing import Any

import torch
from mmengine.model import BaseDataPreprocessor
from torch import Tensor
from torchvision.transforms import v2

from memengine.models.batch_checks import check_labels
from memengine.registry import MODELS


@MODELS.register_module()
class MixedBatches(BaseDataPreprocessor):
    """Moves a batch to the device and, in training, mixes each image with another of the batch.

    A batch gets MixUp or CutMix, with equal chances. Which image is mixed with which is drawn, too,
    so that the order of the batch has no say in it. It is mixed before it is cut into slices, so
    that accumulation changes nothing. The mixed labels stand beside the plain ones, as
    ``data_samples['label_weights']`` [B, K], which ``Classifier`` trains on.

    Args:
        num_classes: Number of classes K.
        mixup_alpha: Both parameters of the Beta distribution of MixUp's weights; 0 for no MixUp.
        cutmix_alpha: The same of the areas that CutMix replaces; 0 for no CutMix.

    Raises:
        ValueError: When both are 0, or one is negative; in a step, for a label out of range.

    Randomness comes from torch's global generator.

    Source: Zhang et al., mixup (2018); Yun et al., CutMix (2019).
    """

    def __init__(
        self, num_classes: int, mixup_alpha: float = 0.8, cutmix_alpha: float = 1.0
    ) -> None:
        super().__init__()
        if min(mixup_alpha, cutmix_alpha) < 0 or not max(mixup_alpha, cutmix_alpha):
            raise ValueError(
                'MixedBatches: mixup_alpha and cutmix_alpha must not be negative, nor both 0, got '
                f'{mixup_alpha} and {cutmix_alpha}'
            )
        kinds = ((v2.MixUp, mixup_alpha), (v2.CutMix, cutmix_alpha))
        self.num_classes = num_classes
        self.mix = v2.RandomChoice(
            [kind(alpha=alpha, num_classes=num_classes) for kind, alpha in kinds if alpha]
        )

    def forward(self, data: Any, training: bool = False) -> Any:
        """A batch on the model's device, mixed if it is to be trained on."""
        if not training:
            return super().forward(data, training)
        classes = range(self.num_classes)
        labels = data['data_samples']['label']
        check_labels(labels, classes, 'MixedBatches', f'num_classes={self.num_classes}')
        data = super().forward(data, training)
        images, weights = self._mixed(data['inputs'], data['data_samples']['label'])
        samples = {**data['data_samples'], 'label_weights': weights.to(images.dtype)}
        return {**data, 'inputs': images, 'data_samples': samples}

    def _mixed(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Images and weights of the labels, in the order of the batch.

        torchvision mixes neighbours, and those of RepeatedAugmentation are the same image.
        """
        order = torch.randperm(len(labels))
        there, back = order.to(images.device), order.argsort().to(images.device)
        images, weights = self.mix(images[there], labels[there])
        return images[back], weights[back]
