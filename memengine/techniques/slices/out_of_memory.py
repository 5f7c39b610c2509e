"""Steps that run out of memory, repeated in smaller slices as if they had not been tried.

The size of a slice never changes the gradient, so a step that did not fit may be undone and run
again with smaller ones: random state, buffers and gradients are put back first, and the run is the
one that smaller slices would have given from the start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from memengine._torch_private.distributed import around_collectives, forget_reduction
from memengine.techniques.modules.forward_state import (
    PrivateRandomState,
    RandomState,
    accelerators_of,
)

__all__ = ['is_out_of_memory', 'run_until_it_fits']

T = TypeVar('T')

# cuBLAS, cuDNN and cuSOLVER make their handles when they are first called, in memory of their own.
_MESSAGES = re.compile(
    r"out of memory|can't allocate memory|_ALLOC_FAILED|(CUBLAS|CUDNN|CUSOLVER)_STATUS_NOT_INITIA"
    r'LIZED|CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate',
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on an accelerator or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(_MESSAGES.search(str(error)))


def run_until_it_fits(
    step: Callable[[], T],
    shrink: Callable[[], bool],
    module: nn.Module,
    group: dist.ProcessGroup | None = None,
) -> T:
    """Run a step; whenever it runs out of memory, undo it, shrink its slices and repeat it.

    Args:
        step: Adds the step's gradient.
        shrink: Makes slices smaller for the next try; False when they are as small as can be.
        module: What the step runs. Its buffers and gradients are put back.
        group: On several ranks a gloo group of all of them, in which nobody else speaks. They run
            the step together, and all take part in each of its collectives, in whatever group.

    Returns:
        What ``step`` returned.

    Raises:
        torch.OutOfMemoryError: On every rank, when the smallest slices do not fit either. On the
            rank that ran out, in what cannot be repeated: a collective itself, and any step of a
            module that FSDP shards.

    Several ranks: before each collective they tell each other whether all have come so far. One
    that has run out of memory says so there, wherever it was, so that none waits for it: all shrink
    and repeat the step. So between this and the collective nothing has to be allocated.

    Cost: a copy of the buffers, and of the gradients where earlier iterations left some; on the
    host where the device has no room for it. On several ranks 4 bytes over gloo before each
    collective and at the end of the step; the device is not waited for.
    """
    several = group if group is not None and group.size() > 1 else None
    ranks = None if several is None or _is_sharded(module) else _Ranks(several)
    before = _StepStart(module)
    while True:
        try:
            with nullcontext() if ranks is None else ranks.together():
                return step()
        except (RuntimeError, MemoryError) as error:
            on_this_rank = not isinstance(error, _OtherRankError)
            lost = ranks.in_collective if ranks else several is not None
            if on_this_rank and (lost or not is_out_of_memory(error)):
                raise
            words = str(error)
        # Here the error is gone, and with it the tensors that its traceback held.
        if ranks and on_this_rank:
            ranks.any(True)
        for device in accelerators_of(module):
            torch.get_device_module(device).empty_cache()
        is_smaller = shrink()
        if not (ranks.any(is_smaller) if ranks else is_smaller):
            raise torch.OutOfMemoryError(words)
        for part in module.modules():
            if isinstance(part, DistributedDataParallel):
                forget_reduction(part)
        before.restore()


def _is_sharded(module: nn.Module) -> bool:
    """Whether what a forward gathers stays behind when it is broken off."""
    return any(isinstance(part, FSDPModule) for part in module.modules())


class _StepStart:
    """What a step changes before the update: generators, buffers and gradients."""

    def __init__(self, module: nn.Module) -> None:
        self._random = RandomState.of(module)
        self._private_random = PrivateRandomState()
        self._buffers = [(buffer, _copy(buffer)) for buffer in module.buffers()]
        self._gradients = [
            (parameter, None if parameter.grad is None else _copy(parameter.grad))
            for parameter in module.parameters()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        self._random.restore()
        self._private_random.restore()
        for buffer, value in self._buffers:
            buffer.copy_(value)
        for parameter, gradient in self._gradients:
            if gradient is None:
                parameter.grad = None
            else:
                assert parameter.grad is not None
                parameter.grad.copy_(gradient)


def _copy(tensor: Tensor) -> Tensor:
    """A copy, on the host where its device has no room."""
    try:
        return tensor.detach().clone()
    except RuntimeError as error:
        if tensor.device.type == 'cpu' or not is_out_of_memory(error):
            raise
    return tensor.detach().cpu()


class _OtherRankError(RuntimeError):
    """Another rank ran out of memory."""


class _Ranks:
    """What the ranks of a step tell each other of their memory.

    Attributes:
        in_collective: Whether the step ended in a collective, of which nobody knows how far the
            others came.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._answer = torch.zeros((), dtype=torch.int32, device='cpu')
        self._is_asking = False
        self.in_collective = False

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around the step: it ends with an error where another rank runs out of memory."""
        with around_collectives(self._each_after_all):
            yield
            self._go_on()

    @contextmanager
    def _each_after_all(self) -> Iterator[None]:
        if self._is_asking:
            yield
            return
        self._go_on()
        self.in_collective = True
        yield
        self.in_collective = False

    def _go_on(self) -> None:
        if self.any(False):
            raise _OtherRankError('another rank ran out of memory in this step')

    def any(self, own: bool) -> bool:
        """Whether it is so on any rank."""
        self._is_asking = True
        self._answer.fill_(own)
        dist.all_reduce(self._answer, dist.ReduceOp.MAX, self._group)
        self._is_asking = False
        return bool(self._answer)
