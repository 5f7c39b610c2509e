"""Augmentation of whole batches as tensors, each image by random numbers of its own."""

from memengine.datasets.batched.dataset import BatchedImageDataset
from memengine.datasets.batched.draws import Draws
from memengine.datasets.batched.on_device import BatchedViews, PlainImageDataset
from memengine.datasets.batched.pipeline import BatchedPipeline, augment

__all__ = [
    'BatchedImageDataset',
    'BatchedPipeline',
    'BatchedViews',
    'Draws',
    'PlainImageDataset',
    'augment',
]
