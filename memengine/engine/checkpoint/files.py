"""Checkpoints that are read safely and written whole.

``torch.load`` unpickles only tensors and plain containers (``weights_only=True``); MMEngine's
checkpoints also hold its log buffers and NumPy values, which are allowed by name. The check
itself is never turned off.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from mmengine.runner.checkpoint import _load_checkpoint

from memengine.engine.checkpoint.trust import is_known_data, safe_globals

__all__ = [
    'CheckpointError',
    'DamagedError',
    'atomic_write',
    'backup_path',
    'read_file',
    'refusal',
    'safe_loading',
    'sync',
]


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or may not be."""


class DamagedError(CheckpointError):
    """A checkpoint that is not what was written: the one before may do."""


_read_anything = torch.load


class _SenselessBytesError(Exception):
    """Of what torch raises while it reads bytes that make no sense."""


def _read_safely(*args: Any, **kwargs: Any) -> Any:
    try:
        return _read_anything(*args, **{**kwargs, 'pickle_module': None, 'weights_only': True})
    except (pickle.UnpicklingError, OSError):
        raise
    except Exception as error:
        of_the_machine = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if of_the_machine or 'map_location' in str(error):  # a device that is not there
            raise
        raise _SenselessBytesError(str(error) or type(error).__name__) from error


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
        with torch.serialization.safe_globals(safe_globals(trusted)):
            with patch.object(torch, 'load', _read_safely):
                yield
    except pickle.UnpicklingError as error:
        kind = CheckpointError if _wanted(error) else DamagedError
        raise kind(f'{filename} {refusal(error)}') from error
    except _SenselessBytesError as error:
        raise DamagedError(f'{filename} is damaged or incomplete: {error}') from error


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


def read_file(
    filename: str, trusted: Iterable[str] = (), map_location: Any = 'cpu', mapped: bool = False
) -> dict[str, Any]:
    """Read a file of MMEngine's or torch's, safely.

    Args:
        filename: A path, or a URL as MMEngine takes it.
        trusted: See :func:`safe_loading`.
        map_location: Where tensors go.
        mapped: Whether tensors are read from a local file only when they are used.

    Raises:
        CheckpointError: When it wants to run what it may not.
        DamagedError: When it is damaged.
    """
    with safe_loading(filename, trusted):
        if mapped:
            with open(filename, 'rb') as file:
                is_archive = file.read(2) == b'PK'  # older ones cannot be mapped
            return torch.load(filename, map_location=map_location, mmap=is_archive)
        return _load_checkpoint(filename, map_location)


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
