"""A source of images and the pipeline that makes training or validation items of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from mmengine.logging import print_log
from torch.utils.data import Dataset

from memengine.datasets.build import build, one_line
from memengine.datasets.sources.broken import BrokenSamples, OnError
from memengine.datasets.sources.classes import NamedClasses
from memengine.datasets.sources.protocols import HasCaptions, HasLabels, HasPaths
from memengine.datasets.transforms.pipeline import Pipeline
from memengine.registry import DATASETS, DatasetConfig, TransformConfig


@DATASETS.register_module()
class ImageDataset(NamedClasses, Dataset):
    """The items ``dict(inputs=..., data_samples=dict(label=int, index=int))`` of a source.

    Args:
        source: Where images and labels come from: a config of DATASETS (``ImageFolder``, ...) or
            any map-style object that returns ``(PIL image, int)`` and has ``classes``.
        pipeline: Configs of TRANSFORMS; the last one is ``PackInputs``.
        indices: Which of the source's samples to use: a list of positions, or a number for the
            first so many (negative: the last). Defaults to all.
        on_error: ``'stop'`` (or ``'raise'``) stops at an image that cannot be read, naming it.
            ``'skip'`` takes the next readable sample instead, warns once for each file, and counts
            it.
        max_skipped: The share of the samples that may be skipped, in [0, 1]; more stop, too, as
            then not a file is damaged, but a disk.
        metainfo: More entries for ``dataset.metainfo``, which holds ``classes``.

    Raises:
        ValueError: When a setting is wrong; on access, when an image cannot be read, or a
            transform fails (both name the sample and its file).
    """

    pipeline_type: type[Pipeline] = Pipeline

    def __init__(
        self,
        source: DatasetConfig,
        pipeline: Sequence[TransformConfig],
        indices: int | Sequence[int] | None = None,
        on_error: OnError = 'stop',
        max_skipped: float = 0.1,
        metainfo: Mapping[str, Any] | None = None,
    ) -> None:
        self.source = build(DATASETS, source, 'source')
        self._path = self.source.path if isinstance(self.source, HasPaths) else None
        has_captions = isinstance(self.source, HasCaptions)
        self._captions = self.source.captions if has_captions else None
        self.pipeline = self.pipeline_type(pipeline)
        self.indices = positions(indices, len(self.source))
        if isinstance(indices, int) and isinstance(self.source, HasLabels):
            _warn_of_lost_classes(indices, self.indices, self.source.labels)
        self.metainfo: dict[str, Any] = {'classes': list(self.source.classes), **(metainfo or {})}
        if len(self) == 0:
            raise ValueError('the dataset is empty: its source or its indices hold no sample')
        self._broken = BrokenSamples(on_error, max_skipped, len(self))

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The item at ``index``, or at the next readable one with ``on_error='skip'``."""
        results = self._read(index)
        return make_item(self.pipeline, results, self.sample_name(results['index']))

    @property
    def skipped(self) -> int:
        """How many different samples could not be read so far, in this process and its workers."""
        return self._broken.count

    @property
    def _source_name(self) -> str:
        return type(self.source).__name__

    def full_init(self) -> None:
        """Nothing: all is read already; MMEngine's wrappers, as ``RepeatDataset``, ask for it."""

    def sample_name(self, index: int) -> str:
        """What the sample is called in messages, with its file if it has one."""
        file = f', {self._path(self.indices[index])!r}' if self._path is not None else ''
        return f'sample {index} of {self._source_name}{file}'

    def _read(self, index: int) -> dict[str, Any]:
        """What the pipeline starts from, at ``index`` or the next readable one."""
        if not 0 <= index < len(self):
            raise IndexError(f'index {index} is outside the dataset of {len(self)} samples')
        for position in range(index, index + len(self)):
            row = position % len(self)
            sample = self._load(row)
            if sample is not None:
                label = self.label_of(int(sample[1]))
                results: dict[str, Any] = {'img': sample[0], 'label': label, 'index': row}
                if self._path is not None:
                    results['img_path'] = self._path(self.indices[row])
                if self._captions is not None:
                    results['captions'] = self._captions(self.indices[row])
                return results
        raise ValueError(f'none of the {len(self)} images of {self._source_name} can be read')

    def _load(self, index: int) -> tuple[Any, int] | None:
        """Image and label, or None where it is unreadable and to be skipped."""
        try:
            return self._sample(self.indices[index])
        except OSError as error:
            self._broken.note(index, self.sample_name(index), error)
            return None

    def _sample(self, row: int) -> tuple[Any, int]:
        """What the source has at a row."""
        return self.source[row]


def make_item(pipeline: Pipeline, results: dict[str, Any], name: str) -> dict[str, Any]:
    """What a pipeline makes of a sample; ValueError names the sample where it fails."""
    try:
        item = pipeline(results)
    except ValueError as error:
        raise ValueError(f'{name}: {one_line(error)}') from error
    if 'inputs' not in item or 'data_samples' not in item:
        raise ValueError(
            f'{name}: the pipeline must end with PackInputs, but returned the keys {sorted(item)}'
        )
    return item


def _warn_of_lost_classes(indices: int, chosen: Sequence[int], labels: Sequence[int]) -> None:
    """Say when the first samples, or the last, are of fewer classes than all are."""
    kept, there = len({labels[row] for row in chosen}), len(set(labels))
    if kept < min(there, len(chosen)):
        print_log(
            f'indices={indices} takes samples of {kept} of {there} classes, as the source is '
            'sorted by class; a list of positions takes others',
            logger='current',
            level=logging.WARNING,
        )


def positions(indices: int | Sequence[int] | None, size: int) -> Sequence[int]:
    """The rows of the source that the dataset holds, in its order."""
    if indices is None:
        return range(size)
    if isinstance(indices, int):
        if not 0 < abs(indices) <= size:
            raise ValueError(f'indices={indices} asks for more or less than the {size} samples')
        return range(indices) if indices > 0 else range(size + indices, size)
    chosen = [int(row) for row in indices]
    outside = [row for row in chosen if not 0 <= row < size]
    if outside:
        raise ValueError(f'indices must lie in 0..{size - 1}, got {outside[0]}')
    return chosen
