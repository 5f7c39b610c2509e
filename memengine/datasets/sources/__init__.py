"""Where images come from: folders, tables, shards, libraries; with labels and captions if any."""

from memengine.datasets.sources.bundled import Digits, Photographs
from memengine.datasets.sources.folders import (
    CIFAR10,
    CIFAR100,
    ImageFolder,
    ImageNet,
    UnlabelledFolder,
)
from memengine.datasets.sources.hugging_face import HuggingFace
from memengine.datasets.sources.shards import Shards
from memengine.datasets.sources.split import Split
from memengine.datasets.sources.tables import CocoCaptions, ImageTable
from memengine.datasets.sources.video import VideoFrames

__all__ = [
    'CIFAR10',
    'CIFAR100',
    'CocoCaptions',
    'Digits',
    'HuggingFace',
    'ImageFolder',
    'ImageNet',
    'ImageTable',
    'Photographs',
    'Shards',
    'Split',
    'UnlabelledFolder',
    'VideoFrames',
]
