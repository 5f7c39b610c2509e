"""Images that are read from streams, forward only: tar files by pipes, Hugging Face's streams."""

from memengine.datasets.streamed.dataset import StreamedImageDataset
from memengine.datasets.streamed.hugging_face import HuggingFaceStream
from memengine.datasets.streamed.shards import ShardStream

__all__ = ['HuggingFaceStream', 'ShardStream', 'StreamedImageDataset']
