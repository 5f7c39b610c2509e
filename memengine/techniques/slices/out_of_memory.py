"""Steps that run out of memory, repeated in smaller slices as if they had not been tried.

The size of a slice never changes the gradient, so a step that did not fit may be undone and run
again with smaller ones: random state, gradients, and what modules hold are put back first, and the
run is the one that smaller slices would have given from the start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from memengine._torch_private.autograd import version_of
from memengine._torch_private.distributed import (
    FORGETS_SHARDED_STEPS,
    around_collectives,
    forget_reduction,
    gradient_holders,
)
from memengine._torch_private.ops import pytree
from memengine.techniques.codecs.running_range import running_ranges
from memengine.techniques.modules.forward_state import (
    ModuleState,
    PrivateRandomState,
    RandomState,
    accelerators_of,
)
from memengine.techniques.modules.saved_tensors import is_plain

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
    inputs: Any = (),
) -> T:
    """Run a step; whenever it runs out of memory, undo it, shrink its slices and repeat it.

    Args:
        step: Adds the step's gradient.
        shrink: Makes slices smaller for the next try; False when they are as small as can be.
        module: What the step runs. Its buffers, attributes and gradients are put back.
        group: On several ranks a gloo group of all of them, in which nobody else speaks. They run
            the step together, and all take part in each of its collectives, in whatever group.
        inputs: What the step reads, in full: tensors, in containers.

    Returns:
        What ``step`` returned.

    Raises:
        torch.OutOfMemoryError: On every rank, when the smallest slices do not fit either, when the
            step has written into its inputs, or when the module is one that FSDP shards and torch
            is older than 2.14, which cannot forget a step of it. On the rank that ran out, where a
            collective itself did.

    Several ranks: before each collective they tell each other whether all have come so far. One
    that has run out of memory says so there, wherever it was, so that none waits for it: all shrink
    and repeat the step. So between this and the collective nothing has to be allocated.

    Cost: that of a :class:`StepStart`: copies of buffers, and of the gradients where earlier
    iterations left some. On several ranks 4 bytes over gloo before each
    collective and at the end of the step; the device is not waited for.
    """
    ranks = None if group is None or group.size() == 1 else _Ranks(group)
    sharded = _sharded_roots(module)
    before = StepStart(module)
    given = [each for each in pytree.tree_leaves(inputs) if isinstance(each, Tensor)]
    versions = [(each, version_of(each)) for each in given if not each.is_inference()]
    is_repeated = False
    while True:
        try:
            with nullcontext() if ranks is None else ranks.together():
                for root in sharded if is_repeated else ():
                    root.unshard()
                return step()
        except (RuntimeError, MemoryError) as error:
            on_this_rank = not isinstance(error, _OtherRankError)
            lost = ranks is not None and ranks.in_collective
            if on_this_rank and (lost or not is_out_of_memory(error)):
                raise
            words = str(error)
        # Here the error is gone, and with it the tensors that its traceback held.
        if ranks and on_this_rank:
            ranks.any(True)
        if sharded and not FORGETS_SHARDED_STEPS:
            raise torch.OutOfMemoryError(
                f'{words}; torch {torch.__version__} cannot repeat a step of a model that FSDP '
                'shards: set smaller slices (micro_batch_size or chunk_size), or install 2.14'
            )
        is_spoilt = any(version_of(tensor) != version for tensor, version in versions)
        if ranks.any(is_spoilt) if ranks else is_spoilt:
            raise torch.OutOfMemoryError(
                f'{words}; a step that has written into its batch cannot be repeated in smaller '
                'slices: set these from the start (micro_batch_size or chunk_size), or have the '
                'model write into a copy'
            )
        for device in accelerators_of(module):
            torch.get_device_module(device).empty_cache()
        is_smaller = shrink()
        if not (ranks.any(is_smaller) if ranks else is_smaller):
            raise torch.OutOfMemoryError(words)
        for part in module.modules():
            if isinstance(part, DistributedDataParallel):
                forget_reduction(part)
        for root in sharded:
            root.reset_iter_state()
        before.restore()
        is_repeated = True


def _sharded_roots(module: nn.Module) -> list[Any]:
    """The outermost modules that ``fully_shard`` was applied to."""
    if isinstance(module, FSDPModule):
        return [module]
    return [root for child in module.children() for root in _sharded_roots(child)]


class StepStart:
    """What a step changes before the update, to be put back.

    That is generators, gradients, buffers, the modules' attributes but for tensors and what holds
    any, and ranges of quantised activations. What a model makes in its first forward (lazy modules)
    stays as it is.

    Args:
        module: What the step runs.
        tensors: More of what it may write to.

    Attributes:
        random: The global generators, and those of the module's own.

    Cost: a copy of the buffers, of ``tensors``, and of the gradients that are there; on the host
    where the device has no room for it. Some 10 microseconds for each module inside.
    """

    def __init__(self, module: nn.Module, tensors: Iterable[Tensor] = ()) -> None:
        self.random = RandomState.of(module)
        self._private_random = PrivateRandomState()
        self._running_ranges = {each: each.bounds for each in running_ranges}
        self._modules: ModuleState | None = None
        if not any(map(is_lazy, chain(module.parameters(), module.buffers()))):
            self._modules = ModuleState(module)
            self._modules.forget_results()
        held = {id(t): t for t in (*module.buffers(), *tensors) if not is_lazy(t)}
        self._tensors = [(tensor, _copy(tensor)) for tensor in held.values()]
        is_sharded = bool(_sharded_roots(module))
        self._gradients = [
            (holder, None if holder.grad is None else (_copy(holder.grad), holder.grad.device))
            for holder in (gradient_holders(module) if is_sharded else module.parameters())
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put all of it back; what was not written to is left alone."""
        self.random.restore()
        self._private_random.restore()
        for each in running_ranges:
            each.bounds = self._running_ranges.get(each)
        for change in self._modules.changes() if self._modules is not None else ():
            change.undo()
        for tensor, value in self._tensors:
            is_known = is_plain(tensor) and tensor.device == value.device
            if not (is_known and torch.equal(tensor, value)):
                tensor.copy_(value)
        for holder, kept in self._gradients:
            if kept is None:
                holder.grad = None
            elif holder.grad is None:  # a shard's
                holder.grad = kept[0].to(kept[1]).clone()
            else:
                holder.grad.copy_(kept[0])


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
