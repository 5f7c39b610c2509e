"""Images that a table lists, with labels and captions: CSV, TSV, JSON lines, Parquet, COCO."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from memengine.datasets.build import one_line
from memengine.datasets.sources.folders import MOST_PIXELS, load_rgb
from memengine.datasets.sources.protocols import NO_LABEL
from memengine.registry import DATASETS
from memengine.suggest import did_you_mean, import_optional


class _Listed:
    """Images by path, with labels and captions; what the sources of this file share."""

    def __init__(self, root: str, max_pixels: int) -> None:
        self._root, self._max_pixels = Path(root).expanduser(), max_pixels
        if not self._root.is_dir():
            raise ValueError(f'there is no folder {root!r}; set root to where the images lie')
        self._paths: list[str] = []
        self._captions: list[list[str]] = []
        self.classes: list[str] = []
        self.labels: list[int] = []

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return load_rgb(self.path(index), self._max_pixels), self.labels[index]

    def path(self, index: int) -> str:
        """The file that sample ``index`` is read from."""
        return str(self._root / self._paths[index])

    def captions(self, index: int) -> list[str]:
        """The texts of sample ``index``."""
        return self._captions[index]


@DATASETS.register_module()
class ImageTable(_Listed):
    """Images that a table lists, one a row: CSV, TSV, JSON lines or Parquet.

    Rows with the same path are one image with several captions; in JSON lines and Parquet the
    captions of an image may be a list, too.

    Args:
        table: The file: ``.csv`` or ``.tsv`` with heads, ``.jsonl``, ``.parquet`` (needs pyarrow).
        root: The folder that paths are relative to.
        path: The column of the paths.
        caption: The column of the captions; None for images without.
        label: The column of the labels, in whose sorted order the classes are numbered (numbers by
            value); None for images without, whose label is -1.
        max_pixels: An image of more pixels cannot be read.

    Raises:
        ValueError: When the file, a column or a value of one is missing, or two rows of a path
            have different labels.
        ImportError: When pyarrow is missing.
    """

    def __init__(
        self,
        table: str,
        root: str = '.',
        path: str = 'path',
        caption: str | None = None,
        label: str | None = None,
        max_pixels: int = MOST_PIXELS,
    ) -> None:
        super().__init__(root, max_pixels)
        labels: list[Any] = []
        rows: dict[str, int] = {}
        for number, row in enumerate(_rows_of(Path(table).expanduser()), 1):
            where = f'{table}, row {number}'
            file = str(_value(row, path, where))
            if file not in rows:
                rows[file] = len(rows)
                self._paths.append(file)
                self._captions.append([])
                labels.append(_value(row, label, where) if label is not None else None)
            elif label is not None and labels[rows[file]] != row[label]:
                raise ValueError(f'{where}: {file!r} has another label in a row before')
            if caption is not None:
                texts = _value(row, caption, where)
                texts = [texts] if isinstance(texts, str) else texts
                self._captions[rows[file]] += map(str, texts)
        if not rows:
            raise ValueError(f'{table!r} lists no image')
        if label is None:
            self.labels = [NO_LABEL] * len(rows)
            return
        stated = set(map(str, labels))
        names = sorted(filter(str.isdecimal, stated), key=lambda name: (int(name), name))
        names += sorted(name for name in stated if not name.isdecimal())
        numbers = {name: number for number, name in enumerate(names)}
        self.classes, self.labels = names, [numbers[str(each)] for each in labels]


def _value(row: Mapping[str, Any], column: str, where: str) -> Any:
    if column not in row:
        raise ValueError(
            f'{where}: there is no column {column!r}{did_you_mean(column, row, after=";")} '
            f'(there are {", ".join(map(str, row))})'
        )
    if row[column] in (None, '', []):
        raise ValueError(f'{where}: {column!r} is empty')
    return row[column]


def _rows_of(table: Path) -> Iterator[Mapping[str, Any]]:
    if not table.is_file():
        raise ValueError(f'there is no file {str(table)!r}; set table to the list of images')
    if table.suffix in ('.csv', '.tsv'):
        with table.open(newline='', encoding='utf-8-sig') as file:
            yield from csv.DictReader(
                file, dialect='excel-tab' if table.suffix == '.tsv' else 'excel'
            )
    elif table.suffix == '.jsonl':
        with table.open(encoding='utf-8') as lines:
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line)
                    row.keys()
                except (ValueError, AttributeError) as error:
                    raise ValueError(f'{table}, line {number}: no JSON object') from error
                yield row
    elif table.suffix == '.parquet':
        parquet = import_optional('pyarrow.parquet', 'a .parquet table')
        for batch in parquet.ParquetFile(table).iter_batches():
            yield from batch.to_pylist()
    else:
        raise ValueError(f'table must be a .csv, .tsv, .jsonl or .parquet file, got {str(table)!r}')


@DATASETS.register_module()
class CocoCaptions(_Listed):
    """Images with captions in COCO's layout: ``captions_*.json`` and the folder of its images.

    Args:
        root: The folder of the images.
        annotations: The JSON file.
        max_pixels: An image of more pixels cannot be read.

    Raises:
        ValueError: When the file or the folder is missing, or the file is of another form.
    """

    def __init__(self, root: str, annotations: str, max_pixels: int = MOST_PIXELS) -> None:
        super().__init__(root, max_pixels)
        if not Path(annotations).is_file():
            raise ValueError(
                f'there is no file {annotations!r}; set annotations to captions_*.json of the split'
            )
        try:
            content = json.loads(Path(annotations).read_text(encoding='utf-8'))
            texts: dict[int, list[str]] = {}
            for each in content['annotations']:
                texts.setdefault(each['image_id'], []).append(str(each['caption']))
            images = {each['id']: str(each['file_name']) for each in content['images']}
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f'{annotations!r} holds no captions of COCO: {one_line(error)}'
            ) from error
        ids = sorted(images.keys() & texts.keys())
        if not ids:
            raise ValueError(f'{annotations!r} has no image with a caption')
        self._paths = [images[each] for each in ids]
        self._captions = [texts[each] for each in ids]
        self.labels = [NO_LABEL] * len(ids)
