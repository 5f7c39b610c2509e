"""Data-loader workers that die or hang: which sample they had in hand, and who ends them."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_sharer
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch.utils.data import DataLoader, get_worker_info

from memengine.engine.faults.signals import STOP_SIGNALS

BATCH_TIMEOUT_S = 300
"""How long a batch is waited for, where the loader's ``timeout`` says nothing."""

_DIED = re.compile(
    r'DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\) '
    r'(?:exited unexpectedly(?: (?P<code>with exit code \d+))?'
    r'|is (?P<signal>killed by signal: [\w ]+))'
)
_LATE = re.compile(r'DataLoader timed out after (?P<seconds>[\d.]+) seconds')


class WorkerError(RuntimeError):
    """A worker of a data loader died, or gives no batch."""


@runtime_checkable
class CountsSkipped(Protocol):
    """A data set that goes on without samples that cannot be read."""

    skipped: int

    def __len__(self) -> int: ...


class _Worker(NamedTuple):
    """A worker, the sample that it loads (-1: none), and since when (nanoseconds of the clock)."""

    pid: int
    sample: int
    since_ns: int


class SamplesInHand:
    """Which sample each worker of a loader is loading, in memory that all processes share.

    Cost: 24 bytes for each worker, and some microseconds for each sample.
    """

    def __init__(self, workers: int) -> None:
        self._rows = torch.zeros(max(workers, 1), 3, dtype=torch.int64).share_memory_()

    def note(self, index: int) -> None:
        """Note that this worker begins to load a sample, or with -1 that it has none in hand."""
        worker = get_worker_info()
        if worker is not None:
            self._rows.numpy()[worker.id] = os.getpid(), index, time.time_ns()

    def read(self) -> list[_Worker]:
        """What the workers that have begun do now, or did when they died."""
        return [_Worker(*row) for row in self._rows.tolist() if row[0]]


def guard_workers(loader: DataLoader) -> DataLoader:
    """Have a loader's workers outlive signals that are meant for the main process."""
    loader.worker_init_fn = partial(_init_worker, loader.worker_init_fn)
    return loader


def _init_worker(init_fn: Callable[[int], None] | None, worker_id: int) -> None:
    """Leave it to the main process when this worker ends, then do what the user asks for.

    Schedulers, service managers and terminals signal every process of a job; a worker that ended
    then would take the step with it, and the checkpoint that should follow.
    """
    for number in STOP_SIGNALS:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, 'sigwaitinfo'):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        # One that is blocked is waited for all the same; multiprocessing's resource tracker
        # unblocks it when it starts.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Thread(target=_end_if_parent_asks, args=(os.getppid(),), daemon=True).start()
    worker: Any = get_worker_info()
    if hasattr(worker.dataset, 'in_hand'):
        worker.dataset.in_hand.note(-1)
    if init_fn is not None:
        init_fn(worker_id)


def _end_if_parent_asks(parent: int) -> None:
    """End upon a SIGTERM of the main process, by which torch ends workers, and of nobody else."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


@contextmanager
def samples_named(loaders: Callable[[], Mapping[str, DataLoader]]) -> Iterator[None]:
    """Turn torch's error for a worker that died or hangs into one that names the sample.

    torch raises it wherever the main process happens to be, so its traceback says nothing.
    """
    try:
        with _hand_over_timed(loaders):
            yield
    except (RuntimeError, OSError, EOFError) as raised:
        error = raised if isinstance(raised, RuntimeError) else _hear_of_death(loaders) or raised
        text = f'{error.__cause__ or ""} {error}'  # the cause, if there is one, knows more
        died, late = list(_DIED.finditer(text)), _LATE.search(text)
        if not died and not late:
            raise
        if threading.current_thread() is threading.main_thread():
            # Torch's handler would raise again for each worker that ends from now on. Without it
            # torch looks after its workers every five seconds.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        workers = _workers_of(loaders())
        for child in multiprocessing.active_children():
            if child.pid in {worker.pid for worker, _, _ in workers}:
                child.kill()  # one that hangs may hear nothing else, and would be waited for
                child.join()
        reason = _who_died(died, workers) if died else late and _who_hangs(late, workers)
        raise WorkerError(reason or str(error)) from error


@contextmanager
def _hand_over_timed(loaders: Callable[[], Mapping[str, DataLoader]]) -> Iterator[None]:
    """Keep a loader's ``timeout`` while the main process waits for the memory of a batch, too.

    A thread of the worker hands it over, which cannot run while a sample holds the interpreter;
    torch's own timeout ends when the batch is announced, and the wait after that has none.
    """
    main, left = threading.get_ident(), threading.Event()
    late: list[float] = []

    def watch() -> None:
        since = time.monotonic()
        while not left.wait(1):
            if not _waits_for_memory(main):
                since = time.monotonic()
            for loader in loaders().values() if time.monotonic() - since > 1 else ():
                if 0 < loader.timeout < time.monotonic() - since:
                    late.append(loader.timeout)
                    _break_off(main)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    except (RuntimeError, OSError, EOFError):
        if late:
            raise RuntimeError(f'DataLoader timed out after {late[0]} seconds') from None
        raise
    finally:
        left.set()


def _waits_for_memory(thread: int) -> bool:
    """Whether a thread waits for another process to hand over memory that both will share."""
    return any(frame.f_code.co_filename == resource_sharer.__file__ for frame in _frames_of(thread))


def _frames_of(thread: int) -> list[FrameType]:
    """Of the functions that a thread is in, the innermost first."""
    frame = sys._current_frames().get(thread)
    return [] if frame is None else [each for each, _ in traceback.walk_stack(frame)]


def _break_off(thread: int) -> None:
    """End a thread's wait for another process.

    Its connection is closed from this side: had the other one been killed, torch's handler of
    SIGCHLD might raise at any line that the error of the connection passes.
    """
    owners = (frame.f_locals.get('self') for frame in _frames_of(thread))
    waits_on = next((owner for owner in owners if isinstance(owner, Connection)), None)
    if waits_on is not None:
        with socket.socket(fileno=os.dup(waits_on.fileno())) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def _hear_of_death(loaders: Callable[[], Mapping[str, DataLoader]]) -> RuntimeError | None:
    """What torch raises a moment after the pipes of a worker that dies have broken, if one does.

    It raises once, and nobody hears it in a destructor: so workers are looked after, too.
    """
    try:
        time.sleep(1)
    except RuntimeError as error:
        return error
    alive = {child.pid for child in multiprocessing.active_children()}
    busy = [worker.pid for worker, _, _ in _workers_of(loaders()) if worker.sample >= 0]
    dead = ', '.join(str(pid) for pid in busy if pid not in alive)
    return RuntimeError(f'DataLoader worker (pid(s) {dead}) exited unexpectedly') if dead else None


def count_skipped(loaders: Mapping[str, DataLoader]) -> Iterator[str]:
    """A sentence for each loader of which samples could not be read."""
    for name, loader in loaders.items():
        dataset = getattr(loader.dataset, 'dataset', loader.dataset)
        if isinstance(dataset, CountsSkipped) and dataset.skipped:
            yield f'{name}: {dataset.skipped} of {len(dataset)} samples were skipped as unreadable'


_Workers: TypeAlias = 'list[tuple[_Worker, str, Any]]'  # whose loader it is, and its data set


def _workers_of(loaders: Mapping[str, DataLoader]) -> _Workers:
    return [
        (worker, name, loader.dataset)
        for name, loader in loaders.items()
        if hasattr(loader.dataset, 'in_hand')
        for worker in loader.dataset.in_hand.read()
    ]


def _who_died(deaths: list[re.Match[str]], workers: _Workers) -> str | None:
    """The first of the deaths that is one of ours; torch may tell of an older one, too."""
    for found, (worker, name, dataset) in itertools.product(deaths, workers):
        if str(worker.pid) in found['pids'].split(', '):
            ended = f'ended {found["code"] or "unexpectedly"}'
            how = f'was {found["signal"]}' if found['signal'] else ended
            doing = 'while it had no sample in hand'
            if worker.sample >= 0:
                doing = f'while it loaded {dataset.sample_name(worker.sample)}'
            advice = f'with {name}.num_workers=0 the same happens where it can be seen'
            return f'{name}: a worker (pid {worker.pid}) {how} {doing}; {advice}'
    return None


def _who_hangs(found: re.Match[str], workers: _Workers) -> str | None:
    """Who has had a sample in hand for longest."""
    loading = [each for each in workers if each[0].sample >= 0]
    if not loading:
        return None
    worker, name, dataset = min(loading, key=lambda each: each[0].since_ns)
    since = time.strftime('%H:%M:%S', time.localtime(worker.since_ns / 1e9))
    return (
        f'{name}: no batch within {found["seconds"]} s ({name}.timeout): a worker (pid '
        f'{worker.pid}) has been loading {dataset.sample_name(worker.sample)} since {since}'
    )
