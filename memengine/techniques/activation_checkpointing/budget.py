"""What a checkpointed module keeps and what it computes again, from the measured cost of its ops.

Terms: *kept* is an op's output that stays from forward to backward; all others are computed again
from the module's inputs, in order, until the last tensor that backward needs is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import SAC_IGNORED_OPS
from torch.utils.weak import WeakIdKeyDictionary

from memengine._torch_private.distributed import gather_unseen_by
from memengine._torch_private.ops import (
    FLOPS_OF,
    MODES_OF_SELECTIVE_CHECKPOINTS,
    TorchDispatchMode,
    argument_names,
    pytree,
    written_arguments,
)
from memengine.memory.ledger import Block, blocks_of, owned_by

Call = tuple[str, int]  # an op and which of its calls within the module, from 0 on
Kept = frozenset[Call] | None  # None: the module is not checkpointed, so all is kept


class Keeping(NamedTuple):
    """What a checkpointed module keeps.

    Attributes:
        kept: Calls.
        measured: All calls in order, as they were when these were chosen.
    """

    kept: frozenset[Call] = frozenset()
    measured: Sequence[Call] = ()


# What writing a byte costs in FLOPs, so that ops without products have a price; it decides only
# among them, as products cost some hundred FLOPs for every byte of their output.
_FLOPS_PER_BYTE = 1

_MOST_PLANS = 2048  # that are followed at a time

# FLOPs to compute again, as a share of all of them, that are next to nothing. Bytes that are not
# worth more are not kept: what comes after the modules, which is not measured, needs some, too.
_NEGLIGIBLE_SHARE = 1e-3


@dataclass
class _MeasuredOp:
    call: Call
    cost: int  # FLOPs
    nbytes: int  # of its fresh outputs
    may_be_kept: bool


@dataclass
class Trace:
    """What one forward of a module did.

    Attributes:
        ops: Ops in order, up to the last that backward waits for.
        saved_bytes: What autograd saves of the module's own when it is not checkpointed.
        input_bytes: Bytes of the inputs, which a checkpointed module keeps.
        saved_input_bytes: Those of them that autograd saves when it is not checkpointed.
    """

    ops: list[_MeasuredOp] = field(default_factory=list)
    saved_bytes: int = 0
    input_bytes: int = 0
    saved_input_bytes: int = 0

    @property
    def calls(self) -> list[Call]:
        """All, in order."""
        return [op.call for op in self.ops]

    @property
    def plain_bytes(self) -> int:
        """What the module keeps when it is not checkpointed."""
        return self.saved_bytes + self.saved_input_bytes

    @property
    def least_bytes(self) -> int:
        """The least that it can keep."""
        return min(self.input_bytes, self.plain_bytes)

    @property
    def cost(self) -> int:
        """FLOPs to compute all of it again."""
        return sum(op.cost for op in self.ops)

    @property
    def may_be_kept(self) -> list[_MeasuredOp]:
        """The ops that may be."""
        return [op for op in self.ops if op.may_be_kept]


def draws_random(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op draws random numbers.

    If its output were kept, the ops after it would draw its numbers when they are repeated.
    """
    names = argument_names(op)
    if 'dropout_p' in names:
        index = names.index('dropout_p')
        p = args[index] if index < len(args) else kwargs.get('dropout_p', 0.0)
        return p > 0
    return torch.Tag.nondeterministic_seeded in op.tags


class _Tracer(TorchDispatchMode):
    """Writes down ops and what autograd saves."""

    def __init__(self, owned: Mapping[int, Any], inputs: Mapping[int, int]) -> None:
        super().__init__()
        self.trace = Trace(input_bytes=sum(inputs.values()))
        self._owned, self._inputs = owned, inputs
        # Storage to the op that wrote it first; not by its key, which weights that are gathered out
        # of sight may have from one that is gone.
        self._made_by: MutableMapping[Any, _MeasuredOp] = WeakIdKeyDictionary()
        self._saved: set[int] = set()
        self._counts: Counter[str] = Counter()
        self._ops_at_last_save = 0
        self._is_finished = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        before = set(_storages((args, kwargs)))
        for block in _blocks(written_arguments(func, args, kwargs)):
            if op_before := self._made_by.get(block.owner):
                op_before.may_be_kept = False
        out = func(*args, **kwargs)
        fresh = {block.key: block for block in _blocks(out) if block.key not in before}
        flops = FLOPS_OF.get(func.overloadpacket)
        cost = flops(*args, **kwargs, out_val=out) if flops else 0
        nbytes = sum(block.nbytes for block in fresh.values())
        op = _MeasuredOp(
            (str(func), self._counts[str(func)]),
            cost + _FLOPS_PER_BYTE * nbytes,
            nbytes,
            nbytes > 0 and not draws_random(func, args, kwargs),
        )
        self._counts[str(func)] += 1
        self.trace.ops.append(op)
        for block in fresh.values():
            self._made_by[block.owner] = op
            self._saved.discard(block.key)  # the address of one that is gone
        return out

    def pack(self, tensor: Tensor) -> None:
        """Autograd's: nothing is kept, as this graph is thrown away."""
        self._ops_at_last_save = len(self.trace.ops)
        for block in blocks_of(tensor):
            if block.key in self._saved or block.key in self._owned:
                continue
            self._saved.add(block.key)
            if block.owner in self._made_by:
                self.trace.saved_bytes += block.nbytes
            elif block.key in self._inputs:
                self.trace.saved_input_bytes += block.nbytes

    def refuse_backward(self, _: Any) -> Tensor:
        """Autograd's, which asks for what it has saved."""
        if not self._is_finished:
            raise ValueError(
                'activation_checkpointing: keep and budget measure a forward in which nothing is '
                'kept, and a backward runs inside of it (torch.autograd.grad in a module); leave '
                'the module out, or leave keep and budget out'
            )
        raise ValueError(
            'activation_checkpointing: keep and budget measure a forward first, and what it '
            'computed was used by the next one; if the model keeps a cache, switch it off '
            "(transformers' use_cache=False), or leave keep and budget out"
        )

    def finish(self) -> Trace:
        """What was written down."""
        self._is_finished = True
        del self.trace.ops[self._ops_at_last_save :]
        return self.trace


def _blocks(tree: Any) -> Iterator[Block]:
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield from blocks_of(leaf)


def _storages(tree: Any) -> dict[int, int]:
    """Storages of the tensors in a tree, and their bytes."""
    return {block.key: block.nbytes for block in _blocks(tree)}


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Within, a weight that is cast already is cast again: each forward does the same calls."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def measure(module: nn.Module, run: Callable[[], Any], inputs: Iterable[Tensor]) -> Trace:
    """Run a module once, keeping nothing, and write down what its ops cost.

    Args:
        module: Its parameters and buffers are not counted.
        run: Its forward. Random numbers and statistics are for the caller to put back.
        inputs: Tensors that it takes.

    Cost: one forward, in the memory of a forward without gradient.
    """
    gather_unseen_by((_Tracer, *MODES_OF_SELECTIVE_CHECKPOINTS), module)
    owned = owned_by([module])
    given = {key: size for key, size in _storages(list(inputs)).items() if key not in owned}
    tracer = _Tracer(owned, given)
    hooks = saved_tensors_hooks(tracer.pack, tracer.refuse_backward)
    with without_autocast_cache(), hooks, tracer:
        run()
    return tracer.finish()


def plan_by_ops(trace: Trace, ops: frozenset[str]) -> Kept:
    """Keeps what some ops compute, where backward would need it computed again."""
    return frozenset(
        op.call for op in trace.ops if op.may_be_kept and op.call[0].rpartition('.')[0] in ops
    )


class _Plan(NamedTuple):
    """What to keep of the modules so far."""

    nbytes: int  # kept from forward to backward
    cost: int  # FLOPs to compute again
    taken: int  # decisions to keep something, as bits in the order in which they were taken


def plan_by_budget(traces: Sequence[Trace], budget: float) -> list[Kept]:
    """What costs least to compute again, within a fraction of the plain bytes.

    The bytes are those of the peak: what all modules before one keep, and all that this one saves
    once it is computed again. Module by module and op by op, every choice is followed that no other
    beats in both bytes and FLOPs; so the mix is the best there is (of very many, those that
    are close to others are dropped).

    Args:
        traces: Of the modules in the order of their forward.
        budget: Fraction of the bytes that the modules keep when none is checkpointed, 0 to 1.
            At 0 nothing is kept, not even where it would not show in the peak; at 1 everything.

    Cost: about a millisecond for each op.
    """
    if budget in (0, 1):
        return [frozenset() if budget == 0 else None] * len(traces)
    limit = max(int(budget * sum(trace.plain_bytes for trace in traces)), _least_peak(traces))
    plans, decision = [_Plan(0, 0, 0)], 0
    for trace in traces:
        plans = [plan for plan in plans if plan.nbytes + trace.plain_bytes <= limit]
        plain = _extended(plans, trace.plain_bytes, 0, 1 << decision)
        plans = _extended(plans, trace.input_bytes, trace.cost)
        for op in trace.may_be_kept:
            decision += 1
            keeping = _extended(plans, op.nbytes, -op.cost, 1 << decision)
            plans = _unbeaten([*plans, *keeping], limit)
        decision += 1
        plans = _unbeaten([*plans, *plain], limit)
    allowed = plans[-1].cost + _NEGLIGIBLE_SHARE * sum(trace.cost for trace in traces)
    return _chosen_calls(traces, next(plan for plan in plans if plan.cost <= allowed).taken)


def _least_peak(traces: Sequence[Trace]) -> int:
    """The peak when every module keeps as little as it can."""
    before, peak = 0, 0
    for trace in traces:
        peak = max(peak, before + trace.plain_bytes)
        before += trace.least_bytes
    return peak


def _extended(plans: Iterable[_Plan], nbytes: int, cost: int, bit: int = 0) -> list[_Plan]:
    return [_Plan(plan.nbytes + nbytes, plan.cost + cost, plan.taken | bit) for plan in plans]


def _unbeaten(plans: Iterable[_Plan], limit: int) -> list[_Plan]:
    """Those within the limit that no other beats, from fewest bytes to fewest FLOPs."""
    best: list[_Plan] = []
    for plan in sorted(plans):
        if plan.nbytes <= limit and (not best or plan.cost < best[-1].cost):
            best.append(plan)
    if len(best) <= _MOST_PLANS:
        return best
    apart = {plan.nbytes * _MOST_PLANS // limit: plan for plan in best[1:]}
    return [best[0], *apart.values()]


def _chosen_calls(traces: Sequence[Trace], taken: int) -> list[Kept]:
    """What the decisions of :func:`plan_by_budget` mean."""
    plans: list[Kept] = []
    for trace in traces:
        is_plain, taken = taken & 1, taken >> 1
        calls = [op.call for bit, op in enumerate(trace.may_be_kept) if taken >> bit & 1]
        plans.append(None if is_plain else frozenset(calls))
        taken >>= len(trace.may_be_kept)
    return plans
