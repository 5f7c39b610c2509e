"""What a run says on the console; the log file has all of it, with environment and config."""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any

import torch
from mmengine.utils.dl_utils import collect_env
from torch import distributed as dist

import memengine
from memengine.engine.step import unwrap
from memengine.memory.headroom import headroom_bytes

# MMEngine's own, of no use to who watches: how hooks are sorted, the name of the run after each
# epoch, what its own code is yet to change, what its drawings of predictions would lack.
_FILE_ONLY = (
    'Hooks will be executed',
    'Exp name: ',
    'Distributed training is not used',
    '"FileClient" will be deprecated',
    '"HardDiskBackend" is the alias',
    'Dataset SeededDataset has no metainfo',
)
_COLOURS = {logging.WARNING: '33', logging.ERROR: '31', logging.CRITICAL: '31'}
_MIB = 2**20


class _Lines(logging.Formatter):
    """The time and the message; the level where it is more than information."""

    def __init__(self, colour: bool) -> None:
        super().__init__('%(asctime)s  %(message)s', '%H:%M:%S')
        self._colour = colour

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        if record.levelno > logging.INFO:
            level = f'{record.levelname}:'
            if self._colour:
                level = f'\x1b[{_COLOURS.get(record.levelno, "0")}m{level}\x1b[0m'
            record.message = f'{level} {record.message}'
        return super().formatMessage(record)


class _WriteErrors:
    """Says once that a log file cannot be written, where logging shows the stack for each line."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.count = 0

    def __call__(self, record: logging.LogRecord) -> None:
        """In the place of a handler's ``handleError``."""
        self.count += 1
        if self.count == 1:
            text = f'the log file {self._path} lacks what follows: {sys.exc_info()[1]}'
            print(f'memengine: warning: {text}', file=sys.stderr, flush=True)


def writes_to_terminal(handler: logging.Handler) -> bool:
    """Whether a handler writes to a stream that is no file of its own."""
    return isinstance(handler, logging.StreamHandler) and not isinstance(
        handler, logging.FileHandler
    )


def set_up_console(logger: logging.Logger, console: str) -> None:
    """Have a run's logger say on the console what one wants to read there.

    Args:
        logger: The run's, with its handlers.
        console: ``'normal'``; ``'quiet'`` for warnings and errors only; ``'verbose'`` for all that
            goes to the log file.
    """
    for file in logger.handlers:
        if isinstance(file, logging.FileHandler):
            file.handleError = _WriteErrors(file.baseFilename)  # type: ignore[method-assign]
    for handler in filter(writes_to_terminal, logger.handlers):
        stream = getattr(handler, 'stream', sys.stdout)
        handler.setFormatter(_Lines(colour=stream.isatty()))
        if console == 'quiet':
            handler.setLevel(max(handler.level, logging.WARNING))
        if console != 'verbose':
            handler.addFilter(lambda record: not record.getMessage().startswith(_FILE_ONLY))


def to_log_file(logger: logging.Logger, text: str, level: int = logging.INFO) -> Path | None:
    """Write a text to the logger's file, not to the console; returns the file that has it."""
    for handler in logger.handlers:
        if isinstance(handler, logging.FileHandler):
            errors = handler.handleError
            before = errors.count if isinstance(errors, _WriteErrors) else 0
            handler.handle(logger.makeRecord(logger.name, level, '', 0, text, (), None))
            failed = isinstance(errors, _WriteErrors) and errors.count > before
            return None if failed else Path(handler.baseFilename)
    return None


def log_environment(runner: Any) -> None:
    """Say what runs and on what; all of the environment and the config go to the log file."""
    facts = {
        **collect_env(),
        'memengine': memengine.__version__,
        'Seed': runner.seed,
        'Launcher': runner._launcher,
        'Ranks': runner.world_size,
    }
    text = '\n'.join(f'    {name}: {value}' for name, value in facts.items())
    say = runner.logger.info
    text = f'Environment:\n{text}\nConfig:\n{runner.cfg.pretty_text}'
    log = None
    if runner.cfg.get('console') == 'verbose':
        say(text)
    else:
        log = to_log_file(runner.logger, text)
    say(
        f'memengine {memengine.__version__}, torch {torch.__version__}, '
        f'Python {platform.python_version()}'
    )
    say(f'Device: {_device(runner.world_size)}')
    where = f'; environment and config are in {shortened(log)}' if log else ''
    say(f'Run: {shortened(Path(runner.work_dir))}, seed {runner.seed}{where}')


def describe_run(runner: Any) -> Iterator[str]:
    """What is about to be trained, on what and how long, in a line each."""
    model = unwrap(runner.model)
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    yield (
        f'Model: {type(model).__name__}, {_count(parameters):,} parameters, {_count(trained):,} of '
        f'them trained; {_mib(parameters)} of weights, {_mib(trained)} of gradients'
    )
    loader, loop = runner.train_loop.dataloader, runner.train_loop
    ranks = f' on each of {runner.world_size} ranks' if runner.world_size > 1 else ''
    workers = getattr(loader, 'num_workers', 0)
    by = f'{workers} worker{"s" * (workers != 1)}' if workers else 'the main process'
    validation = getattr(runner._val_loop, 'dataloader', None)
    held_out = f'; {_size(validation)} for validation' if validation is not None else ''
    yield (
        f'Data: {_size(loader)}, {getattr(loader, "batch_size", None) or "?"} a step{ranks}, '
        f'loaded by {by}{held_out}'
    )
    length = f'{loop.max_iters:,} iterations'
    if loop.max_epochs and loop.max_epochs > 1:
        length = f'{loop.max_epochs} epochs, {length}'
    optimizer = getattr(runner.optim_wrapper, 'optimizer', None)
    if optimizer is None:  # several, by name
        yield f'Training: {length}'
        return
    dtype = getattr(getattr(runner.optim_wrapper, 'precision', None), 'dtype', None)
    if trained and dtype in (None, torch.float32):  # no autocast
        dtype = trained[0].dtype
    precision = str(dtype or torch.float32).removeprefix('torch.')
    rate = optimizer.param_groups[0].get('initial_lr', optimizer.param_groups[0]['lr'])
    yield f'Training: {length} by {type(optimizer).__name__}, lr {rate:g}, {precision}'


def _device(ranks: int) -> str:
    """The device of this rank, how many there are, and the memory that is free."""
    by = f', {ranks} ranks by {dist.get_backend()}' if ranks > 1 else ''
    if torch.cuda.is_available():
        device = torch.device('cuda', torch.cuda.current_device())
        name = torch.cuda.get_device_name(device)
    else:
        device = torch.device('cpu')
        cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
        name = f'CPU, {cores} cores'
    free = headroom_bytes(device)
    return f'{name}{by}' + (f', {free / 2**30:.1f} GiB of memory free' if free else '')


def _size(loader: Any) -> str:
    dataset = getattr(loader, 'dataset', None)
    return f'{len(dataset):,} samples' if isinstance(dataset, Sized) else 'a stream of samples'


def _count(parameters: list[torch.nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _mib(parameters: list[torch.nn.Parameter]) -> str:
    return f'{sum(p.numel() * p.element_size() for p in parameters) / _MIB:,.1f} MiB'


def shortened(path: Path) -> Path:
    """A path from the current folder, where it lies in it."""
    inside = path.is_absolute() and path.is_relative_to(Path.cwd())
    return path.relative_to(Path.cwd()) if inside else path
