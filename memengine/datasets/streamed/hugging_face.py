"""Data sets of Hugging Face's ``datasets``, streamed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

from memengine.datasets.sources.hugging_face import check_columns, texts_of
from memengine.datasets.sources.protocols import NO_LABEL
from memengine.datasets.streamed.reading import StreamedSample, share_of
from memengine.registry import DATASETS
from memengine.suggest import import_optional

_ROWS = 16  # that are handed over at a time


@DATASETS.register_module()
class HuggingFaceStream:
    """A split of a data set of Hugging Face's ``datasets`` that is read without being fetched.

    Args:
        path: What ``datasets.load_dataset`` takes with ``streaming=True``: a name on the hub, or a
            folder of data files.
        split: Which part of it.
        name: The configuration of a data set that has several.
        image: The column of the images.
        label: The column of the labels, whole numbers; None for images without, whose label is -1.
        caption: The column of the captions, a text or a list of them; None for images without.

    Raises:
        ImportError: When ``datasets`` is missing.
        ValueError: When there is no such column; while reading, when a label is no whole number.

    The files are shuffled anew for each pass, and shared out to the readers; where there are fewer
    files than readers, several read the same one.
    """

    def __init__(
        self,
        path: str,
        split: str = 'train',
        name: str | None = None,
        image: str = 'image',
        label: str | None = None,
        caption: str | None = None,
    ) -> None:
        datasets = import_optional('datasets', 'HuggingFaceStream')
        rows = datasets.load_dataset(path, name, split=split, streaming=True)
        check_columns(rows.column_names or [], image=image, label=label, caption=caption)
        # Undecoded, so that images are read, and refused, as those of other sources.
        self._rows = rows.cast_column(image, datasets.Image(decode=False))
        self._image, self._label, self._caption = image, label, caption
        self._name = f'{path} ({split})'
        feature = (rows.features or {}).get(label)
        self.classes: list[str] = []
        if isinstance(feature, datasets.ClassLabel):
            self.classes = list(feature.names)

    def samples(self, order: random.Random, reader: int, readers: int) -> Iterator[StreamedSample]:
        """A pass over one reader's files."""
        files = self._rows.num_shards
        shuffled = order.sample(range(files), files)
        mine, first, step = share_of(reader, readers, files)
        for file in (shuffled[number] for number in mine):
            rows = self._rows.shard(num_shards=files, index=file, contiguous=False)
            for row, values in islice(enumerate(_one_by_one(rows)), first, None, step):
                yield self._sample(f'{self._name}, row {row} of file {file}', values)

    def _sample(self, name: str, row: dict[str, Any]) -> StreamedSample:
        image, label = row[self._image], NO_LABEL
        if self._label is not None:
            label = row[self._label]
            if not isinstance(label, int) or label < 0:
                raise ValueError(f'{name}: label must be a whole number, got {label!r}')
        texts = [] if self._caption is None else texts_of(row[self._caption])
        content = image['path'] if image['bytes'] is None else image['bytes']
        return StreamedSample(name, content, label, texts)


def _one_by_one(rows: Any) -> Iterator[dict[str, Any]]:
    """All rows; by batches, as the library would share rows out to workers a second time."""
    for batch in rows.iter(batch_size=_ROWS):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))
