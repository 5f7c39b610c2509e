"""Datasets: sources of images, the pipelines on them, and the batches that come out."""

from memengine.datasets.bank import BankAndQueries
from memengine.datasets.batched import BatchedImageDataset
from memengine.datasets.coco import CocoDetection, list_samples
from memengine.datasets.collate import stack_views
from memengine.datasets.folders import CIFAR10, CIFAR100, ImageFolder, ImageNet
from memengine.datasets.image_dataset import ImageDataset
from memengine.datasets.samplers import RepeatedAugmentation
from memengine.datasets.sources import Digits, Photographs
from memengine.datasets.text import TextBlocks
from memengine.datasets.tokenizers import (
    OpenClipTokenizer,
    TransformersTokenizer,
    WordTokenizer,
)
from memengine.datasets.transforms import (
    LabelCaption,
    MultiCrop,
    PackInputs,
    Pipeline,
    TimmRandAugment,
    Tokenize,
)

__all__ = [
    'CIFAR10',
    'CIFAR100',
    'BankAndQueries',
    'BatchedImageDataset',
    'CocoDetection',
    'Digits',
    'ImageDataset',
    'ImageFolder',
    'ImageNet',
    'LabelCaption',
    'MultiCrop',
    'OpenClipTokenizer',
    'PackInputs',
    'Photographs',
    'Pipeline',
    'RepeatedAugmentation',
    'TextBlocks',
    'TimmRandAugment',
    'Tokenize',
    'TransformersTokenizer',
    'WordTokenizer',
    'list_samples',
    'stack_views',
]
