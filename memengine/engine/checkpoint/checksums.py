"""Checksums of checkpoints, which travel with what they are of.

A ``.pth`` is a zip archive: its checksum is the archive's comment, which torch's reader skips. In a
``.safetensors`` file it is an entry of the metadata in the header. In a sharded checkpoint a file
``checksums.txt`` lists those of all others. Files that others wrote have none.

The checksum is a CRC-32 (``zlib.crc32``, the fastest of Python's own): any one flipped bit and any
damage within four bytes is found for certain, other damage is missed once in four billion times.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from memengine.engine.checkpoint.files import DamagedError

CHECKSUMS_FILE = 'checksums.txt'
SAFETENSORS_KEY = 'memengine_crc32'  # of the header's metadata; PLACEHOLDER_DIGITS at first

PLACEHOLDER_DIGITS = '00000000'  # what a file's checksum takes its own digits for
_COMMENT_HEAD, _COMMENT_TAIL = b'memengine crc32 ', b' memengine crc32'  # either tells it is ours
_COMMENT_BYTES = len(_COMMENT_HEAD) + len(PLACEHOLDER_DIGITS) + len(_COMMENT_TAIL)
_CHUNK_BYTES = 1 << 20
_HEADER_LIMIT_BYTES = 100_000_000  # of safetensors
_LINE = re.compile(r'([0-9a-f]{8})  ([^\s/\\]+)')


def checksum(path: Path, digits_at: int | None = None) -> str:
    """The checksum of a file, as eight digits.

    Args:
        path: The file.
        digits_at: Byte at which the file holds its own checksum, if it does.

    Cost: one pass over the file, at 1-3 GB/s if it is in memory; no memory of that size.
    """
    value = 0
    with open(path, 'rb') as file:
        if digits_at is not None:
            value = _update(value, file, digits_at)
            value = zlib.crc32(PLACEHOLDER_DIGITS.encode(), value)
            file.seek(len(PLACEHOLDER_DIGITS), os.SEEK_CUR)
        value = _update(value, file, None)
    return f'{value:08x}'


def _update(value: int, file: BinaryIO, left: int | None) -> int:
    """Go on with a checksum over the next ``left`` bytes of a file, or over all that follow."""
    while chunk := file.read(_CHUNK_BYTES if left is None else min(left, _CHUNK_BYTES)):
        value = zlib.crc32(chunk, value)
        left = None if left is None else left - len(chunk)
    return value


def seal(path: Path) -> None:
    """Write a file's checksum into it: a ``.pth`` of ``torch.save``, or a ``.safetensors`` file
    that holds :data:`PLACEHOLDER_DIGITS` as the value of :data:`SAFETENSORS_KEY`."""
    with open(path, 'r+b') as file:
        digits_at = _find_digits(file)
        if digits_at is None:  # an archive, whose end says how long its comment is
            end = file.seek(-2, os.SEEK_END)
            file.write(struct.pack('<H', _COMMENT_BYTES))
            file.write(_COMMENT_HEAD + PLACEHOLDER_DIGITS.encode() + _COMMENT_TAIL)
            digits_at = end + 2 + len(_COMMENT_HEAD)
        file.flush()
        file.seek(digits_at)
        file.write(checksum(path, digits_at).encode())


def _find_digits(file: BinaryIO) -> int | None:
    """The byte at which a file of either kind holds its checksum; None if it has none."""
    size = file.seek(0, os.SEEK_END)
    start = max(size - _COMMENT_BYTES, 0)
    file.seek(start)
    comment = file.read()
    if comment.startswith(_COMMENT_HEAD) or comment.endswith(_COMMENT_TAIL):
        return start + len(_COMMENT_HEAD)
    file.seek(0)
    header_bytes = int.from_bytes(file.read(8), 'little')
    if header_bytes > min(size, _HEADER_LIMIT_BYTES):
        return None
    before = f'"{SAFETENSORS_KEY}":"'.encode()
    at = file.read(header_bytes).find(before)
    return None if at < 0 else 8 + at + len(before)


def write_checksums(folder: Path, known: dict[str, str]) -> Path:
    """List the checksums of all files of a folder in it; those in ``known`` are not computed."""
    names = sorted(path.name for path in folder.iterdir() if path.name != CHECKSUMS_FILE)
    lines = [f'{known.get(name) or checksum(folder / name)}  {name}\n' for name in names]
    (folder / CHECKSUMS_FILE).write_text(''.join(lines))
    return folder / CHECKSUMS_FILE


def verify(path: str | Path, share: slice = slice(None)) -> bool:
    """Compare a checkpoint with its checksums.

    Args:
        path: A file or a sharded checkpoint.
        share: Which of its files, where ranks share the work; by default all.

    Returns:
        Whether it has checksums; False for one of others, of which nothing is known.

    Raises:
        DamagedError: When it is not what was written.
    """
    expected = _expected(Path(path))
    for file, digits_at, digits in expected[share]:
        if not file.is_file():
            raise DamagedError(f'{path} is incomplete: there is no {file.name} in it')
        found = checksum(file, digits_at)
        if found != digits:
            raise DamagedError(
                f'{file} is damaged: its checksum is {found}, and was {digits} when it was written'
            )
    return bool(expected)


def _expected(path: Path) -> list[tuple[Path, int | None, str]]:
    """Of each file that has a checksum: its path, where it holds the digits itself, and these."""
    if path.is_dir():
        listed = path / CHECKSUMS_FILE
        return list(_listed(listed)) if listed.is_file() else []
    if not path.is_file():  # a pipe, say, which would be waited for; reading it is refused
        return []
    with open(path, 'rb') as file:
        digits_at = _find_digits(file)
        if digits_at is None:
            return []
        file.seek(digits_at)
        digits = file.read(len(PLACEHOLDER_DIGITS)).decode('ascii', 'replace')
    return [(path, digits_at, digits)]


def _listed(checksums_file: Path) -> Iterable[tuple[Path, None, str]]:
    text = checksums_file.read_bytes().decode('utf-8', 'replace')
    for line in text.removesuffix('\n').split('\n'):
        match = _LINE.fullmatch(line)
        if match is None:
            raise DamagedError(f'{checksums_file} is damaged, in the line {line!r}')
        yield checksums_file.with_name(match[2]), None, match[1]
