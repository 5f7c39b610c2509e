"""Webdataset's tar files as streams: from local files, or from what a command writes."""

from __future__ import annotations

import random
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, islice
from typing import IO

from memengine.datasets.sources.folders import SUFFIXES
from memengine.datasets.sources.protocols import NO_LABEL
from memengine.datasets.sources.shards import (
    Head,
    files_of,
    key_and_suffix,
    lines_of,
    named_by,
    number_of,
)
from memengine.datasets.streamed.reading import StreamedSample, share_of
from memengine.registry import DATASETS

_PIPE = 'pipe:'


@DATASETS.register_module()
class ShardStream:
    """Webdataset's tar files, read from their beginnings: files, or the output of commands.

    ``pipe:curl -s https://host/train-0001.tar`` runs that command in a shell, and reads what it
    writes: whoever writes the config says what is run. Files of one name that follow each other are
    a sample, as in ``Shards``; compressed tar files are read too. A command that fails, and a tar
    file that is cut off, end the run: an epoch is never shorter than it should be.

    Args:
        shards: A path or ``'pipe:COMMAND'``, with ``{0000..0012}`` for a range, or a list of them.
        resample: Draw the shards with replacement, each reader its own, instead of pass after pass.
            Then readers need not have equally many, nor to wait for the last shard of a pass.
        classes: Names of the classes, by number.

    Raises:
        ValueError: When a local file is not there; while reading, when a command fails, a tar file
            is not whole, or holds no image.

    Webdataset's own reader is not used: version 1.0.2 takes a tar file that is cut off, and a
    command that fails after some output, for the end of a shard.
    """

    def __init__(
        self,
        shards: str | Sequence[str],
        resample: bool = False,
        classes: Sequence[str] | None = None,
    ) -> None:
        patterns = [shards] if isinstance(shards, str) else list(shards)
        self._shards = [
            shard
            for pattern in patterns
            for shard in (named_by(pattern) if pattern.startswith(_PIPE) else files_of(pattern))
        ]
        if not self._shards:
            raise ValueError('shards is an empty list')
        self._resample = resample
        self.classes: list[str] = list(classes or [])

    def samples(self, order: random.Random, reader: int, readers: int) -> Iterator[StreamedSample]:
        """A pass over one reader's shards, or draws without an end."""
        if self._resample:
            draws = iter(lambda: order.choice(self._shards), None)
            for shard in islice(draws, reader, None, readers):
                yield from _samples_of(shard)
        shards = order.sample(self._shards, len(self._shards))
        mine, first, step = share_of(reader, readers, len(shards))
        for number in mine:
            yield from islice(_samples_of(shards[number]), first, None, step)


def _samples_of(shard: str) -> Iterator[StreamedSample]:
    empty = True
    with _opened(shard) as file:
        try:
            with tarfile.open(fileobj=file, mode='r|*', tarinfo=Head) as tar:
                named = ((key_and_suffix(member), member) for member in tar)
                files = ((*name, member) for name, member in named if name)
                for key, parts in groupby(files, key=lambda each: each[0]):
                    contents = {suffix: _content(tar, member) for _, suffix, member in parts}
                    if image := next((s for s in contents if f'.{s}' in SUFFIXES), None):
                        empty = False
                        yield _sample(f'{shard}:{key}', image, contents)
        except (tarfile.TarError, EOFError) as error:
            raise _CutError(f'{shard!r} is no whole tar file: {error}') from error
    if empty:
        raise ValueError(f'{shard!r} holds no {", ".join(SUFFIXES)}')


class _CutError(ValueError):
    """A tar file is not whole, for which the command that writes it may be the cause."""


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None  # it is a file's head
    return file.read()


def _sample(name: str, image: str, contents: dict[str, bytes]) -> StreamedSample:
    label = number_of(contents['cls'], f'{name}.cls') if 'cls' in contents else NO_LABEL
    captions = lines_of(contents['txt']) if 'txt' in contents else []
    return StreamedSample(name, contents[image], label, captions)


@contextmanager
def _opened(shard: str) -> Iterator[IO[bytes]]:
    """A shard to read; ValueError if it comes from a command that fails."""
    if not shard.startswith(_PIPE):
        with open(shard, 'rb') as local:
            yield local
        return
    command = shard.removeprefix(_PIPE)
    bash = shutil.which('bash')  # says if any command of `a | b` fails; sh only of the last one
    shell = [bash, '-o', 'pipefail', '-c'] if bash else ['sh', '-c']
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([*shell, command], stdout=subprocess.PIPE, stderr=said)
        assert process.stdout is not None
        try:
            yield process.stdout
            failed = None
        except _CutError as error:
            failed = error
        except BaseException:  # nobody reads on
            process.stdout.close()
            process.terminate()
            process.wait()
            raise
        while process.stdout.read(1 << 20):  # what follows the end of the tar file
            pass
        process.stdout.close()
        if status := process.wait():
            said.seek(0)
            last = said.read().decode('utf-8', 'replace').strip().rpartition('\n')[2]
            raise ValueError(
                f'{shard!r} failed with exit status {status}{f": {last}" if last else ""}'
            ) from failed
        if failed:
            raise failed
