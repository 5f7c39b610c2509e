"""One run at a time in a work dir: another one is refused while the first lives.

The lock is a file ``run.lock`` that names the host and the process. A process that died on the same
host is seen by its number and the time it started at. On another host it cannot be seen, so a run
touches its lock every few seconds: where that stops, the run is dead.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ['LOCK_FILE', 'WorkDirLockedError', 'work_dir_lock']

LOCK_FILE = 'run.lock'
TOUCH_INTERVAL_S = 20.0
DEAD_AFTER_S = 120.0  # of silence, from another host


class WorkDirLockedError(ValueError):
    """Another run is writing into the work dir."""


@contextmanager
def work_dir_lock(work_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a work dir for this process; one process of a job is enough.

    Raises:
        WorkDirLockedError: While another run lives; naming its host and process.

    Cost: where the last run died on another host, up to two minutes of waiting.
    """
    path = work_dir / LOCK_FILE
    _acquire(path, say)
    ended = threading.Event()
    thread = threading.Thread(target=_keep_touching, args=(path, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if path.exists() and _parsed(path.read_bytes()) == _ourselves():
            path.unlink()


def is_locked(work_dir: Path) -> bool:
    """Whether another process holds a work dir, and may live."""
    path = work_dir / LOCK_FILE
    with suppress(FileNotFoundError):  # nobody does, or it has ended meanwhile
        holder = _parsed(path.read_bytes())
        return holder is not None and holder != _ourselves() and _may_live(path, holder)
    return False


def _acquire(path: Path, say: Callable[[str], None]) -> None:
    """Write ourselves into the lock, as soon as nobody alive is in it."""
    ourselves, waiting = _ourselves(), False
    while True:
        with _alone_with(path) as descriptor:
            holder = _parsed(os.pread(descriptor, 4096, 0))
            if holder is None or not _may_live(path, holder):
                if holder is not None:
                    say(f'{path}: the run of {_named(holder)} has died, its lock is taken over')
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(ourselves).encode(), 0)
                os.fsync(descriptor)
                return
            touched_at = os.fstat(descriptor).st_mtime_ns
        if holder['place'] == ourselves['place']:
            raise _refusal(path, holder)
        if not waiting:
            named = _named(holder)
            say(f'{path}: waiting up to {DEAD_AFTER_S:.0f} s for a sign of life of {named}')
        waiting = True
        time.sleep(TOUCH_INTERVAL_S / 4)
        with suppress(FileNotFoundError):
            if path.stat().st_mtime_ns != touched_at:
                raise _refusal(path, holder)


@contextmanager
def _alone_with(path: Path) -> Iterator[int]:
    """A descriptor of the file, made if need be, which no other process uses meanwhile."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            with suppress(OSError):  # some network file systems have none, and only a race is lost
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                yield descriptor
                return
            # Its holder has removed it since it was opened: once more, with a new one.
        finally:
            os.close(descriptor)


def _may_live(path: Path, holder: dict[str, Any]) -> bool:
    if holder['place'] == _place():
        return _started_at(holder['process']) == holder['started']
    probe = path.with_name(f'.{path.name}.{os.getpid()}')
    probe.touch()  # the time by the file system's own clock
    silent_s = probe.stat().st_mtime - path.stat().st_mtime
    probe.unlink()
    return silent_s < DEAD_AFTER_S


def _keep_touching(path: Path, ended: threading.Event) -> None:
    while not ended.wait(TOUCH_INTERVAL_S):
        with suppress(OSError):  # of a work dir that was moved, the next checkpoint tells
            os.utime(path)


def _ourselves() -> dict[str, Any]:
    process = os.getpid()
    started = _started_at(process)
    return dict(host=socket.gethostname(), place=_place(), process=process, started=started)


def _place() -> str:
    """Where processes see each other: a start of a host, and a container on it."""
    boot, container = Path('/proc/sys/kernel/random/boot_id'), Path('/proc/self/ns/pid')
    if not boot.exists():
        return socket.gethostname()
    return f'{boot.read_text().strip()} {os.readlink(container)}'


def _started_at(process: int) -> str | None:
    """When a process of this place was started, as numbers are used again; None if it is dead."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # it is somebody else's
        pass
    stat = Path(f'/proc/{process}/stat')
    if not stat.exists():
        return 'unknown'
    state, *fields = stat.read_text().rpartition(')')[2].split()
    return None if state == 'Z' else fields[18]


def _parsed(content: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(content)
    except ValueError:  # nobody is in it: its holder died before it had written
        return None
    is_ours = isinstance(found, dict) and {'host', 'place', 'process', 'started'} <= found.keys()
    return found if is_ours else None


def _named(holder: dict[str, Any]) -> str:
    return f'process {holder["process"]} on {holder["host"]}'


def _refusal(path: Path, holder: dict[str, Any]) -> WorkDirLockedError:
    return WorkDirLockedError(
        f'work_dir: another run, {_named(holder)}, is writing into {path.parent}; wait for its end '
        'or stop it, or choose another folder with --work-dir'
    )
