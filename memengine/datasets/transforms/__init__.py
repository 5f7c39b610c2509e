"""Transforms of one sample: torchvision's v2, mmcv's, timm's, multi-crop, captions, the packing."""

from memengine.datasets.transforms.captions import ChooseCaption, LabelCaption, Tokenize
from memengine.datasets.transforms.multi_crop import MultiCrop
from memengine.datasets.transforms.pack import PackInputs
from memengine.datasets.transforms.pipeline import Pipeline
from memengine.datasets.transforms.timm_augment import TimmRandAugment
from memengine.datasets.transforms.torchvision_v2 import TorchvisionTransform

__all__ = [
    'ChooseCaption',
    'LabelCaption',
    'MultiCrop',
    'PackInputs',
    'Pipeline',
    'TimmRandAugment',
    'Tokenize',
    'TorchvisionTransform',
]
