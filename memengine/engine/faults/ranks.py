"""Where each rank of a job is, so that those that wait for one in vain can say which, and where.

From a job's start to its end, a thread of each rank notes in the store of torch.distributed where
the rank is. One whose connection breaks, or that waits in vain, reads what the others have noted.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from memengine._torch_private.distributed import default_store
from memengine.engine.faults.signals import stop_signals_handled_by

__all__ = ['RankError', 'RankWatch', 'lost_connection', 'ranks_named']

BEAT_S = 2.0
# How long ranks that have lost a connection wait for the others to notice it, too.
NOTICE_S = 5.0
_GIVEN_UP = 'given up'  # key of the ranks that others have waited for in vain
_LOST = 'a lost connection'
_LIBRARIES = ('<', *{sysconfig.get_path(name) for name in ('stdlib', 'purelib', 'platlib')})

_CONNECTION = re.compile(
    r'connection (?:was )?(?:closed|reset|refused)|broken pipe|remote process (?:has )?exited'
    r'|socket timeout|timed out waiting|nccl (?:communicator was aborted|remote error)'
    r'|gloo/transport|pair closure',
    re.IGNORECASE,
)
_TIMEOUT = re.compile(r'time(?:d )?out', re.IGNORECASE)


class RankError(RuntimeError):
    """Another rank died, failed or hangs."""


def lost_connection(error: BaseException) -> bool:
    """Whether a rank failed only because another one went away."""
    return bool(_CONNECTION.search(str(error))) and not isinstance(error, (OSError, ValueError))


class _Note(NamedTuple):
    """What a rank tells of itself; times in seconds of the clock."""

    told_s: float
    process: str
    place: str
    since_s: float
    code: str
    ended: str  # '' while it runs, else by what

    @property
    def where(self) -> str:
        return f'{self.place} since {_clock(self.since_s)}, at {self.code}'


class RankWatch:
    """Tells the other ranks where this one is, and finds out which of them has failed.

    Cost: some hundred bytes every two seconds, from a thread; nothing in a step.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._store = _own_connection()
        self._process = f'host {socket.gethostname()}, process {os.getpid()}'
        self._place, self._since_s = 'start-up', time.time()
        self._warned_of_s = 0.0
        self._ended = ''
        self._stopped = threading.Event()
        self._thread = threading.Thread()

    def at(self, place: str) -> None:
        """Note where this rank is from now on."""
        self._place, self._since_s = place, time.time()

    def start(self) -> None:
        """Begin to tell the others."""
        self._stopped.clear()
        self._ended = ''
        self._thread = threading.Thread(target=self._tell, name='rank watch', daemon=True)
        self._thread.start()

    def stop(self, ended: str) -> None:
        """Tell the others for the last time, and by what this rank has ended."""
        self._ended = ended
        self._stopped.set()
        self._thread.join(NOTICE_S)

    def explain(self, error: BaseException) -> str:
        """Which ranks are at fault for an error for which :func:`lost_connection` holds.

        Takes seconds: the others have to notice, too, and those that do are not at fault. A rank
        that hangs is told that it is given up.
        """
        late = bool(_TIMEOUT.search(str(error)))
        self._ended = _LOST
        try:
            with stop_signals_handled_by(_wait_until_said):
                self._write()
                before = self._read()
                time.sleep(NOTICE_S)
                found = self._at_fault(before, self._read())
        except (RuntimeError, OSError):
            found = ['rank 0, through which all others hear of each other, is gone, too']
        what = 'the connection to another rank was lost'
        if late:
            what = (
                f'another rank did not answer within {self._timeout_s:g} s '
                '(env_cfg.dist_cfg.timeout)'
            )
        return f'{what}: {"; ".join(found) or "all of them have lost it; which was first is open"}'

    def _at_fault(self, before: dict[int, _Note], after: dict[int, _Note]) -> list[str]:
        lines, hanging = [], []
        for rank in range(self._world_size):
            note = after.get(rank)
            who = f'rank {rank}' if note is None else f'rank {rank} ({note.process})'
            if note is None:
                lines.append(f'{who} was never heard of')
            elif note.ended and note.ended != _LOST:
                lines.append(f'{who} ended by {note.ended} in {note.place}; its own error says why')
            elif not note.ended and note == before.get(rank):
                told = _clock(note.told_s)
                lines.append(f'{who} died; last heard of at {told}, in {note.where}')
            elif not note.ended:
                hanging.append(rank)
                lines.append(f'{who} has been in {note.where}')
        if hanging:
            self._store.set(_GIVEN_UP, json.dumps(hanging))
        return lines

    def _tell(self) -> None:
        """Write a note every few seconds; runs in a thread."""
        try:
            self._write()
            while not self._stopped.wait(BEAT_S):
                self._write()
                self._check()
            self._write()
        except (
            RuntimeError,
            OSError,
        ):  # the store has ended with rank 0, which is told of elsewhere
            return

    def _check(self) -> None:
        """Warn when this rank stands still, and end it when the others have given it up."""
        stands = f'in {self._note().where}'
        given_up = self._store.check([_GIVEN_UP]) and json.loads(self._store.get(_GIVEN_UP))
        if given_up and self._rank in given_up and not self._ended:
            self._say(f'error: the other ranks have given this one up; it has been {stands}')
            os._exit(1)
        since_s = self._since_s
        if time.time() - since_s > self._timeout_s / 2 and self._warned_of_s != since_s:
            self._warned_of_s = since_s
            self._say(f'warning: this rank has been {stands}')

    def _say(self, text: str) -> None:
        print(f'memengine [rank {self._rank}]: {text}', file=sys.stderr, flush=True)

    def _note(self) -> _Note:
        place, since_s = self._place, self._since_s
        return _Note(time.time(), self._process, place, since_s, _main_thread_at(), self._ended)

    def _write(self) -> None:
        self._store.set(f'rank {self._rank}', json.dumps(self._note()))

    def _read(self) -> dict[int, _Note]:
        keys = {rank: f'rank {rank}' for rank in range(self._world_size)}
        return {
            rank: _Note(*json.loads(self._store.get(key)))
            for rank, key in keys.items()
            if self._store.check([key])
        }


@contextmanager
def ranks_named(watch: RankWatch | None) -> Iterator[None]:
    """Tell other ranks where this one is, and turn a lost connection into an error that names one.

    Raises:
        RankError: When another rank died, failed or hangs: which, since when, and where it was.
    """
    if watch is None:
        yield
        return
    watch.start()
    ended = 'its end'
    try:
        yield
    except BaseException as error:
        ended = type(error).__name__
        if lost_connection(error):
            ended = _LOST
            raise RankError(watch.explain(error)) from error
        raise
    finally:
        watch.stop(ended)


def _wait_until_said(number: int, frame: object) -> None:
    """A launcher ends the other ranks when one has failed; first they say which."""


def _own_connection() -> dist.Store:
    """A connection to the job's store for the thread, as one that is in use blocks for others."""
    store = default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        wait = timedelta(seconds=NOTICE_S)
        store = dist.TCPStore(store.host, store.port, is_master=False, timeout=wait)
    # torchrun's store outlives the ranks that it starts again.
    start = os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')
    return dist.PrefixStore(f'memengine, start {start}', store)


def _main_thread_at() -> str:
    """Where the main thread is: its innermost line outside of libraries, if there is one."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return 'its end'
    lines = [(each.f_code, line) for each, line in traceback.walk_stack(frame)]
    own = (each for each in lines if not each[0].co_filename.startswith(_LIBRARIES))
    code, line = next(own, lines[0])
    return f'{code.co_name} ({Path(code.co_filename).name}, line {line})'


def _clock(time_s: float) -> str:
    return time.strftime('%H:%M:%S', time.localtime(time_s))
