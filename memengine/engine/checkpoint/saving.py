"""Checkpoints are written whole or not at all, in the foreground or behind training's back."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from memengine.engine.checkpoint.checksums import seal
from memengine.engine.checkpoint.files import CheckpointError, atomic_write
from memengine.engine.distributed.processes import cpu_group, do_on_all_ranks

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


class SaveError(CheckpointError):
    """A checkpoint that could not be written; the one before is as it was.

    Attributes:
        exit_status: What the command line ends with if training cannot go on without it: EX_IOERR.
    """

    exit_status = 74


def explain_save_error(error: BaseException, folder: Path) -> str:
    """Why nothing could be written to a folder, and what to do."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):  # torch puts its own before it
        cause = cause.__cause__ or cause.__context__
    number = cause.errno if isinstance(cause, OSError) else None
    if not folder.is_dir():
        return f'{folder} is not there, and cannot be made: was it moved, or unmounted? Put it back'
    if number in _READ_ONLY or not os.access(folder, os.W_OK):
        return f'{folder} is read-only: make it writable again'
    if number in _FULL or (number is None and 'unexpected pos' in str(error)):
        free_mib = shutil.disk_usage(folder).free // 2**20
        return (
            f'the disk is full, or a quota reached ({free_mib} MiB are free in {folder}): make room'
            ', or keep fewer checkpoints (default_hooks.checkpoint.max_keep_ckpts)'
        )
    return str(cause or error)


@contextmanager
def save_errors(path: Path) -> Iterator[None]:
    """Turn what the system, or torch, says when a checkpoint cannot be written into a sentence."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if not isinstance(error, OSError) and 'inline_container' not in str(error):
            raise
        why = explain_save_error(error, path.parent)
        raise SaveError(f'{path} could not be written: {why}') from error


def write_file(path: Path, checkpoint: Mapping[str, Any]) -> None:
    """Write a checkpoint as one file, with its checksum.

    Raises:
        SaveError: When that fails; what was there before is as it was.
    """
    with save_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            with open(partial, 'wb') as file:
                torch.save(checkpoint, file)
            seal(partial)


class _Save:
    """A save that was begun, of which all ranks hear how it went."""

    def __init__(self, part: Future[None]) -> None:
        self._part, self._is_known = part, False
        self._error: Exception | None = None

    def wait(self) -> None:
        """Wait until it is whole on all ranks; every rank calls this first at the same place.

        Raises:
            SaveError: When a rank could not write; each time.
        """
        if not self._is_known:
            try:
                do_on_all_ranks(self._part.result, cpu_group('checkpoint'))
            except Exception as error:
                self._error = error
            self._is_known = True
        if self._error is not None:
            raise self._error


class CheckpointWriter:
    """Writes one checkpoint at a time. Every rank calls every method, in the same order."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._in_background: _Save | None = None

    def start(self, write: Callable[[], None], asynchronous: bool) -> Callable[[], None]:
        """Write now, or in the background, once the one before is done.

        Args:
            write: Writes this rank's part.
            asynchronous: Whether to return before that is done.

        Returns:
            What waits for this one, and raises SaveError if a rank could not write it.
        """
        with suppress(SaveError):  # whoever began that one is told
            self.wait()
        if asynchronous:
            self._thread = self._thread or ThreadPoolExecutor(1, 'checkpoint')
            part = self._thread.submit(write)
        else:
            part = Future()
            try:
                write()
                part.set_result(None)
            except Exception as error:
                part.set_exception(error)
        save = _Save(part)
        self._in_background = save if asynchronous else None
        return save.wait

    def wait(self) -> None:
        """Wait until the last one is whole, if it is written in the background.

        Raises:
            SaveError: When a rank could not write it.
        """
        if self._in_background is not None:
            self._in_background.wait()
