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
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    DamagedError,
    read_pickle,
    safe_loading,
)
from memengine.engine.checkpoint.metadata import SafeReader
from memengine.engine.distributed.processes import cpu_group

SUFFIX = '.dcp'
RUN_FILE = 'run.pth'
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


@contextmanager
def torch_errors(
    what: str, kind: type[CheckpointError], explain: Callable[[BaseException], str] = str
) -> Iterator[None]:
    """Turn torch's error, which is no ``Exception`` of Python's, into one that names the ranks."""
    try:
        yield
    except CheckpointException as error:
        causes = [f'rank {rank}: {explain(cause[0])}' for rank, cause in error.failures.items()]
        raise kind(f'{what}: {"; ".join(causes)}') from error


def read_sharded(
    folder: Path,
    trusted: Sequence[str] = (),
    entries: Callable[[str], bool] = lambda entry: True,
    template: Callable[[KeyPath, torch.Size], Tensor | None] = lambda path, size: None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Read a sharded checkpoint as the nested dict that was saved.

    Args:
        folder: The checkpoint.
        trusted: See :func:`memengine.engine.checkpoint.files.safe_loading`.
        entries: Which entries of the checkpoint are read.
        template: A tensor that is laid out as the one at this path shall be (a DTensor, of which
            only this rank's shard is read), or None for a whole tensor on the CPU.
        group: The ranks that read it together; by default all.

    Raises:
        CheckpointError: When it is incomplete, damaged or not safe to read.
    """
    rest, paths = _read_run_file(folder, trusted)
    reader = SafeReader(folder)
    paths = {name: path for name, path in paths.items() if entries(path[0])}
    tensors = {}
    for name, path in paths.items():
        if name not in reader.tensors:
            raise DamagedError(f'{folder} is incomplete: there is no {name} in it')
        kind = reader.tensors[name]
        as_held = template(path, kind.size)
        tensors[name] = (
            torch.empty(kind.size, dtype=kind.properties.dtype)
            if as_held is None
            else torch.empty_like(as_held, dtype=kind.properties.dtype)
        )
    damaged = torch_errors(f'{folder} is damaged or incomplete', DamagedError)
    with damaged, safe_loading(folder):
        dcp.load(tensors, storage_reader=reader, process_group=group or cpu_group('checkpoint'))
    rest = {entry: value for entry, value in rest.items() if entries(entry)}
    return merge_tensors(rest, {paths[name]: tensor for name, tensor in tensors.items()})


def _read_run_file(
    folder: Path, trusted: Sequence[str]
) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """All but the tensors, and where the tensors belong in it."""
    file = folder / RUN_FILE
    if not (folder / '.metadata').is_file() or not file.is_file():
        raise DamagedError(
            f'{folder} is no sharded checkpoint, or not a whole one: '
            f'there has to be a .metadata and a {RUN_FILE} in it'
        )
    rest = read_pickle(file, trusted)
    paths = rest.pop('tensors', None) if isinstance(rest, dict) else None
    if not isinstance(paths, dict) or not all(_leads_somewhere(rest, p) for p in paths.values()):
        raise DamagedError(f'{file} is damaged: it does not say where the tensors belong')
    return rest, paths


def _leads_somewhere(tree: Any, path: Any) -> bool:
    for key in path[:-1] if isinstance(path, tuple) else ():
        tree = tree.get(key) if isinstance(tree, dict) else None
    return isinstance(path, tuple) and len(path) > 0 and isinstance(tree, dict)
