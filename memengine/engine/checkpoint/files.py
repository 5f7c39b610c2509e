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

from memengine.engine.checkpoint.trust import is_known_data, safe_globals

__all__ = [
    'CheckpointError',
    'atomic_write',
    'backup_path',
    'find_latest',
    'refusal',
    'safe_loading',
]


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or may not be."""


_read_anything = torch.load


class _UnreadableError(Exception):
    """No UnpicklingError, which timm would answer with advice to read unsafely."""


def _read_safely(*args: Any, **kwargs: Any) -> Any:
    try:
        return _read_anything(*args, **{**kwargs, 'pickle_module': None, 'weights_only': True})
    except pickle.UnpicklingError as error:
        raise _UnreadableError(refusal(error)) from error
    except OSError:
        raise
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or 'map_location' in str(error):
            raise  # of the device
        what = str(error) or type(error).__name__
        raise _UnreadableError(f'is damaged or incomplete: {what}') from error


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
    except _UnreadableError as error:
        raise CheckpointError(f'{filename} {error}') from error


def refusal(error: Exception) -> str:
    """What torch's safe unpickler refused, without torch's advice to read unsafely instead."""
    wanted = re.search(r'GLOBAL ([\w.]+)', str(error))
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
