"""Checkpoints that are read safely and written whole.

``torch.load`` unpickles only tensors and plain containers (``weights_only=True``); MMEngine's
checkpoints also hold its log buffers and NumPy values, which are allowed by name. The check
itself is never turned off.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from memengine.engine.checkpoint.trust import is_known_data, safe_globals
from memengine.engine.checkpoint.vetting import vet


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or may not be."""


class DamagedError(CheckpointError):
    """A checkpoint that is not what was written: the one before may do."""


_read_anything = torch.load
_one_at_a_time = threading.RLock()  # what is set for the whole process is to be put back in order


class _UnreadableError(Exception):
    """No UnpicklingError, which timm would answer with advice to read unsafely."""

    def __init__(self, what: str, kind: type[CheckpointError]) -> None:
        super().__init__(what)
        self.kind = kind


def _read_safely(*args: Any, **kwargs: Any) -> Any:
    try:
        vet(args[0] if args else kwargs['f'])
        return _read_anything(*args, **{**kwargs, 'pickle_module': None, 'weights_only': True})
    except pickle.UnpicklingError as error:
        kind = DamagedError if _wanted(error) is None else CheckpointError
        raise _UnreadableError(refusal(error), kind) from error
    except OSError:
        raise
    except Exception as error:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or 'map_location' in str(error):
            raise  # of the machine, not of the file
        what = str(error) or type(error).__name__
        raise _UnreadableError(f'is damaged or incomplete: {what}', DamagedError) from error


@contextmanager
def safe_loading(filename: str | Path, trusted: Iterable[str] = ()) -> Iterator[None]:
    """Within it, ``torch.load`` reads MMEngine's checkpoints, and refuses others by name.

    This holds for whoever calls it (MMEngine and timm have called it unsafely), and whatever
    torch's environment variables say.

    Args:
        filename: Path of the checkpoint, for the message.
        trusted: Dotted names of further classes of data that its pickle may use.

    Raises:
        CheckpointError: When the pickle wants anything else, or the file is damaged.
        ValueError: When a trusted name is not that of a class of data.
    """
    try:
        with _one_at_a_time, torch.serialization.safe_globals(safe_globals(trusted)):
            with patch.object(torch, 'load', _read_safely):
                yield
    except _UnreadableError as error:
        raise error.kind(f'{filename} {error}') from error


def _wanted(error: Exception) -> re.Match[str] | None:
    return re.search(r'GLOBAL ([\w.]+)', str(error))


def refusal(error: Exception) -> str:
    """What torch's safe unpickler refused, without torch's advice to read unsafely instead."""
    wanted = _wanted(error)
    if wanted is None:
        return f'is not a readable checkpoint: {str(error).partition(". ")[0]}'
    # Some versions of torch leave out the module of Python's own functions.
    name = wanted[1] if '.' in wanted[1] else f'builtins.{wanted[1]}'
    remedy = (
        f"this is a class of data: if you know it, set trusted_globals=['{name}'] in the config"
        if is_known_data(name)
        else 'ask for its weights as a .safetensors file'
    )
    return f"wants to run '{name}' while it is read, which weights need not; {remedy}"


def read_pickle(path: Path, trusted: Iterable[str] = (), mapped: bool = False) -> Any:
    """Read a local file of ``torch.save``, safely, onto the CPU.

    Args:
        path: The file.
        trusted: See :func:`safe_loading`.
        mapped: Whether tensors are read only when they are used.

    Raises:
        CheckpointError: When it wants to run what it may not.
        DamagedError: When it is damaged.
    """
    with open(path, 'rb') as file:
        is_archive = file.read(2) == b'PK'  # older ones cannot be mapped
    with safe_loading(path, trusted):
        return torch.load(path, map_location='cpu', mmap=mapped and is_archive)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Give a path to write to, and move it to ``path`` when all is written, and on the disk.

    A process that dies in between, or a machine, leaves the previous file as it was.
    """
    partial = path.with_name(f'.{path.name}.partial')
    try:
        yield partial
        sync(partial)
        os.replace(partial, path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Remove what processes have left that died while they wrote a checkpoint into a folder."""
    for suffix in ('.pth', '.safetensors', '.dcp'):
        for partial in folder.glob(f'.*{suffix}.partial'):
            if partial.is_dir():
                shutil.rmtree(partial, ignore_errors=True)
            else:
                partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def backup_path(path: Path) -> Path:
    """Where a folder lies while another one takes its place."""
    return path.with_name(f'.{path.name}.previous')
