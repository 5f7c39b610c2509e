"""Checkpoints that are read safely and written whole.

``torch.load`` unpickles only tensors and plain containers (``weights_only=True``); MMEngine's
checkpoints also hold its log buffers and NumPy values, which are allowed here by name. The
check itself is never turned off.
"""

from __future__ import annotations

import importlib
import os
import pickle
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from mmengine.runner import checkpoint as mm_checkpoint

__all__ = [
    'CheckpointError',
    'DamagedError',
    'atomic_write',
    'backup_path',
    'read_file',
    'safe_loading',
    'sync',
]


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or may not be."""


class DamagedError(CheckpointError):
    """A checkpoint that is not what was written: the one before may do."""


def _log_buffer_method(owner: Any, name: str) -> Any:
    """Stands in for ``getattr``, by which MMEngine's log buffers pickle their statistics."""
    if owner is not HistoryBuffer or name not in HistoryBuffer._statistics_methods:
        raise pickle.UnpicklingError(f'GLOBAL getattr: of {owner!r}, {name!r}')
    return getattr(HistoryBuffer, name)


def _safe_globals() -> list[Any]:
    HistoryBuffer()  # fills in the names of its statistics
    dtypes = {type(np.dtype(code)) for code in np.typecodes['All']}
    # Modules are named otherwise in NumPy 1 than in NumPy 2.
    reconstruct: Any = np.array(0).__reduce__()[0]
    scalar: Any = np.float64(0).__reduce__()[0]
    moved = [  # the names under which the other major version of NumPy pickles the same two
        (function, f'numpy.{core}.multiarray.{function.__name__}')
        for function in (reconstruct, scalar)
        for core in ('core', '_core')
    ]
    methods = (_log_buffer_method, 'builtins.getattr')
    return [HistoryBuffer, methods, np.ndarray, np.dtype, *dtypes, reconstruct, scalar, *moved]


def _import_name(dotted: str) -> Any:
    module, _, name = dotted.rpartition('.')
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"trusted_globals: there is no '{dotted}' to trust ({error})"
        ) from error


@contextmanager
def _safe_downloads() -> Iterator[None]:
    """Make MMEngine's loader of URLs use the safe unpickler too; torch's does not by default."""
    with patch.object(
        mm_checkpoint, 'load_url', partial(mm_checkpoint.load_url, weights_only=True)
    ):
        yield


@contextmanager
def safe_loading(filename: str | Path, trusted: Iterable[str] = ()) -> Iterator[None]:
    """Within it, ``torch.load`` reads MMEngine's checkpoints, and refuses others by name.

    Args:
        filename: Path of the checkpoint, for the message.
        trusted: Dotted names of further classes or functions that its pickle may use.

    Raises:
        CheckpointError: When the pickle wants anything else, or the file is damaged.
    """
    try:
        with _safe_downloads():
            with torch.serialization.safe_globals([*_safe_globals(), *map(_import_name, trusted)]):
                yield
    except pickle.UnpicklingError as error:
        wanted = re.search(r'GLOBAL ([\w.]+)', str(error))
        if wanted is None:
            reason = str(error).partition('. ')[0]
            raise DamagedError(f'{filename} is not a readable checkpoint: {reason}') from error
        # Some versions of torch leave out the module of Python's own functions.
        name = wanted[1] if '.' in wanted[1] else f'builtins.{wanted[1]}'
        raise CheckpointError(
            f"{filename} wants to run '{name}' while it is read, which a checkpoint of "
            f'weights needs not. If you trust its source, allow it in the config: '
            f"trusted_globals=['{name}']"
        ) from error
    except (RuntimeError, EOFError) as error:
        if 'PytorchStreamReader' in str(error) or isinstance(error, EOFError):
            raise DamagedError(f'{filename} is damaged or incomplete: {error}') from error
        raise


def read_file(
    filename: str, trusted: Iterable[str] = (), map_location: Any = 'cpu', **options: Any
) -> dict[str, Any]:
    """Read a file of MMEngine's or torch's, safely; whatever is wrong with it is one kind of error.

    Args:
        filename: A path, or a URL as MMEngine takes it.
        trusted: See :func:`safe_loading`.
        map_location: Where tensors go.
        **options: More for ``torch.load``, where it is a path.

    Raises:
        CheckpointError: When it wants to run what it may not.
        DamagedError: When it is damaged.
    """
    try:
        with safe_loading(filename, trusted):
            if options:
                return torch.load(filename, map_location=map_location, **options)
            return mm_checkpoint._load_checkpoint(filename, map_location)
    except (CheckpointError, OSError, MemoryError):
        raise
    except Exception as error:  # a flipped bit makes the unpickler stumble in any way
        raise DamagedError(
            f'{filename} is damaged: reading it failed with {type(error).__name__}: {error}'
        ) from error


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
