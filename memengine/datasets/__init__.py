"""Datasets: sources of images, the pipelines on them, and the batches that come out."""

from memengine.datasets.bank_and_queries import BankAndQueries
from memengine.datasets.batched import BatchedImageDataset, BatchedViews, PlainImageDataset
from memengine.datasets.coco import CocoDetection, list_samples
from memengine.datasets.collate import stack_views
from memengine.datasets.concat import ConcatDataset
from memengine.datasets.image_dataset import ImageDataset
from memengine.datasets.samplers import RepeatedAugmentation
from memengine.datasets.sources import (
    CIFAR10,
    CIFAR100,
    CocoCaptions,
    Digits,
    HuggingFace,
    ImageFolder,
    ImageNet,
    ImageTable,
    Photographs,
    Shards,
    Split,
    UnlabelledFolder,
    VideoFrames,
)
from memengine.datasets.streamed import HuggingFaceStream, ShardStream, StreamedImageDataset
from memengine.datasets.text import TextBlocks
from memengine.datasets.tokenizers import OpenClipTokenizer, TransformersTokenizer, WordTokenizer
from memengine.datasets.transforms import (
    ChooseCaption,
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
    'BatchedViews',
    'ChooseCaption',
    'CocoCaptions',
    'CocoDetection',
    'ConcatDataset',
    'Digits',
    'HuggingFace',
    'HuggingFaceStream',
    'ImageDataset',
    'ImageFolder',
    'ImageNet',
    'ImageTable',
    'LabelCaption',
    'MultiCrop',
    'OpenClipTokenizer',
    'PackInputs',
    'Photographs',
    'Pipeline',
    'PlainImageDataset',
    'RepeatedAugmentation',
    'ShardStream',
    'Shards',
    'Split',
    'StreamedImageDataset',
    'TextBlocks',
    'TimmRandAugment',
    'Tokenize',
    'TransformersTokenizer',
    'UnlabelledFolder',
    'VideoFrames',
    'WordTokenizer',
    'list_samples',
    'stack_views',
]
