"""Data sets of Hugging Face's ``datasets``, from a folder or by name."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from memengine.datasets.sources.folders import MOST_PIXELS, load_rgb
from memengine.datasets.sources.protocols import NO_LABEL
from memengine.registry import DATASETS
from memengine.suggest import did_you_mean, import_optional


@DATASETS.register_module()
class HuggingFace:
    """A split of a data set of Hugging Face's ``datasets``, read by row.

    Args:
        path: A folder that ``save_to_disk`` wrote, or what ``datasets.load_dataset`` takes: a name
            on the hub, which is fetched into its cache, or a folder of data files.
        split: Which part of it.
        name: The configuration of a data set that has several.
        image: The column of the images.
        label: The column of the labels, whole numbers; None for images without, whose label is -1.
        caption: The column of the captions, a text or a list of them; None for images without.
        max_pixels: An image of more pixels cannot be read.

    Raises:
        ImportError: When ``datasets`` is missing.
        ValueError: When there is no such split or column, or labels are no whole numbers.

    Streams, which have no rows to shuffle whole, are read by ``HuggingFaceStream``.
    """

    def __init__(
        self,
        path: str,
        split: str = 'train',
        name: str | None = None,
        image: str = 'image',
        label: str | None = None,
        caption: str | None = None,
        max_pixels: int = MOST_PIXELS,
    ) -> None:
        datasets = import_optional('datasets', 'HuggingFace')
        on_disk = any(Path(path, file).is_file() for file in ('state.json', 'dataset_dict.json'))
        if on_disk:
            rows = datasets.load_from_disk(path)
            if isinstance(rows, dict):
                if split not in rows:
                    raise ValueError(f'{path!r} has no split {split!r} (it has {", ".join(rows)})')
                rows = rows[split]
        else:
            rows = datasets.load_dataset(path, name, split=split)
        check_columns(rows.column_names, image=image, label=label, caption=caption)
        # Undecoded, so that images are read, and refused, as those of other sources.
        self._rows = rows.cast_column(image, datasets.Image(decode=False))
        self._image, self._caption, self._max_pixels = image, caption, max_pixels
        self.labels: list[int] = [NO_LABEL] * len(rows)
        self.classes: list[str] = []
        if label is not None:
            self.labels, self.classes = _labels(list(rows[label]), rows.features[label], label)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        image = self._rows[index][self._image]
        if image['bytes'] is None:
            return load_rgb(image['path'], self._max_pixels), self.labels[index]
        return load_rgb(io.BytesIO(image['bytes']), self._max_pixels), self.labels[index]

    def captions(self, index: int) -> list[str]:
        """The texts of sample ``index``; none without a column of captions."""
        if self._caption is None:
            return []
        return texts_of(self._rows[index][self._caption])


def check_columns(known: Sequence[str], **settings: str | None) -> None:
    """Raise ValueError for a setting that names a column that is not there."""
    for setting, column in settings.items():
        if column is not None and column not in known:
            hint = did_you_mean(column, known, after=';')
            raise ValueError(
                f'{setting}: there is no column {column!r}{hint} (known: {", ".join(known)})'
            )


def texts_of(value: str | Sequence[str | None] | None) -> list[str]:
    """The captions that a row's field holds, one or several; none where it is empty."""
    texts = [value] if isinstance(value, str) else value or []
    return [text for text in texts if text and text.strip()]


def _labels(values: list[Any], feature: Any, column: str) -> tuple[list[int], list[str]]:
    wrong = [each for each in values if not isinstance(each, int) or each < 0]
    if wrong:
        raise ValueError(f'label: column {column!r} must hold whole numbers, got {wrong[0]!r}')
    numbered = list(map(str, range(max(values) + 1)))
    return values, list(getattr(feature, 'names', numbered))
