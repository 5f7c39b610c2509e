"""A captured step is carried out again, and what is not finite in it named."""

from __future__ import annotations

import logging
import math
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import BaseLoop
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memengine.engine.checkpoint.files import CheckpointError, safe_loading
from memengine.engine.distributed.processes import cpu_group
from memengine.engine.faults.capture import FORMAT, plain, rank_path
from memengine.engine.faults.culprit import Culprit, watched
from memengine.engine.faults.finite_state import NonFiniteError
from memengine.engine.faults.guard import StepGuard
from memengine.engine.hooks import AlgorithmHook, RandomStateHook, TechniqueHook
from memengine.engine.step import unwrap
from memengine.engine.techniques_of_config import apply_to_model
from memengine.registry import RUNNERS
from memengine.techniques.modules.forward_state import RandomState, accelerators_of
from memengine.techniques.modules.private_random import restart_private_generators

__all__ = ['Findings', 'read_capture', 'replay']

MOST_NAMES = 8  # of samples


@dataclass
class Findings:
    """What a captured step shows when it is carried out again, on one rank.

    Attributes:
        rank: The rank.
        iteration: Number of the iteration, from 1.
        same: Whether loss and gradient are those of the run, bit for bit.
        losses: What the step would have logged.
        culprit: Where the first NaN or infinity came up.
        samples: Names of the samples in it.
    """

    rank: int
    iteration: int
    same: bool
    losses: dict[str, float]
    culprit: Culprit
    samples: list[str]

    def __str__(self) -> str:
        found, lines = self.culprit, []
        again = 'as in the run, bit for bit' if self.same else 'other than in the run'
        figures = ', '.join(f'{name} {value:.6g}' for name, value in self.losses.items())
        lines.append(f'iteration {self.iteration}, rank {self.rank}: {again}: {figures}')
        bad = [name for name, value in self.losses.items() if not math.isfinite(value)]
        if bad:
            lines.append(f'  not finite: {", ".join(bad)}')
        if found.slice is not None:
            lines.append(f'  slice: {found.slice + 1} of {found.slices}')
        if self.samples:
            more = len(self.samples) - MOST_NAMES
            rest = f'; and {more} more' if more > 0 else ''
            lines.append(f'  samples: {"; ".join(self.samples[:MOST_NAMES])}{rest}')
        if found.in_data:
            lines.append('  the data themselves are not finite')
        for what, name in (
            ('module whose output is not finite', found.module),
            ('module to whose output a gradient comes that is not finite', found.gradient_of),
            ('parameter whose gradient is not finite', found.parameter),
        ):
            if name is not None:
                lines.append(f'  first {what}: {name or "the model itself"}')
        return '\n'.join(lines)


def read_capture(path: Path, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Read a file that a bad step has left, with torch's safe unpickler.

    Raises:
        CheckpointError: When it is none, is damaged, or wants to run code.
    """
    if not path.is_file():
        raise CheckpointError(f'there is no captured step {path}')
    with safe_loading(path, cfg.get('trusted_globals', ())):
        capture = torch.load(path, map_location='cpu', weights_only=True)
    if not isinstance(capture, dict) or capture.get('format') != FORMAT:
        raise CheckpointError(
            f'{path} is no captured step of this version: give a file of the folder nonfinite in '
            'the work dir'
        )
    return capture


def replay(path: str | Path, cfg: Config) -> list[Findings]:
    """Carry a captured step out again.

    Returns:
        What was found, by rank; rank 0's only on other ranks than 0.

    Raises:
        CheckpointError: For a file that cannot be read.
        ValueError: When there are not as many ranks as in the run, or the model is another.
    """
    path = Path(path)
    capture = read_capture(path, cfg)
    ranks = capture['world_size']
    if ranks > 1 and cfg.get('launcher') == 'pytorch' and 'RANK' not in os.environ:
        raise _other_ranks(path, ranks, 1)
    with tempfile.TemporaryDirectory() as work_dir, ExitStack() as until_the_end:
        runner = RUNNERS.build(_config_of_replay(cfg, capture, work_dir))
        if runner.world_size != ranks:
            raise _other_ranks(path, ranks, runner.world_size)
        if runner.rank:
            own = read_capture(rank_path(path, runner.rank), cfg)
            own['state_dict'] = {**capture['state_dict'], **own['state_dict']}
            capture = own
        until_the_end.callback(_close_logs, runner)
        repeat = _from_checkpoint if capture['updated_in_backward'] else _from_state
        found = repeat(runner, capture)
        every: list[Any] = [None] * ranks
        if ranks > 1:
            dist.all_gather_object(every, found, group=cpu_group('gathering findings'))
    return every if ranks > 1 else [found]


def _other_ranks(path: Path, ranks: int, found: int) -> ValueError:
    return ValueError(
        f'the step was carried out by {ranks} rank(s), and here are {found}; run: torchrun '
        f'--nproc_per_node {ranks} -m memengine replay {path} --launcher pytorch'
    )


def _config_of_replay(cfg: Config, capture: Mapping[str, Any], work_dir: str) -> Config:
    """The run's config, which writes nothing where the run did."""
    changed = Config(cfg.to_dict())
    changed.work_dir = work_dir
    changed.experiment_name = f'replay_{time.time_ns()}'
    changed.log_level = 'WARNING'
    changed.visualizer = None
    reference = capture['reference']
    if reference is not None or not capture['updated_in_backward']:
        changed.load_from, changed.resume = reference, reference is not None
    changed.default_hooks = {
        **changed.get('default_hooks', {}),
        'finite_loss': dict(type='NonFiniteHook', captures=0),
    }
    if 'optimizer' in changed.optim_wrapper:
        changed.optim_wrapper.update(capture['settings'], on_nonfinite='stop')
    if capture['world_size'] == 1:
        changed.launcher = 'none'
    return changed


class _LoopAtIteration(BaseLoop):
    """Stands for the training loop at one iteration, without its data."""

    def __init__(self, iter: int, epoch: int, max_iters: int, max_epochs: int) -> None:
        self.iter, self.epoch = iter, epoch
        self.max_iters, self.max_epochs = max_iters, max_epochs

    def run(self) -> None:
        """Not to be run."""
        raise NotImplementedError


def _from_state(runner: Any, capture: dict[str, Any]) -> Findings:
    """Carry out the one step, from the state that the file holds."""
    runner._train_loop = _LoopAtIteration(**capture['place'])
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    wrapper, model = runner.optim_wrapper, unwrap(runner.model)
    apply_to_model(model, runner.logger, runner.hooks)
    _load(model, capture['state_dict'])
    place = capture['place']
    wrapper.initialize_count_status(runner.model, place['iter'], place['max_iters'])
    if capture['scaler'] is not None:
        wrapper.precision.scaler.load_state_dict(capture['scaler'])
    runner.model.train()
    batch = capture['batch']
    for hook in runner.hooks:
        if isinstance(hook, (RandomStateHook, AlgorithmHook, TechniqueHook)):
            hook.before_train_iter(runner, place['iter'], batch)
    random_state = RandomState(accelerators_of(model))
    random_state.load_state_dict(capture['random_state'])
    random_state.restore()
    restart_private_generators()
    wrapper.guard = StepGuard(most_overflows=0)
    with watched(model, batch) as culprit:
        runner.model.train_step(batch, optim_wrapper=wrapper)
    return _findings(wrapper.guard, capture, culprit)


class _WatchIteration(Hook):
    """Watches one iteration of a run."""

    priority = 'LOWEST'

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration
        self.watch = ExitStack()
        self.culprit = Culprit()

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Begin."""
        if runner.iter == self.iteration:
            context = watched(unwrap(runner.model), data_batch)
            self.culprit = self.watch.enter_context(context)


def _from_checkpoint(runner: Any, capture: dict[str, Any]) -> Findings:
    """Train from the last checkpoint before the step, or from the start, up to it."""
    hook = _WatchIteration(capture['place']['iter'])
    runner.register_hook(hook)
    runner._train_loop['stop_at_iter'] = capture['place']['iter'] + 1
    with hook.watch:
        try:
            runner.train()
        except NonFiniteError as error:
            runner.logger.debug(error)
    return _findings(runner.optim_wrapper.guard, capture, hook.culprit)


def _findings(guard: StepGuard | None, capture: Mapping[str, Any], culprit: Culprit) -> Findings:
    found, bad = capture['found'], None if guard is None else guard.bad_step
    begins = capture['place']['iter'] % capture['accumulative_counts'] == 0
    same = bad is not None and (
        _same(bad.loss, found['loss']) and (bad.gradient == found['gradient'] or not begins)
    )
    names = capture['samples']
    return Findings(
        rank=capture['rank'],
        iteration=capture['place']['iter'] + 1,
        same=same,
        losses={} if bad is None else plain(bad.log_vars),
        culprit=culprit,
        samples=[
            names[i] if i < len(names) else f'number {i} of the batch' for i in culprit.samples
        ],
    )


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _load(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Load what each rank holds of the model."""
    state = dict(saved)
    for name, held in model.state_dict().items():
        if isinstance(held, DTensor) and name in saved:
            local = saved[name].to(held.to_local().device)
            state[name] = DTensor.from_local(
                local, held.device_mesh, held.placements, shape=held.shape, stride=held.stride()
            )
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(
            f'the captured step is of another model than the config: {error}'
        ) from error


def _close_logs(runner: Any) -> None:
    """Let go of files in a folder that is about to go; the logger stays MMEngine's current one."""
    for handler in list(runner.logger.handlers):
        if isinstance(handler, logging.FileHandler):
            runner.logger.removeHandler(handler)
            handler.close()
