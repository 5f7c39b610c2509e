"""How all ranks write a sharded checkpoint together, whole or not at all."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mmengine.dist import get_rank
from torch import Tensor
from torch.distributed.tensor import DTensor

from memengine._torch_private.ops import is_traceable_wrapper_subclass
from memengine.engine.checkpoint.checksums import checksum, write_checksums
from memengine.engine.checkpoint.files import backup_path, sync
from memengine.engine.checkpoint.saving import SaveError, explain_save_error, save_errors
from memengine.engine.checkpoint.sharded import (
    RUN_FILE,
    KeyPath,
    merge_tensors,
    split_tensors,
    torch_errors,
)
from memengine.engine.distributed.processes import cpu_group, do_on_all_ranks
from memengine.techniques.optimizer_memory.adamw_low_bit import in_full_precision


def sharded_write(
    folder: Path,
    checkpoint: Mapping[str, Any],
    asynchronous: bool = False,
    on_complete: Callable[[], None] | None = None,
) -> Callable[[], None]:
    """What writes a sharded checkpoint when it is called, on every rank.

    Ranks speak through a gloo group of their own, so that writing in the background does not get in
    the way of training.

    Args:
        folder: Where; what is there already is replaced once all is written. It has to be a place
            that all ranks share.
        checkpoint: Nested dicts. Tensors that all ranks hold whole are written by one of them, of
            DTensors each rank writes its shard, of few bits as the numbers that they stand for.
        asynchronous: Whether the tensors may change before it is called: they are copied to host
            memory.
        on_complete: Called on rank 0 once the checkpoint is whole.

    Returns:
        A function that raises SaveError, on all ranks, when a rank cannot write.

    Cost: asynchronous, host memory for all that the rank holds, until it is written. Each rank
    reads what it has written once more, for the checksums.
    """
    rest, tensors = split_tensors(checkpoint)
    coded = {path: tensor for path, tensor in tensors.items() if _is_coded(tensor)}
    rest = merge_tensors(rest, coded)
    tensors = {path: tensor for path, tensor in tensors.items() if path not in coded}
    partial = folder.with_name(f'.{folder.name}.partial')
    writer = dcp.FileSystemWriter(partial)
    run_file = io.BytesIO()
    if get_rank() == 0:
        torch.save({**rest, 'tensors': {_joined(path): path for path in tensors}}, run_file)
    named = {_joined(path): in_full_precision(tensor) for path, tensor in tensors.items()}
    if asynchronous:
        # torch's own staging leaves CPU tensors uncopied in some versions, in training's hands.
        on_cpu = {name: t.detach().clone() for name, t in named.items() if t.device.type == 'cpu'}
        others = {name: t for name, t in named.items() if name not in on_cpu}
        named = {**on_cpu, **writer.stage(others)}
    group = cpu_group('checkpoint')

    def write() -> None:
        try:
            with save_errors(folder):
                _on_rank_0(lambda: _begin(partial, run_file.getvalue()), group)
                _write_tensors(writer, named, group, folder)
                # Each rank of what it has written, which its machine may still have in memory.
                own = f'__{get_rank()}_*'
                sums = do_on_all_ranks(
                    lambda: {p.name: checksum(p) for p in partial.glob(own)}, group
                )
                known = {name: digits for of_rank in sums for name, digits in of_rank.items()}
                _on_rank_0(lambda: _publish(partial, folder, known, on_complete), group)
        except BaseException:
            if get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    return write


def _is_coded(tensor: Tensor) -> bool:
    """Whether it is of a class with codes of its own, as an optimiser's state in few bits.

    The list of tensors would call it the plain tensor that it stands for.
    """
    return is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, DTensor)


def _joined(path: KeyPath) -> str:
    return '/'.join(map(str, path))


def _on_rank_0(act: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    do_on_all_ranks(act if get_rank() == 0 else lambda: None, group)


def _begin(partial: Path, run_file: bytes) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / RUN_FILE).write_bytes(run_file)
    sync(partial / RUN_FILE)


def _write_tensors(
    writer: dcp.FileSystemWriter,
    tensors: dict[str, Tensor],
    group: dist.ProcessGroup | None,
    folder: Path,
) -> None:
    def explain(error: BaseException) -> str:
        return explain_save_error(error, folder.parent)

    with torch_errors(f'{folder} could not be written', SaveError, explain):
        dcp.save(tensors, storage_writer=writer, process_group=group)


def _publish(
    partial: Path, folder: Path, known: dict[str, str], on_complete: Callable[[], None] | None
) -> None:
    """Move a folder that is whole to its place; in between, the old one is :func:`backup_path`."""
    sync(write_checksums(partial, known))
    sync(partial)
    shutil.rmtree(backup_path(folder), ignore_errors=True)
    if folder.exists():
        os.replace(folder, backup_path(folder))
    os.replace(partial, folder)
    sync(folder.parent)
    shutil.rmtree(backup_path(folder), ignore_errors=True)
    if on_complete is not None:
        on_complete()
