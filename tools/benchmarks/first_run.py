"""What README's first run takes beside the bare steps of its model, and what its data take.

The run of ``configs/dino_vit.py`` as it is, but for the number of epochs. After each epoch a copy
of the model takes its batches again, in the lines that a training script would have: an epoch with
loader, hooks, log and checkpoints against its steps alone, in turn, in one process. Evaluation is
not counted. Threads are what the run gives itself. Views are made in CPU time by one thread.

    python tools/benchmarks/first_run.py --out docs/benchmarks --page docs/data.md
"""

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import batched_augmentation
import measuring
import torch
from mmengine.hooks import Hook
from torch import nn

from memengine.engine import Runner
from memengine.engine.config.file import load_config
from memengine.engine.distributed.threads import set_threads

CONFIG, BATCH = 'dino_vit', 64
CLOCKS = {'wall': time.perf_counter, 'cpu': time.process_time}
Times = dict[str, list[list[float]]]  # by clock: of each epoch, the seconds of each iteration


class BareSteps(Hook):
    """Times a Runner's iterations, and after each epoch the bare steps of its batches.

    Attributes:
        runner, bare: Seconds of the Runner's iterations and of bare steps.
        waited: Seconds of each epoch in which the Runner waited for data.
    """

    priority = 'LOWEST'

    def __init__(self, learning_rate: float, weight_decay: float, max_norm: float) -> None:
        self._adamw = dict(lr=learning_rate, weight_decay=weight_decay)
        self._max_norm = max_norm
        self.runner: Times = {clock: [] for clock in CLOCKS}
        self.bare: Times = {clock: [] for clock in CLOCKS}
        self.waited: list[float] = []

    def before_train(self, runner: Any) -> None:
        """Copy the model."""
        self._model: Any = copy.deepcopy(runner.model)
        self._parameters = list(self._model.student.parameters())
        self._optimizer = torch.optim.AdamW(self._parameters, **self._adamw)

    def before_train_epoch(self, runner: Any) -> None:
        """Begin."""
        self._batches: list[Any] = []
        self.waited.append(0.0)
        self._begin(self.runner)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Keep the batch."""
        self._batches.append(data_batch['inputs'])
        self.waited[-1] += runner.message_hub.get_scalar('train/data_time').current()

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """An iteration of the Runner's is done."""
        self._note(self.runner)

    def after_train_epoch(self, runner: Any) -> None:
        """Take the bare steps."""
        self._begin(self.bare)
        for views in self._batches:
            loss = self._model(views, mode='loss')['loss']
            loss.backward()
            nn.utils.clip_grad_norm_(self._parameters, self._max_norm)
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._model.after_update()  # the teacher follows
            self._note(self.bare)

    def _begin(self, times: Times) -> None:
        for seconds in times.values():
            seconds.append([])
        self._last = {name: clock() for name, clock in CLOCKS.items()}

    def _note(self, times: Times) -> None:
        now = {name: clock() for name, clock in CLOCKS.items()}
        for name, seconds in times.items():
            seconds[-1].append(now[name] - self._last[name])
        self._last = now


def compared(epochs: int, quick: bool, folder: str) -> dict[str, Any]:
    """Median milliseconds of an iteration and a bare step, and what an epoch is to its steps."""
    cfg = load_config(measuring.ROOT / f'configs/{CONFIG}.py')
    cfg.work_dir, cfg.train_cfg.max_epochs = folder, epochs
    if quick:
        cfg.train_dataloader.num_batch_per_epoch = 2
    set_threads(cfg.train_dataloader.num_workers)  # as the command does
    optimizer = cfg.optim_wrapper.optimizer
    max_norm = cfg.optim_wrapper.clip_grad.max_norm
    runner = Runner.from_cfg(cfg)
    hook = BareSteps(optimizer.lr, optimizer.weight_decay, max_norm)
    runner.register_hook(hook)
    runner.train()

    found: dict[str, Any] = {'iterations': len(hook.bare['wall'][0])}
    for clock in CLOCKS:
        ours, bare = hook.runner[clock][1:], hook.bare[clock][1:]  # the first one warms up
        found[clock] = {
            'iteration_ms': statistics.median(sum(ours, [])) * 1e3,
            'bare_ms': statistics.median(sum(bare, [])) * 1e3,
            'ratio': measuring.ratio([*map(sum, ours)], [*map(sum, bare)]),
        }
    ours = [*map(sum, hook.runner['wall'][1:])]
    found['waited'] = measuring.ratio(hook.waited[1:], ours)
    return found


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """The page's table, and where it comes from."""
    heads = ['', 'iteration of the run', 'bare step', 'an epoch by its bare steps']
    cells: list[Sequence[str]] = [heads]
    for clock, name in (('wall', 'wall time'), ('cpu', "the process's CPU time")):
        row = results[clock]
        times = [f'{row[key]:.1f} ms' for key in ('iteration_ms', 'bare_ms')]
        cells.append([name, *times, f'{row["ratio"]:.3f} ×'])
    said = (
        f'Medians of {results["epochs"] - 1} epochs of {results["iterations"]} iterations. Of an '
        f"epoch's wall time {results['waited']:.1%} went into waiting for data; an image's views "
        f'take {results["view_ms"]:.2f} ms of CPU time in batches of {BATCH}.'
    )
    return {'first_run': f'{measuring.table(cells)}\n\n{said} {measuring.origin(results)}'}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, required=True, help='folder for JSON')
    parser.add_argument('--page', type=Path, help='page whose table is to be filled in')
    parser.add_argument('--quick', action='store_true', help='two epochs of two iterations')
    args = parser.parse_args()
    epochs, repeats = (2, 1) if args.quick else (16, 15)
    with tempfile.TemporaryDirectory() as folder:
        found = compared(epochs, args.quick, folder)
    where = measuring.where(torch.device('cpu'), ('torchvision',))
    torch.set_num_threads(1)
    views = batched_augmentation.milliseconds(CONFIG, BATCH, repeats)
    results = {'run': where, 'epochs': epochs, 'view_ms': views['ms'][1], **found}
    measuring.publish(results, 'first_run', tables, args.out, args.page)


if __name__ == '__main__':
    main()
