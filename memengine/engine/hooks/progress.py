"""A live progress bar on a terminal."""

from __future__ import annotations

import importlib.util
import logging
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import Any

from mmengine.hooks import Hook
from mmengine.logging import HistoryBuffer
from mmengine.runner import BaseLoop, EpochBasedTrainLoop
from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from memengine.engine.cli.console import writes_to_terminal
from memengine.engine.hooks.around_next_call import wrap_next_call
from memengine.registry import HOOKS

_REFRESH_S = 0.25


def _terminal() -> Console | None:
    """The terminal or notebook that is watched, if it is one on which a line can be redrawn."""
    console = Console()
    if console.is_jupyter:
        return console if importlib.util.find_spec('ipywidgets') else None
    return console if sys.stdout.isatty() and not console.is_dumb_terminal else None


class _LogAboveBar(logging.Handler):
    """Prints above the bar what a stream handler would have printed into it.

    LoggerHook's lines for each few iterations say what the bar says and are left out; they are
    in the log file all the same.
    """

    def __init__(self, replaced: logging.Handler, console: Console) -> None:
        super().__init__(replaced.level)
        self.setFormatter(replaced.formatter)
        self.filters = list(replaced.filters)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        iteration = record.funcName in ('after_train_iter', 'after_val_iter', 'after_test_iter')
        if iteration and record.module == 'logger_hook':
            return
        self._console.print(Text.from_ansi(self.format(record)), soft_wrap=True)


@HOOKS.register_module()
class ProgressHook(Hook):
    """Shows where training stands, in place of a line of text every few iterations.

    On a terminal, and in notebooks where ipywidgets is installed.

    Epoch, time left, loss, learning rate, the last k-NN accuracy, images per second and memory,
    as far as they are logged (see ``MemoryHook`` and ``KNNMetric``). Warnings, validation results
    and whatever else is printed appear above the bar. The log file stays as it is. Does nothing
    elsewhere, with ``console='quiet'`` and on all ranks but the first.
    """

    priority = 'LOW'  # after what it shows has been logged

    def __init__(self) -> None:
        self._live: Live | None = None
        self._bar: Progress | None = None
        self._figures = ''
        self._stage = ''
        self._shown_s = 0.0
        self._replaced: list[tuple[logging.Logger, list[logging.Handler]]] = []

    # -------------------------------------------------------------- begin and end

    def before_run(self, runner: Any) -> None:
        """Make sure that the terminal is given back, however training ends."""
        if isinstance(runner._train_loop, BaseLoop):
            wrap_next_call(runner._train_loop, 'run', closing(self))

    def before_train(self, runner: Any) -> None:
        """Show the bar."""
        is_watched = runner.rank == 0 and runner.cfg.get('console') != 'quiet'
        console = _terminal() if is_watched else None
        if console is None:
            return
        self._bar = Progress(
            TextColumn('{task.description}'),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn('ETA'),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._bar.add_task(self._position(runner), total=runner.max_iters, completed=runner.iter)
        # Redrawn by this thread alone: a lock that another one holds would be held for ever in
        # the data loader's forked workers, and hang the first of them that prints.
        self._live = Live(console=console, get_renderable=self._render, auto_refresh=False)
        self._live.start()
        self._redirect((runner.logger, logging.getLogger()), console)

    def close(self) -> None:
        """Give the terminal back; training may have ended or failed."""
        for logger, handlers in self._replaced:
            logger.handlers[:] = handlers
        self._replaced = []
        if self._live is not None:
            self._live.stop()
        self._live = self._bar = None

    def after_run(self, runner: Any) -> None:
        """Give the terminal back."""
        self.close()

    def _redirect(self, loggers: Iterable[logging.Logger], console: Console) -> None:
        for logger in loggers:
            self._replaced.append((logger, list(logger.handlers)))
            logger.handlers[:] = [
                _LogAboveBar(handler, console) if writes_to_terminal(handler) else handler
                for handler in logger.handlers
            ]

    # -------------------------------------------------------------- what is shown

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Move on."""
        self._stage = ''
        self._update(runner, runner.iter + 1)

    def before_val_epoch(self, runner: Any) -> None:
        """Say that this is validation."""
        self._stage = 'validating'
        self._update(runner, now=True)

    def after_val_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Say how far validation is."""
        self._stage = f'validating {batch_idx + 1}/{len(runner.val_dataloader)}'
        self._update(runner)

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        """Show the result."""
        self._stage = ''
        self._update(runner, now=True)

    def after_train(self, runner: Any) -> None:
        """Show the last figures."""
        self._update(runner, now=True)

    def _update(self, runner: Any, done: int | None = None, now: bool = False) -> None:
        if self._bar is None or self._live is None:
            return
        task = self._bar.task_ids[0]
        self._bar.update(task, completed=done)
        time_s = time.monotonic()
        if now or time_s - self._shown_s > _REFRESH_S:
            self._shown_s = time_s
            self._bar.update(task, description=self._position(runner))
            figures = _formatted_scalars(runner.message_hub.log_scalars)
            self._figures = ' · '.join([*figures, self._stage] if self._stage else figures)
            self._live.refresh()

    def _render(self) -> Group:
        assert self._bar is not None
        return Group(self._bar.get_renderable(), Text(self._figures, style='dim'))

    @staticmethod
    def _position(runner: Any) -> str:
        if isinstance(runner.train_loop, EpochBasedTrainLoop):
            return f'epoch {min(runner.epoch + 1, runner.max_epochs)}/{runner.max_epochs}'
        return f'iteration {runner.iter}/{runner.max_iters}'


def _formatted_scalars(scalars: Mapping[str, HistoryBuffer]) -> list[str]:
    """What is known, as short texts."""
    knn = next((n for n in scalars if n.startswith('val/') and n.endswith('knn_top1')), '')
    kinds = [
        ('train/loss', 'loss {:.4g}'),
        ('train/lr', 'lr {:.2e}'),
        (knn, 'k-NN {:.1f} %'),
        ('train/images_per_s', '{:,.0f} images/s'),
        ('train/memory_mib', '{} MiB'),
        ('train/saved_mib', '{} MiB saved'),
        ('train/rss_mib', '{} MiB resident'),
    ]
    known = [(name, text, scalars[name].current()) for name, text in kinds if name in scalars]
    return [text.format(_mib(v) if name.endswith('_mib') else v) for name, text, v in known]


def _mib(value: float) -> str:
    return f'{value:,.0f}' if value >= 10 else f'{value:.2f}'
