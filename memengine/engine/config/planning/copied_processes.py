"""Processes that predict beside each other: a prediction is Python, which takes one core."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import weakref
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from functools import cached_property
from multiprocessing.util import Finalize
from typing import Any

import torch
from mmengine.device import get_device

from memengine.engine.distributed.threads import available_cores
from memengine.memory.cpu_workspaces import predict_for_threads

_MOST = 4  # processes: each takes some hundred MiB, and a plan asks for a dozen things at a time

_subject: Any = None  # of a copy, what its methods are called on


class Copies:
    """Copies of this process, made when they are first asked for.

    As many as torch may use threads and the process cores. There are none where one is all, where
    no process can be copied (on other systems than Linux, or for want of memory), and where copies
    would be of no use: a copy cannot use the GPU of its process, nor autograd if that has used it.

    Args:
        subject: What methods are called on; each copy has it as it is when copies are made. It is
            not held here: copies end with what has it.
    """

    def __init__(self, subject: object) -> None:
        self._subject = weakref.ref(subject)

    @cached_property
    def _pool(self) -> ProcessPoolExecutor | None:
        can_copy = sys.platform == 'linux' and get_device() == 'cpu'
        cores = min(torch.get_num_threads(), available_cores())  # which torch does not ask for
        number = min(cores, _MOST) if can_copy else 1
        if number == 1:
            return None
        others = multiprocessing.active_children()
        context = multiprocessing.get_context('fork')
        pool = ProcessPoolExecutor(number, context, _begin, (self._subject,))
        try:
            can_predict = pool.submit(_has_autograd).result()
        except (BrokenExecutor, OSError):  # no room for a process
            can_predict = False
        if not can_predict:
            pool.shutdown()
            for copy in multiprocessing.active_children():
                if copy not in others:  # made before there was no room, and known to no pool
                    copy.kill()
                    copy.join()
            return None
        # A process that is itself multiprocessing's waits for its children when it ends, and
        # closes queues (of priority 10) before that.
        Finalize(self, pool.shutdown, kwargs={'cancel_futures': True}, exitpriority=20)
        return pool

    def __bool__(self) -> bool:
        return self._pool is not None

    def begin(self, method: str, *args: Any) -> Future[Any]:
        """Begin to call a method of the subject in one of the copies."""
        assert self._pool is not None, 'there are none'
        return self._pool.submit(_call, method, args)

    def give_up(self) -> None:
        """Go on without copies, as one of them was ended."""
        self.__dict__['_pool'] = None


def _begin(subject: weakref.ref[Any]) -> None:
    global _subject
    _subject = subject()
    predict_for_threads(torch.get_num_threads())
    torch.set_num_threads(1)  # threads are not copied, and would be waited for
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which the first process answers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, 'this is a copy'
    parent.join()
    os._exit(1)


def _has_autograd() -> bool:
    try:
        torch.zeros((), requires_grad=True).backward()
    except RuntimeError:  # 'Unable to handle autograd's threading in combination with fork'
        return False
    return True


def _call(method: str, args: tuple[Any, ...]) -> Any:
    return getattr(_subject, method)(*args)
