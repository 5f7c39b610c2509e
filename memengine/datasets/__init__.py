"""Datasets: sources of images, the pipelines on them, and the batches that come out."""

from memengine.datasets.bank import BankAndQueries
from memengine.datasets.collate import stack_views
from memengine.datasets.folders import CIFAR10, CIFAR100, ImageFolder, ImageNet
from memengine.datasets.image_dataset import ImageDataset
from memengine.datasets.sources import Digits, Photographs
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
    Tokenize,
)

__all__ = [
    'CIFAR10',
    'CIFAR100',
    'BankAndQueries',
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
    'Tokenize',
    'TransformersTokenizer',
    'WordTokenizer',
    'stack_views',
]
