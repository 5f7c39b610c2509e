"""Checkpoints as folders, which all ranks write and read together (torch.distributed.checkpoint).

A folder holds the tensors, in files of torch.distributed.checkpoint's format, and ``run.pth``
with all the rest of what MMEngine puts into a checkpoint::

    epoch_3.dcp/
        .metadata          which part of which tensor lies in which file
        __0_0.distcp ...   tensors: each rank writes what it holds
        run.pth            iteration, schedules, logged curves, config; and the tensors' paths

Each rank reads only what it holds, so the number of ranks may differ between saving and loading.
"""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from memengine.engine.checkpoint.files import (
    CheckpointError,
    backup_path,
    refusal,
    safe_loading,
)
from memengine.engine.checkpoint.metadata import SafeReader
from memengine.engine.distributed.processes import cpu_group

__all__ = [
    'SUFFIX',
    'KeyPath',
    'ShardedWriter',
    'is_sharded',
    'merge_tensors',
    'read_sharded',
    'split_tensors',
]

SUFFIX = '.dcp'
_RUN_FILE = 'run.pth'
_RANK_0_ENTRIES = ('meta', 'message_hub', 'param_schedulers')  # of rank 0 only

KeyPath = tuple[Any, ...]  # keys from the checkpoint's root to a tensor

# torch's answer to a process without a group, which is all right here
warnings.filterwarnings('ignore', 'torch.distributed is .*single process', UserWarning)


def is_sharded(path: str | Path) -> bool:
    """Whether a path is that of a sharded checkpoint, to be written or already there."""
    return str(path).endswith(SUFFIX) or (Path(path) / '.metadata').is_file()


def split_tensors(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[KeyPath, Tensor]]:
    """Split a checkpoint into what is not a tensor, and its tensors by their paths, in order."""
    rest = dict(checkpoint)
    tensors: dict[KeyPath, Tensor] = {}
    for entry in checkpoint:  # in the same order on every rank
        if entry not in _RANK_0_ENTRIES:
            rest[entry] = _strip_tensors(rest[entry], (entry,), tensors)
    return rest, tensors


def _strip_tensors(tree: Any, path: KeyPath, tensors: dict[KeyPath, Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    left = copy.copy(tree)  # keeps what else an OrderedDict carries
    for key, value in tree.items():
        here = (*path, key)
        if isinstance(value, Tensor):
            tensors[here] = left.pop(key)
        else:
            left[key] = _strip_tensors(value, here, tensors)
    return left


def merge_tensors(rest: dict[str, Any], tensors: Mapping[KeyPath, Tensor]) -> dict[str, Any]:
    """Undo :func:`split_tensors`, in place."""
    for path, tensor in tensors.items():
        tree = rest
        for key in path[:-1]:
            tree = tree[key]
        tree[path[-1]] = tensor
    return rest


def _joined(path: KeyPath) -> str:
    return '/'.join(map(str, path))


class ShardedWriter:
    """Writes sharded checkpoints, whole or not at all and one at a time.

    Every rank calls every method, in the same order. Ranks speak through gloo groups of their own,
    so writing in the background does not get in the way of training.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def save(
        self,
        folder: Path,
        checkpoint: Mapping[str, Any],
        asynchronous: bool = False,
        on_complete: Callable[[], None] | None = None,
    ) -> None:
        """Write a checkpoint.

        Args:
            folder: Where; what is there already is replaced once all is written. It has to be a
                place that all ranks share.
            checkpoint: Nested dicts. Tensors that all ranks hold whole are written by one of
                them, of DTensors each rank writes its shard.
            asynchronous: Return once the tensors are copied to host memory, and write in the
                background.
            on_complete: Called on rank 0 once the checkpoint is whole.

        Raises:
            CheckpointError: When a rank cannot write; also for the checkpoint before, if that
                was asynchronous.

        Cost: asynchronous, host memory for all that the rank holds, until it is written.
        """
        self.wait()
        rest, tensors = split_tensors(checkpoint)
        partial = folder.with_name(f'.{folder.name}.partial')
        writer = dcp.FileSystemWriter(partial)
        if _rank() == 0:  # the others write once they have heard from rank 0, in _write
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True, exist_ok=True)  # another rank may have made it again
            paths = {_joined(path): path for path in tensors}
            torch.save({**rest, 'tensors': paths}, partial / _RUN_FILE)
        named = {_joined(path): tensor for path, tensor in tensors.items()}
        group = cpu_group('checkpoint')
        if not asynchronous:
            _write(writer, named, group, partial, folder, on_complete)
            return
        # torch's own staging leaves CPU tensors uncopied in some versions, in training's hands.
        on_cpu = {name: t.detach().clone() for name, t in named.items() if t.device.type == 'cpu'}
        others = {name: t for name, t in named.items() if name not in on_cpu}
        staged = {**on_cpu, **writer.stage(others)}
        self._thread = self._thread or ThreadPoolExecutor(1, 'checkpoint')
        self._pending = self._thread.submit(
            _write, writer, staged, group, partial, folder, on_complete
        )

    def wait(self) -> None:
        """Wait until what is being written is whole, and raise what went wrong with it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _write(
    writer: dcp.FileSystemWriter,
    tensors: dict[str, Tensor],
    group: dist.ProcessGroup | None,
    partial: Path,
    folder: Path,
    on_complete: Callable[[], None] | None,
) -> None:
    """Write tensors on all ranks; on rank 0, where that ends last, put the folder in its place."""
    with _torch_error_as(f'{folder} could not be written, the checkpoint before is whole'):
        dcp.save(tensors, storage_writer=writer, process_group=group)
    if _rank() == 0:
        _replace_folder(partial, folder)
        if on_complete is not None:
            on_complete()


@contextmanager
def _torch_error_as(what: str) -> Iterator[None]:
    """Turn torch's error, which is none of Python's ``Exception``, into a sentence."""
    try:
        yield
    except CheckpointException as error:
        causes = [
            f'rank {rank}: {refusal(e) if isinstance(e, pickle.UnpicklingError) else e}'
            for rank, (e, _) in error.failures.items()
        ]
        raise CheckpointError(f'{what}: {"; ".join(causes)}') from error


def _replace_folder(partial: Path, folder: Path) -> None:
    """Move a folder that is whole to its place; in between, the old one is :func:`backup_path`."""
    shutil.rmtree(backup_path(folder), ignore_errors=True)
    if folder.exists():
        os.replace(folder, backup_path(folder))
    os.replace(partial, folder)
    shutil.rmtree(backup_path(folder), ignore_errors=True)


def read_sharded(
    folder: Path,
    trusted: Sequence[str] = (),
    entries: Callable[[str], bool] = lambda entry: True,
    template: Callable[[KeyPath, torch.Size], Tensor | None] = lambda path, size: None,
) -> dict[str, Any]:
    """Read a sharded checkpoint as the nested dict that was saved.

    Args:
        folder: The checkpoint.
        trusted: See :func:`memengine.engine.checkpoint.files.safe_loading`.
        entries: Which entries of the checkpoint are read.
        template: A tensor that is laid out as the one at this path shall be (a DTensor, of which
            only this rank's shard is read), or None for a whole tensor on the CPU.

    Raises:
        CheckpointError: When it is incomplete, damaged or not safe to read.
    """
    rest, paths = _read_run_file(folder, trusted)
    reader = SafeReader(folder)
    paths = {name: path for name, path in paths.items() if entries(path[0])}
    tensors = {}
    for name, path in paths.items():
        if name not in reader.tensors:
            raise CheckpointError(f'{folder} is incomplete: there is no {name} in it')
        kind = reader.tensors[name]
        as_held = template(path, kind.size)
        tensors[name] = (
            torch.empty(kind.size, dtype=kind.properties.dtype)
            if as_held is None
            else torch.empty_like(as_held, dtype=kind.properties.dtype)
        )
    with _torch_error_as(f'{folder} is damaged or incomplete'):
        dcp.load(tensors, storage_reader=reader, process_group=cpu_group('checkpoint'))
    rest = {entry: value for entry, value in rest.items() if entries(entry)}
    return merge_tensors(rest, {paths[name]: tensor for name, tensor in tensors.items()})


def _read_run_file(
    folder: Path, trusted: Sequence[str]
) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """All but the tensors, and where the tensors belong in it."""
    file = folder / _RUN_FILE
    if not (folder / '.metadata').is_file() or not file.is_file():
        raise CheckpointError(
            f'{folder} is no sharded checkpoint, or not a whole one: '
            f'there has to be a .metadata and a {_RUN_FILE} in it'
        )
    with safe_loading(file, trusted):
        rest = torch.load(file, map_location='cpu')
    paths = rest.pop('tensors', None) if isinstance(rest, dict) else None
    if not isinstance(paths, dict) or not all(_leads_somewhere(rest, p) for p in paths.values()):
        raise CheckpointError(f'{file} is damaged: it does not say where the tensors belong')
    return rest, paths


def _leads_somewhere(tree: Any, path: Any) -> bool:
    for key in path[:-1] if isinstance(path, tuple) else ():
        tree = tree.get(key) if isinstance(tree, dict) else None
    return isinstance(path, tuple) and len(path) > 0 and isinstance(tree, dict)
