"""A data set of images that are read from a stream."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image
from torch.utils.data import Dataset

from memengine.datasets.build import build
from memengine.datasets.image_dataset import make_item
from memengine.datasets.sources.broken import BrokenSamples, OnError
from memengine.datasets.sources.classes import NamedClasses
from memengine.datasets.sources.folders import MOST_PIXELS, load_rgb
from memengine.datasets.streamed.reading import Reader, Stream
from memengine.datasets.transforms.pipeline import Pipeline
from memengine.registry import DATASETS, DatasetConfig, TransformConfig

_FLAGS = 2**20  # broken samples are told apart by their names' checksums: 1 MiB
_MOST_IN_A_ROW = 100


@DATASETS.register_module()
class StreamedImageDataset(NamedClasses, Dataset):
    """The items ``dict(inputs=..., data_samples=dict(label=int, index=int))`` of a stream.

    Each worker of each rank reads a part of the stream; pass follows pass, and an epoch is a number
    of samples, so that all ranks have equally many. What is read at a place of an epoch follows
    from the seed, the place, and the numbers of ranks and workers: a run that is resumed goes on
    bit for bit, with as many of them. It then reads what it has had in this epoch again, without
    decoding it.

    Args:
        source: What is read: a config of DATASETS (``ShardStream``, ``HuggingFaceStream``).
        pipeline: Configs of TRANSFORMS; the last one is ``PackInputs``.
        length: Samples in an epoch, of all ranks together.
        shuffle_buffer: From how many samples, in each worker, the next one is drawn; they are not
            decoded. 0 keeps the order in the shards, which are shuffled in any case.
        on_error: ``'stop'`` (or ``'raise'``) stops at an image that cannot be read, naming it.
            ``'skip'`` takes the next one instead, warns once for each, and counts them. A stream
            that breaks off always stops.
        max_skipped: How many may be skipped, as a share of ``length``, in [0, 1].
        max_pixels: An image of more pixels cannot be read.
        metainfo: More entries for ``dataset.metainfo``, which holds ``classes``.

    Raises:
        ValueError: When a setting is wrong; on access, when the stream breaks off, an image cannot
            be read, or a transform fails (the last two name the sample).
    """

    def __init__(
        self,
        source: DatasetConfig,
        pipeline: Sequence[TransformConfig],
        length: int,
        shuffle_buffer: int = 1000,
        on_error: OnError = 'stop',
        max_skipped: float = 0.1,
        max_pixels: int = MOST_PIXELS,
        metainfo: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value, least in (('length', length, 1), ('shuffle_buffer', shuffle_buffer, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f'{name} must be a whole number from {least} on, got {value!r}')
        self.source: Stream = build(DATASETS, source, 'source')
        self.pipeline = Pipeline(pipeline)
        self.length, self.shuffle_buffer, self.max_pixels = length, shuffle_buffer, max_pixels
        self.metainfo: dict[str, Any] = {'classes': list(self.source.classes), **(metainfo or {})}
        self._broken = BrokenSamples(on_error, max_skipped, length, _FLAGS)
        self._readers: dict[int, Reader] = {}
        self._epoch, self._process = 0, os.getpid()
        self.read_by(seed=0, ranks=1, workers=1, batch_size=1)

    def read_by(self, seed: int, ranks: int, workers: int, batch_size: int) -> None:
        """Say who reads: batch after batch goes to the next worker of its rank."""
        self._seed, self._ranks, self._workers = seed, ranks, workers
        self._batch_size = batch_size
        self._readers.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, '_readers': {}}  # for a worker, which opens its own

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The item at a place of the first epoch; going forward is what is cheap."""
        return self.read(index, epoch=0)

    @property
    def skipped(self) -> int:
        """How many different samples could not be read so far, in this process and its workers."""
        return self._broken.count

    def sample_name(self, index: int) -> str:
        """What the sample is called in messages where it has not been read."""
        return f'sample {index} of {type(self.source).__name__}'

    def read(self, index: int, epoch: int) -> dict[str, Any]:
        """The item at a place of an epoch."""
        if not 0 <= index < self.length:
            raise IndexError(f'index {index} is outside the epoch of {self.length} samples')
        reader, place = self._place_of(index, epoch)
        for ahead in range(_MOST_IN_A_ROW):
            sample = reader.at(place, ahead)
            name = f'{self.sample_name(index)}, {sample.name!r}'
            try:
                image = self._decoded(sample.image)
            except OSError as error:
                self._broken.note(zlib.crc32(sample.name.encode()) % _FLAGS, name, error)
                continue
            results = dict(
                img=image,
                label=self.label_of(sample.label),
                index=index,
                img_path=sample.name,
                captions=sample.captions,
            )
            return make_item(self.pipeline, results, name)
        raise ValueError(f'{name} and the {_MOST_IN_A_ROW - 1} before it cannot be read')

    def _decoded(self, image: bytes | str) -> Image.Image:
        return load_rgb(io.BytesIO(image) if isinstance(image, bytes) else image, self.max_pixels)

    def _place_of(self, index: int, epoch: int) -> tuple[Reader, int]:
        """Who reads the sample, and where in its part.

        Ranks take samples in turn; of a rank the workers take batches in turn.
        """
        if self._process != os.getpid():  # forked: the files and pipes are the other process's
            self._not_ours, self._readers, self._process = self._readers, {}, os.getpid()
        if epoch != self._epoch:
            self._readers.clear()
            self._epoch = epoch
        step, rank = divmod(index, self._ranks)
        batch, row = divmod(step, self._batch_size)
        turn, worker = divmod(batch, self._workers)
        number, place = rank * self._workers + worker, turn * self._batch_size + row
        reader = self._readers.get(number)
        if reader is None or reader.first > place:
            readers = self._ranks * self._workers
            reader = Reader(self.source, self._seed, epoch, number, readers, self.shuffle_buffer)
            self._readers[number] = reader
        return reader, place
