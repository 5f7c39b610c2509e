"""A source in two parts: one to train on, one that is held out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from memengine.datasets.build import build
from memengine.datasets.sources.protocols import NO_LABEL, HasCaptions, HasLabels, HasPaths
from memengine.registry import DATASETS, DatasetConfig


@DATASETS.register_module()
class Split:
    """One of the two parts of a source, which together hold each of its samples once.

    Args:
        source: The source that is split, or its config. Both parts need the same one.
        part: ``'train'`` or ``'held_out'``.
        share: Of the samples that are held out, in (0, 1). Where the source knows its labels, each
            class gives this share, and at least one sample of two or more.
        files: Instead of ``share``: the files that are held out, as a list, or a text file with one
            a line; each is the end of one path of the source, as ``cat/3.jpg``.
        seed: Of the draw. What is drawn of a class does not depend on the others.

    Raises:
        ValueError: When a setting is wrong, a file is in no path or several, or a part is empty.
    """

    def __init__(
        self,
        source: DatasetConfig,
        part: Literal['train', 'held_out'],
        share: float | None = None,
        files: str | Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        if part not in ('train', 'held_out'):
            raise ValueError(f"part must be 'train' or 'held_out', got {part!r}")
        if (share is None) == (files is None):
            raise ValueError('give either share or files, which say what is held out')
        self.source: Any = build(DATASETS, source, 'source')
        if files is not None:
            held_out = _listed(self.source, len(self.source), files)
        elif share is not None and 0 < share < 1:
            held_out = _drawn(self.source, share, seed)
        else:
            raise ValueError(f'share must lie between 0 and 1, got {share!r}')
        rows = range(len(self.source))
        self.rows = [row for row in rows if (row in held_out) == (part == 'held_out')]
        if not self.rows:
            raise ValueError(f'nothing of the {len(self.source)} samples is left for {part!r}')
        self.classes: list[str] = self.source.classes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return self.source[self.rows[index]]

    @property
    def labels(self) -> list[int]:
        """The label of each sample, -1 where the source does not know them."""
        every = self.source.labels if isinstance(self.source, HasLabels) else None
        return [every[row] if every is not None else NO_LABEL for row in self.rows]

    def path(self, index: int) -> str:
        """The file of sample ``index``, or what else it is called."""
        row = self.rows[index]
        return self.source.path(row) if isinstance(self.source, HasPaths) else f'row {row}'

    def captions(self, index: int) -> list[str]:
        """The texts of sample ``index``; none where the source has no texts."""
        has_captions = isinstance(self.source, HasCaptions)
        return self.source.captions(self.rows[index]) if has_captions else []


def _drawn(source: Any, share: float, seed: int) -> set[int]:
    labels = source.labels if isinstance(source, HasLabels) else [0] * len(source)
    held_out: set[int] = set()
    by_label: dict[int, list[int]] = {}
    for row, label in enumerate(labels):
        by_label.setdefault(label, []).append(row)
    for label, rows in by_label.items():
        most = max(len(rows) - 1, 0)
        count = min(max(round(share * len(rows)), 1), most)
        order = np.random.default_rng([seed, label + 1]).permutation(len(rows))
        held_out.update(rows[position] for position in order[:count])
    return held_out


def _listed(source: Any, size: int, files: str | Sequence[str]) -> set[int]:
    if not isinstance(source, HasPaths):
        raise ValueError(
            f'files needs a source whose images are files, not {type(source).__name__}'
        )
    if isinstance(files, str):
        if not Path(files).is_file():
            raise ValueError(f'there is no file {files!r}; set files to a list, one path a line')
        files = Path(files).read_text(encoding='utf-8').split('\n')
    ends: dict[tuple[str, ...], list[int]] = {}
    paths = [source.path(row) for row in range(size)]
    for row, path in enumerate(paths):
        parts = Path(path).parts
        for start in range(len(parts)):
            ends.setdefault(parts[start:], []).append(row)
    held_out = set()
    for file in filter(None, map(str.strip, files)):
        rows = ends.get(Path(file).parts, [])
        if len(rows) != 1:
            raise ValueError(f'files: {file!r} is the end of {len(rows)} paths of the source')
        held_out.add(rows[0])
    return held_out
