"""Samples in tar files of webdataset's layout, read by number."""

from __future__ import annotations

import io
import itertools
import logging
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mmengine.logging import print_log
from PIL import Image

from memengine.datasets.sources.folders import MOST_PIXELS, SUFFIXES, load_rgb
from memengine.datasets.sources.protocols import NO_LABEL
from memengine.registry import DATASETS


class Head(tarfile.TarInfo):
    """A file's head in a tar file that is whole: one that is cut off would else just be shorter."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Head:
        """As tarfile's, which takes whatever is no head for the end, as long as one came before."""
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):
                raise  # the mark at the end
            raise tarfile.ReadError(f'it is cut off, or no tar file: {error}') from error


def key_and_suffix(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """Which sample a file belongs to, and as what; None for what belongs to none."""
    folder, _, name = member.name.rpartition('/')
    stem, _, suffix = name.partition('.')
    if not (member.isfile() and stem and suffix):
        return None
    return f'{folder}/{stem}' if folder else stem, suffix.lower()


class _Part(NamedTuple):
    """Where a file lies in a shard: bytes from ``offset`` on."""

    offset: int
    size: int


class _Sample(NamedTuple):
    shard: str
    key: str
    parts: dict[str, _Part]

    @property
    def image(self) -> str | None:
        """The part that is the image."""
        return next((part for part in self.parts if f'.{part}' in SUFFIXES), None)


@DATASETS.register_module()
class Shards:
    """Images in webdataset's layout: tar files in which files of one name are a sample's parts.

    ``0001.jpg`` with ``0001.txt`` (its captions, one a line) and ``0001.cls`` (its label, a number)
    are a sample. Where each part lies is read from the tar's heads once; samples are read by number
    from then on. So they are shuffled whole, split by rank and worker, resumed exactly, repeated
    and counted when broken (``on_error='skip'``) as any other source's, and nothing has to be
    installed. Only local files that are not compressed can be read in this way.

    Args:
        shards: A path, with ``{0000..0012}`` for a range and ``*`` for any text, or a list of them.
        classes: Names of the classes, by number; by default numbers as far as labels go.
        max_pixels: An image of more pixels cannot be read.

    Raises:
        ValueError: When there is no such file, one is no tar file, or none holds an image.

    Cost: a pass over the heads of each shard, and about 1 kB of memory a sample.
    """

    def __init__(
        self,
        shards: str | Sequence[str],
        classes: Sequence[str] | None = None,
        max_pixels: int = MOST_PIXELS,
    ) -> None:
        patterns = [shards] if isinstance(shards, str) else list(shards)
        files = [file for pattern in patterns for file in files_of(pattern)]
        self._max_pixels = max_pixels
        every = [sample for file in files for sample in _samples_of(file)]
        self._samples = [each for each in every if each.image]
        _warn_of_dots(every)
        if not self._samples:
            raise ValueError(f'there is no {", ".join(SUFFIXES)} in {files}')
        self.labels = [self._label(sample) for sample in self._samples]
        named = (
            list(classes) if classes is not None else list(map(str, range(max(self.labels) + 1)))
        )
        if max(self.labels) >= len(named):
            raise ValueError(
                f'classes has {len(named)} names, but there is a label {max(self.labels)}'
            )
        self.classes: list[str] = named

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        sample = self._samples[index]
        assert sample.image is not None  # those that have none were left out
        file = io.BytesIO(_read(sample, sample.image))
        return load_rgb(file, self._max_pixels), self.labels[index]

    def path(self, index: int) -> str:
        """The shard of sample ``index``, and its name in it."""
        sample = self._samples[index]
        return f'{sample.shard}:{sample.key}'

    def captions(self, index: int) -> list[str]:
        """The lines of its ``.txt``; none where it has none."""
        sample = self._samples[index]
        return lines_of(_read(sample, 'txt')) if 'txt' in sample.parts else []

    @staticmethod
    def _label(sample: _Sample) -> int:
        if 'cls' not in sample.parts:
            return NO_LABEL
        return number_of(_read(sample, 'cls'), f'{sample.shard}: {sample.key}.cls')


def number_of(content: bytes, name: str) -> int:
    """The label that a ``.cls`` file holds."""
    text = content.decode('ascii', 'replace').strip()
    if not text.isdecimal():
        raise ValueError(f'{name} must hold a number, got {text!r}')
    return int(text)


def lines_of(content: bytes) -> list[str]:
    """The captions that a ``.txt`` file holds."""
    lines = content.decode('utf-8', 'replace').splitlines()
    return [line.strip() for line in lines if line.strip()]


def named_by(pattern: str) -> list[str]:
    """What a pattern with ``{0000..0012}`` stands for."""
    pieces = re.split(r'\{(\d+)\.\.(\d+)\}', pattern)
    choices: list[list[str]] = [[pieces[0]]]
    for first, last, after in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
        numbers = range(int(first), int(last) + 1)
        choices += [[f'{number:0{len(first)}d}' for number in numbers], [after]]
    return list(map(''.join, itertools.product(*choices)))


def files_of(pattern: str) -> list[str]:
    """The local files that a pattern stands for."""
    if re.match(r'\w+:', pattern):
        raise ValueError(
            f'{pattern!r}: Shards are read by place, from local files only; copy them, or read '
            "them as a stream: dataset type='StreamedImageDataset', source type='ShardStream'"
        )
    files: list[str] = []
    for path in named_by(pattern):
        found = Path(path).expanduser()
        several = sorted(map(str, found.parent.glob(found.name))) if '*' in path else [str(found)]
        if not several or not all(Path(file).is_file() for file in several):
            raise ValueError(f'there is no file {path!r}; set shards to where the tar files lie')
        files += several
    return files


def _samples_of(shard: str) -> list[_Sample]:
    """The samples of a shard, in its order."""
    samples: dict[str, _Sample] = {}
    try:
        with tarfile.open(shard, 'r:', tarinfo=Head) as tar:
            for member in tar:
                if named := key_and_suffix(member):
                    sample = samples.setdefault(named[0], _Sample(shard, named[0], {}))
                    sample.parts[named[1]] = _Part(member.offset_data, member.size)
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f'{shard!r} is no whole tar file without compression: {error}') from error
    return list(samples.values())


def _warn_of_dots(samples: Sequence[_Sample]) -> None:
    """Say which images are taken for further parts of a sample that has none, by their names."""
    left_out = [
        f'{sample.shard}:{sample.key}.{part}'
        for sample in samples
        for part in sample.parts
        if not sample.image and f'.{part}'.endswith(SUFFIXES)
    ]
    if left_out:
        print_log(
            f'Shards: {len(left_out)} images are left out, as a sample is called by what stands '
            f'before the first dot of a name ({left_out[0]!r}): write names with one dot',
            logger='current',
            level=logging.WARNING,
        )


def _read(sample: _Sample, suffix: str) -> bytes:
    part = sample.parts[suffix]
    with open(sample.shard, 'rb') as file:
        file.seek(part.offset)
        return file.read(part.size)
