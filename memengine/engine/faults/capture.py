"""A bad step is written to a file, with all that it takes to carry it out again.

The file holds data only and is read as checkpoints are. Beside it lies the run's config.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from mmengine.dist import get_world_size
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memengine._torch_private.ops import foreach_copy_
from memengine.engine.checkpoint.files import atomic_write
from memengine.engine.data_order import NamesSamples
from memengine.engine.faults.guard import BadStep, Guarded
from memengine.engine.step import progress_of, unwrap
from memengine.techniques.modules.forward_state import RandomState, accelerators_of
from memengine.techniques.sharding.clipping import local_part

FORMAT = 1
CONFIG = 'config.py'


class StepStart:
    """What a step's forward pass changes, as it was before.

    Cost: one more copy of the model's buffers, and the time to fill it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module, name)
            for module in model.modules()
            for name, _ in module.named_buffers(recurse=False)
        ]
        self._buffers: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._devices = accelerators_of(model)
        self.keep()

    @torch.no_grad()
    def keep(self) -> None:
        """Remember the present state."""
        self._buffers = [getattr(module, name) for module, name in self._places]
        if [kept.shape for kept in self._kept] != [buffer.shape for buffer in self._buffers]:
            self._kept = [torch.empty_like(buffer) for buffer in self._buffers]
        if self._buffers:
            foreach_copy_(self._kept, self._buffers)
        self.random_state = RandomState(self._devices)

    @torch.no_grad()
    def put_back_buffers(self) -> None:
        """Give the buffers the values that are remembered."""
        if self._buffers:
            foreach_copy_(self._buffers, self._kept)
        for (module, name), buffer in zip(self._places, self._buffers, strict=True):
            if getattr(module, name) is not buffer:  # another one was set in its place
                setattr(module, name, buffer)


def rank_path(path: Path, rank: int) -> Path:
    """The file of another rank of the same step."""
    return path if rank == 0 else path.with_name(f'{path.stem}_rank{rank}{path.suffix}')


def capture_step(
    runner: Any, wrapper: Guarded, start: StepStart, bad: BadStep, data_batch: Any
) -> str:
    """Write what a bad step started from. Each rank writes a file of its own.

    Returns:
        A sentence that says where it is, or why it is not.
    """
    folder = Path(runner.work_dir) / 'nonfinite'
    path = folder / f'iter_{runner.iter + 1}.pth'
    try:
        folder.mkdir(exist_ok=True)
        content = _content(runner, wrapper, start, bad, data_batch)
        with atomic_write(rank_path(path, runner.rank)) as unfinished:
            torch.save(content, unfinished)
        if runner.rank == 0:
            with atomic_write(folder / CONFIG) as unfinished:
                unfinished.write_text(runner.cfg.pretty_text)
    except (OSError, RuntimeError) as error:  # a full disk must not end a run that may go on
        return f'The step could not be captured: {error}'
    here = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f'To see where it begins: memengine replay {here}'


def _content(
    runner: Any, wrapper: Guarded, start: StepStart, bad: BadStep, data_batch: Any
) -> dict[str, Any]:
    model = unwrap(runner.model)
    # Ranks that hold the same parameters read them from rank 0's file.
    shared = {name for name, p in model.named_parameters() if not isinstance(p, DTensor)}
    held = model.state_dict()
    scaler = wrapper.precision.scaler
    return dict(
        format=FORMAT,
        rank=runner.rank,
        world_size=get_world_size(),
        place=vars(progress_of(runner)),
        found={**vars(bad), 'log_vars': plain(bad.log_vars)},
        state_dict={
            name: local_part(value).detach().cpu()
            for name, value in held.items()
            if isinstance(value, Tensor) and (runner.rank == 0 or name not in shared)
        },
        accumulative_counts=wrapper.accumulative_counts,
        updated_in_backward=wrapper.updates_in_backward,
        # Weights that have changed by now are found again from the last checkpoint.
        reference=runner.last_checkpoint if wrapper.updates_in_backward else None,
        scaler=None if scaler is None else scaler.state_dict(),
        settings=wrapper.sizes,
        random_state=start.random_state.state_dict(),
        batch=data_batch,
        samples=_samples(runner, data_batch),
    )


def plain(log_vars: Mapping[str, Any]) -> dict[str, float]:
    """Figures as numbers."""
    return {name: torch.as_tensor(value).detach().item() for name, value in log_vars.items()}


def _samples(runner: Any, batch: Any) -> list[str]:
    """What the batch's samples are called, if it says which they are."""
    found = batch.get('data_samples') if isinstance(batch, Mapping) else None
    if isinstance(found, Mapping) and 'index' in found:
        indices = [int(index) for index in found['index']]
    elif isinstance(found, list) and all(isinstance(x, Mapping) and 'index' in x for x in found):
        indices = [int(sample['index']) for sample in found]
    else:
        return []
    dataset = runner.train_dataloader.dataset
    if isinstance(dataset, NamesSamples):
        return [dataset.sample_name(index) for index in indices]
    return [f'sample {index}' for index in indices]
