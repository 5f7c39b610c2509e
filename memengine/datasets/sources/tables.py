"""Images that a table lists, with labels and captions: CSV, TSV, JSON lines, Parquet, COCO."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from PIL import Image

from memengine.datasets.build import one_line
from memengine.datasets.sources.folders import MOST_PIXELS, load_rgb
from memengine.datasets.sources.protocols import NO_LABEL
from memengine.registry import DATASETS
from memengine.suggest import did_you_mean, import_optional

_NUMBER = re.compile(r'[+-]?\d+(\.\d*)?')


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
        ValueError: When the file, a column or a value of one is missing, a row has more values
            than there are heads or a quotation mark that nothing closes, or two rows of a path have
            different labels.
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
                labels.append(_label(row, label, where) if label is not None else None)
            elif label is not None and labels[rows[file]] != _label(row, label, where):
                raise ValueError(f'{where}: {file!r} has another label in a row before')
            if caption is not None:
                self._captions[rows[file]] += _texts(row, caption, where)
        if not rows:
            raise ValueError(f'{table!r} lists no image')
        if label is None:
            self.labels = [NO_LABEL] * len(rows)
            return
        names = sorted(set(map(str, labels)), key=_by_value)
        numbers = {name: number for number, name in enumerate(names)}
        self.classes, self.labels = names, [numbers[str(each)] for each in labels]


def _by_value(name: str) -> tuple[bool, float, str]:
    """Where the class of a name comes: numbers by value, then the others."""
    is_number = _NUMBER.fullmatch(name) is not None
    return not is_number, float(name) if is_number else 0.0, name


def _value(row: Mapping[str, Any], column: str, where: str) -> Any:
    if column not in row:
        raise ValueError(
            f'{where}: there is no column {column!r}{did_you_mean(column, row, after=";")} '
            f'(there are {", ".join(map(str, row))})'
        )
    value = row[column]
    is_blank = isinstance(value, str) and not value.strip()
    if is_blank or value is None or value == [] or value != value:  # NaN: pandas writes it so
        raise ValueError(f'{where}: {column!r} is empty')
    return value


def _label(row: Mapping[str, Any], column: str, where: str) -> Any:
    value = _value(row, column, where)
    if not isinstance(value, (str, int, float)):
        raise ValueError(f'{where}: {column!r} must be a text or a number, got {value!r}')
    return value


def _texts(row: Mapping[str, Any], column: str, where: str) -> list[str]:
    value = _value(row, column, where)
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError(f'{where}: {column!r} must be a text, or a list of them, got {value!r}')
    return texts


def _rows_of(table: Path) -> Iterator[Mapping[str, Any]]:
    if not table.is_file():
        raise ValueError(f'there is no file {str(table)!r}; set table to the list of images')
    if table.suffix == '.parquet':
        parquet = import_optional('pyarrow.parquet', 'a .parquet table')
        for batch in parquet.ParquetFile(table).iter_batches():
            yield from batch.to_pylist()
    elif table.suffix in _ROWS_OF_TEXT:
        try:
            with table.open(newline='', encoding='utf-8-sig') as file:
                yield from _ROWS_OF_TEXT[table.suffix](file, str(table))
        except UnicodeDecodeError as error:
            raise ValueError(f'{str(table)!r} is no text in UTF-8: {error}') from error
    else:
        raise ValueError(f'table must be a .csv, .tsv, .jsonl or .parquet file, got {str(table)!r}')


def _lines_of_json(file: TextIO, table: str) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            row.keys()
        except (ValueError, AttributeError) as error:
            raise ValueError(f'{table}, line {number}: no JSON object') from error
        yield row


def _separated(file: TextIO, table: str, dialect: str) -> Iterator[Mapping[str, Any]]:
    # Strict, as a mark that nothing closes would take all lines up to the next one for one text.
    reader = csv.DictReader(file, dialect=dialect, strict=True)
    try:
        for row in reader:
            # The key of what has no head is None. Ends of lines may be empty.
            if any(more := row.pop(None, [])):
                raise ValueError(
                    f'{table}, line {reader.line_num}: {len(more)} value(s) more than there are '
                    f'heads ({", ".join(more)[:50]!r}): put a text that holds the separator into '
                    'quotation marks'
                )
            yield row
    except csv.Error as error:
        raise ValueError(
            f'{table}, line {reader.line_num + 1}: {error}; a text that begins with a quotation '
            'mark is put into such marks, and those within it are doubled'
        ) from error


_ROWS_OF_TEXT: Mapping[str, Callable[[TextIO, str], Iterator[Mapping[str, Any]]]] = {
    '.csv': partial(_separated, dialect='excel'),
    '.tsv': partial(_separated, dialect='excel-tab'),
    '.jsonl': _lines_of_json,
}


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
                if not isinstance(each['caption'], str) or not each['caption'].strip():
                    raise ValueError(f'an annotation of image {each["image_id"]} has no text')
                texts.setdefault(each['image_id'], []).append(each['caption'])
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
