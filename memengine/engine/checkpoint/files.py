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

__all__ = ['CheckpointError', 'atomic_write', 'backup_path', 'find_latest', 'safe_loading']


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or may not be."""


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
            raise CheckpointError(f'{filename} is not a readable checkpoint: {reason}') from error
        # Some versions of torch leave out the module of Python's own functions.
        name = wanted[1] if '.' in wanted[1] else f'builtins.{wanted[1]}'
        raise CheckpointError(
            f"{filename} wants to run '{name}' while it is read, which a checkpoint of "
            f'weights needs not. If you trust its source, allow it in the config: '
            f"trusted_globals=['{name}']"
        ) from error
    except (RuntimeError, EOFError) as error:
        if 'PytorchStreamReader' in str(error) or isinstance(error, EOFError):
            raise CheckpointError(f'{filename} is damaged or incomplete: {error}') from error
        raise


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Give a path to write to, and move it to ``path`` when all is written.

    A process that dies in between leaves the previous file as it was.
    """
    partial = path.with_name(f'.{path.name}.partial')
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def backup_path(path: Path) -> Path:
    """Where a folder lies while another one takes its place."""
    return path.with_name(f'.{path.name}.previous')


def find_latest(work_dir: str | Path) -> str | Path | None:
    """The checkpoint that ``last_checkpoint`` in the work dir names, wherever the dir is now.

    Raises:
        CheckpointError: When that checkpoint is not there.
    """
    pointer = Path(work_dir) / 'last_checkpoint'
    if not pointer.is_file():
        return None
    text = pointer.read_text().strip()
    if '://' in text:  # of MMEngine's remote storage
        return text
    named = Path(text)
    for path in (named, Path(work_dir) / named.name):
        for found in (path, backup_path(path)):  # the latter, of a job killed while it replaced it
            if found.exists():
                return found
    raise CheckpointError(
        f'{pointer} names {named}, which is not there; name another one with --resume PATH, or '
        'remove last_checkpoint to train from scratch'
    )
