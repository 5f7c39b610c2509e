"""Steps that run out of memory, repeated in smaller slices as if they had not been tried.

The size of a slice never changes the gradient, so a step that did not fit may be undone and run
again with smaller ones: random state, buffers and gradients are put back first, and the run is the
one that smaller slices would have given from the start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from memengine._torch_private.modules import BatchNorm
from memengine.techniques.modules.random_state import RandomState, accelerators_of
from memengine.techniques.slices.sliced_step import Context

__all__ = ['is_out_of_memory', 'run_until_it_fits']

T = TypeVar('T')

_MESSAGES = re.compile(r"out of memory|can't allocate memory|STATUS_ALLOC_FAILED", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on an accelerator or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(_MESSAGES.search(str(error)))


def run_until_it_fits(
    step: Callable[[Context], T], shrink: Callable[[], bool], module: nn.Module
) -> T:
    """Run a step; whenever it runs out of memory, undo it, shrink its slices and repeat it.

    Args:
        step: Adds the step's gradient. It is given a context for the blocks in which ranks
            exchange data (``exchange`` of :func:`~memengine.techniques.cached_step`
            and :func:`~memengine.techniques.additive_step`).
        shrink: Makes slices smaller for the next try; False when they are as small as can be.
        module: What the step runs. Its buffers and gradients are put back.

    Returns:
        What ``step`` returned.

    Raises:
        torch.OutOfMemoryError: When the smallest slices do not fit either, and in what could not
            be repeated: on several ranks, a block in which they exchange data (of which no rank
            knows how far the others came), and any step of a module that exchanges data in its
            forward passes (SyncBatchNorm, FSDP, DDP with ``broadcast_buffers`` and buffers).

    Cost: a copy of the buffers, and of the gradients where earlier iterations left some. On several
    ranks one number is reduced before each exchange, so that all of them shrink alike.
    """
    ranks = _Ranks(module)
    before = _StepStart(module)
    while True:
        try:
            return step(ranks.exchange)
        except (RuntimeError, MemoryError) as error:
            on_other_rank = isinstance(error, _OtherRankError)
            if not on_other_rank and not (is_out_of_memory(error) and ranks.can_repeat()):
                raise
            words = str(error)
        # Here the error is gone, and with it the tensors that its traceback held.
        if not on_other_rank:
            ranks.tell_fit(fits=False)
        if not shrink():
            raise torch.OutOfMemoryError(words)
        before.restore()
        _forget_reductions(module)
        for device in accelerators_of(module):
            torch.get_device_module(device).empty_cache()


def _forget_reductions(module: nn.Module) -> None:
    """Let DDP start anew: after a forward it waits for the backward that was broken off.

    What copying a DDP module does makes its reducer again. Only on a group of all ranks.
    """
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            part.__setstate__(part.__getstate__())


class _StepStart:
    """What a step changes before the update: generators, buffers and gradients."""

    def __init__(self, module: nn.Module) -> None:
        self._random = RandomState(accelerators_of(module))
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        self._gradients = [
            (parameter, None if parameter.grad is None else parameter.grad.clone())
            for parameter in module.parameters()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        self._random.restore()
        for buffer, value in self._buffers:
            buffer.copy_(value)
        for parameter, gradient in self._gradients:
            if gradient is None:
                parameter.grad = None
            else:
                assert parameter.grad is not None
                parameter.grad.copy_(gradient)


class _OtherRankError(RuntimeError):
    """Another rank ran out of memory."""


class _Ranks:
    """What the ranks tell each other of their memory."""

    def __init__(self, module: nn.Module) -> None:
        self._several = dist.is_initialized() and dist.get_world_size() > 1
        self._alone_in_forward = not self._several or not _exchanges_in_forward(module)
        self._exchanging = False
        self._failures: Tensor | None = None
        if self._several:  # while there is memory for it
            devices = accelerators_of(module)
            self._failures = torch.zeros((), device=devices[0] if devices else 'cpu')

    def can_repeat(self) -> bool:
        return self._alone_in_forward and not (self._several and self._exchanging)

    def tell_fit(self, fits: bool) -> None:
        """Tell the others whether the step fits here; raise if it does not on one of them."""
        if self._failures is None or not self._alone_in_forward:
            return
        self._failures.fill_(not fits)
        dist.all_reduce(self._failures)
        if fits and self._failures.item():
            raise _OtherRankError('another rank ran out of memory')

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Around a block in which ranks exchange data; entered by all of them or by none."""
        self.tell_fit(fits=True)
        self._exchanging = True
        yield
        self._exchanging = False


def _exchanges_in_forward(module: nn.Module) -> bool:
    return any(
        isinstance(part, FSDPModule)
        or (isinstance(part, DistributedDataParallel) and part.broadcast_buffers and _buffers(part))
        or (isinstance(part, BatchNorm) and 'SyncBatchNorm' in type(part).__name__)
        for part in module.modules()
    )


def _buffers(module: nn.Module) -> bool:
    return next(module.buffers(), None) is not None
