"""Signals that ask a process to stop: who handles them, and the status that it ends with.

Imports neither torch nor MMEngine: the command line listens before it loads them.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_PREEMPTION = (signal.SIGUSR1, signal.SIGUSR2)

REQUEUE_STATUS = 75
"""How a run that was preempted ends: sysexits' EX_TEMPFAIL, which asks to be started again."""


class Interrupted(KeyboardInterrupt):
    """A signal asked the process to stop."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(self.signal.name)


def exit_status(interrupt: KeyboardInterrupt) -> int:
    """What a process ends with: 75 when it was preempted, else 128 and the signal's number."""
    number = interrupt.signal if isinstance(interrupt, Interrupted) else signal.SIGINT
    return REQUEUE_STATUS if number in _PREEMPTION else 128 + number


def raise_interrupted(number: int, frame: Any) -> NoReturn:
    """A handler that stops at once."""
    raise Interrupted(number)


@contextmanager
def stop_signals_handled_by(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Hand the signals that ask to stop to ``handler``, and to the previous handlers afterwards.

    SIGHUP stays ignored where it is, as under ``nohup``. Outside the main thread nothing is done,
    as Python calls handlers there only.
    """
    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for changed, before in previous.items():
            signal.signal(changed, signal.SIG_DFL if before is None else before)
