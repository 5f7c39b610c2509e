"""What a run writes: a checkpoint, in one file or sharded, whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmengine.fileio import join_path
from mmengine.runner import save_checkpoint

from memengine.engine.checkpoint.saving import write_file
from memengine.engine.checkpoint.sharded import is_sharded
from memengine.engine.checkpoint.sharded_saving import sharded_write
from memengine.engine.checkpoint.state import (
    gather_state,
    is_sharded_model,
    key_by_name,
    run_state,
    samples_per_step,
)
from memengine.engine.faults.finite_state import refuse_nonfinite_state
from memengine.engine.step import unwrap


def collect(
    runner: Any,
    out_dir: str,
    filename: str,
    save_optimizer: bool,
    save_param_scheduler: bool,
    meta: dict[str, Any],
    backends: tuple[dict[str, Any] | None, dict[str, Any] | None],
    asynchronous: bool,
    on_complete: Callable[[], None] | None,
) -> Callable[[], None]:
    """Collect the state of a run from all ranks; what is returned writes it.

    Args:
        runner: The run, whose ``save_checkpoint`` says what the others are, and what is raised.
        backends: Its ``file_client_args`` and ``backend_args``.

    Raises:
        ValueError: For a sharded checkpoint in a remote folder.
    """
    refuse_nonfinite_state(unwrap(runner.model), runner.optim_wrapper if save_optimizer else None)
    meta = {'samples_per_step': samples_per_step(runner), **meta}
    path, remote = Path(out_dir) / filename, '://' in str(out_dir)
    if not Path(runner.work_dir).is_dir():
        runner.logger.error(
            f'work_dir {runner.work_dir} is not there any more: was it moved? It is made again '
            'for the next checkpoints; to go on from one of the others, move it back'
        )
    if is_sharded(filename):
        if remote:
            raise ValueError(f'sharded checkpoints need a folder to write to, got {out_dir}')
        state = run_state(runner, meta, save_optimizer, save_param_scheduler)
        if save_optimizer:
            state['optimizer'] = key_by_name(state['optimizer'], runner.model, runner.optim_wrapper)
        return sharded_write(path, state, asynchronous, on_complete)
    whole: dict[str, Any] = {}
    if runner.rank == 0 or is_sharded_model(runner.model):  # whose shards all put together
        state = run_state(runner, meta, save_optimizer, save_param_scheduler)
        whole = gather_state(state, copies=asynchronous)

    def write() -> None:
        if runner.rank:
            return
        if remote:
            file_client_args, backend_args = backends
            url = join_path(out_dir, filename, backend_args=backend_args)
            save_checkpoint(whole, url, file_client_args, backend_args)
        else:
            write_file(path, whole)
        if on_complete is not None:
            on_complete()

    return write
