"""Activation checkpointing: a module's activations are computed again in backward, not kept.

All of them, or all but the outputs of some ops (selective), or what a budget of bytes leaves no
room for, chosen by measured cost. Built on torch's non-reentrant checkpoint and its selective
policies; what is ours is which modules, which ops, and that a repeated forward is the first one.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import flop_registry

from memengine.suggest import did_you_mean
from memengine.techniques.blocks import BLOCKS, Selector, select_modules
from memengine.techniques.random_state import RandomState, accelerators_of
from memengine.techniques.recompute_plan import (
    Call,
    Kept,
    Trace,
    draws,
    measure,
    plan_by_budget,
    plan_by_ops,
)
from memengine.techniques.wrapped_forward import WrappedForward, is_wrapped

__all__ = ['Checkpointing', 'checkpoint_activations', 'refuse_to_compile']

_SETTING = 'activation_checkpointing'
_ALL: Kept = frozenset()  # nothing is kept, all is computed again

# From torch 2.9 or so on, kept tensors may pass through the saved-tensor hooks around a module
# (a meter, offloading), as every other saved tensor does.
_HOOKS_SEE_KEPT = 'respect_saved_tensors_hooks' in inspect.signature(checkpoint).parameters

Op = str | torch._ops.OpOverload | torch._ops.OpOverloadPacket


def checkpoint_activations(
    model: nn.Module,
    modules: Selector | Sequence[Selector] = BLOCKS,
    *,
    every: int = 1,
    keep: Op | Sequence[Op] = (),
    budget: float | None = None,
) -> Checkpointing:
    """Let modules compute their activations again in backward instead of keeping them. Exact.

    Modules keep their names, parameters and hooks; their ``forward`` is wrapped. Copies and
    pickles of the model are checkpointed as it is.

    Args:
        model: Any module.
        modules: Which of its modules: ``'blocks'`` for its repeated blocks, names, globs or
            classes; see :func:`~memengine.techniques.blocks.select_modules`.
        every: Every k-th of what each entry of ``modules`` matches.
        keep: Ops whose outputs are kept: ``'matmuls'`` (linear layers, convolutions),
            ``'attention'`` (fused attention), or any by name (``'aten.gelu'``) or as
            ``torch.ops`` has them. Not kept are outputs that are overwritten in place, that draw
            random numbers (so attention with dropout), or that backward does not wait for.
        budget: In place of ``keep``: bytes at the peak, as a fraction from 0 to 1 of what the
            modules keep when they are not checkpointed. What is kept is chosen by the FLOPs that
            computing it again costs, measured in the first step, in which nothing is kept: the
            cheapest mix that fits. 0 keeps nothing, 1 everything. A budget below what
            checkpointing can reach is missed by as much.

    Returns:
        The handle: ``names``, ``unused()``, ``undo()``.

    Raises:
        ValueError: When a selector matches nothing, a module is checkpointed already, an op is
            unknown, or ``keep`` and ``budget`` are both given. In a forward, when a module changes
            its inputs in place, or a buffer that is not a norm layer's statistics, as then its
            forward cannot be repeated; in the second, when none of the ops to keep has occurred.
        TypeError: For a selector or op that is neither a name nor a class or op.

    Cost: one more forward of the modules, but for what is kept (and for what comes after the last
    op that backward waits for). Kept from forward to backward are the modules' inputs and what is
    chosen; in backward all of one module on top. With ``keep`` or ``budget``, one forward of each
    module more in the first step, and some 10 microseconds per op.

    Random state (of torch, Python and NumPy) is replayed. BatchNorm uses the batch's statistics
    again and counts its running ones once. Autocast is as in the first forward. DDP (with
    ``static_graph`` too), FSDP (``fully_shard``), accumulation and the gradient cache compose.
    Under ``torch.compile``, modules with a ``budget`` run as they are, uncompiled (torch has a
    budget of its own there, ``torch._functorch.config.activation_memory_budget``).

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016 (arXiv:1604.06174).

    Example:
        >>> handle = checkpoint_activations(vit, 'blocks', keep=['matmuls', 'attention'])
    """
    if budget is not None and not 0 <= budget <= 1:
        raise ValueError(
            f'{_SETTING}: budget is a fraction of the plain bytes from 0 to 1, got {budget!r}'
        )
    ops = _op_names(keep)
    if ops and budget is not None:
        raise ValueError(f'{_SETTING}: keep and budget both say what is kept; give one of them')
    chosen = select_modules(model, modules, every=every, setting=_SETTING)
    for name, module in chosen.items():
        if is_wrapped(module, _Forward):
            raise ValueError(f'{_SETTING}: {name or "the model"} is checkpointed already')
    return Checkpointing(chosen, ops, budget)


def refuse_to_compile(module: nn.Module, setting: str, backend: object) -> None:
    """Refuse what a compiler would leave uncompiled, or compute again inexactly.

    Raises:
        ValueError: When something in the module is checkpointed by a budget, or at all and the
            backend is ``'eager'``, which runs what it traced twice, statistics with it.
    """
    for part in module.modules():
        forward = vars(part).get('forward')
        if not isinstance(forward, _Forward):
            continue
        if forward.owner.budget is not None:
            raise ValueError(
                f'{setting} and {_SETTING} with a budget do not go together, as a budget is '
                f'measured op by op ({forward.name}); use keep, or set '
                'torch._functorch.config.activation_memory_budget for the compiler'
            )
        if backend == 'eager':
            raise ValueError(
                f"{setting}: backend='eager' and {_SETTING} do not go together "
                f"({forward.name}); to try without a compiler use backend='aot_eager'"
            )


class Checkpointing:
    """Modules that are checkpointed; made by :func:`checkpoint_activations`."""

    def __init__(
        self, modules: dict[str, nn.Module], ops: frozenset[str], budget: float | None
    ) -> None:
        self.ops, self.budget = ops, budget
        self._traces: dict[tuple[str, bool], Trace] = {}  # by name and training mode
        self._plans: dict[tuple[str, bool], Kept] = {}
        self._forwards = {name: _Forward(name, module, self) for name, module in modules.items()}
        for forward in self._forwards.values():
            forward.begin()

    @property
    def names(self) -> list[str]:
        """Names of the modules, in the model's order."""
        return list(self._forwards)

    @property
    def measures(self) -> bool:
        """Whether what is kept follows from a measurement."""
        return bool(self.ops) or self.budget is not None

    def unused(self) -> dict[str, str]:
        """Modules that have not been computed again so far, and why."""
        return {
            name: 'it is never called' if not forward.calls else 'nothing in it needs a gradient'
            for name, forward in self._forwards.items()
            if not forward.checkpointed
        }

    def undo(self) -> None:
        """Give the modules their own forward back."""
        for forward in self._forwards.values():
            forward.undo()

    def kept(self, name: str, training: bool, trace: Callable[[], Trace]) -> Kept:
        """What a module keeps. ``trace()`` measures it, when that has not been done."""
        if not self.measures:
            return _ALL
        key = (name, training)
        if key not in self._traces:
            self._traces[key] = trace()
            self._plans.clear()
            if self.budget is not None:
                return _ALL  # until all are measured, so that the first step fits, too
            return plan_by_ops(self._traces[key], self.ops)
        if not self._plans:
            self._plan()
        return self._plans[key]

    def _plan(self) -> None:
        if self.budget is not None:
            for mode in (True, False):
                some = {key: trace for key, trace in self._traces.items() if key[1] is mode}
                plans = plan_by_budget(list(some.values()), self.budget)
                self._plans.update(zip(some, plans, strict=True))
            return
        self._plans = {key: plan_by_ops(trace, self.ops) for key, trace in self._traces.items()}
        if not any(self._plans.values()):
            there = Counter(
                op.call[0].rpartition('.')[0]
                for trace in self._traces.values()
                for op in trace.may_be_kept
            )
            raise ValueError(
                f'{_SETTING}: keep: none of {", ".join(sorted(self.ops))} computes anything in '
                f'{", ".join(self.names[:3])} that backward waits for and that can be kept; there '
                f'are {", ".join(sorted(there)) or "none"}'
            )


class _Forward(WrappedForward):
    """A module's forward, computed again in backward."""

    setting = _SETTING

    def __init__(self, name: str, module: nn.Module, owner: Checkpointing) -> None:
        super().__init__(name, module)
        self.owner = owner
        self.calls = self.checkpointed = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and self.owner.budget is None:
            return self._traced_by_compile(*args, **kwargs)
        return self._eager(*args, **kwargs)

    @torch.compiler.disable
    def _eager(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not torch.is_grad_enabled() or not self._needs_gradient(tensors):
            return self.plain(*args, **kwargs)
        run = _Run(self.plain, structure, (args, kwargs))
        first = not self.checkpointed
        state = RandomState(accelerators_of(self.module, tensors))
        kept = self.owner.kept(
            self.name, self.module.training, partial(self._measure, run, leaves, tensors, state)
        )
        self.checkpointed += 1
        if kept is None:
            return self.plain(*args, **kwargs)
        with _repeatable(self.name, self.module, tensors, buffers=first):
            return self._checkpoint(run, leaves, state, kept)

    def _needs_gradient(self, tensors: list[Tensor]) -> bool:
        parameters = self.module.parameters()
        return any(t.requires_grad for t in tensors) or any(p.requires_grad for p in parameters)

    def _measure(
        self, run: _Run, leaves: list[Any], tensors: list[Tensor], state: RandomState
    ) -> Trace:
        with _Again(state, self.module):
            return measure(self.module, partial(run.again, *leaves), tensors)

    def _checkpoint(self, run: _Run, leaves: list[Any], state: RandomState, kept: Kept) -> Any:
        again = _Again(state, self.module)
        options: dict[str, Any] = dict(context_fn=lambda: (ExitStack(), again))
        with ExitStack() as stack:
            if kept:
                forward, repeated = create_selective_checkpoint_contexts(_Policy(kept))
                again = _Again(state, self.module, repeated)
                options = dict(context_fn=lambda: (forward, again))
                if _HOOKS_SEE_KEPT:
                    options['respect_saved_tensors_hooks'] = True
                # A weight that is cast already would be cast again, and the calls not be paired.
                stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
                torch.set_autocast_cache_enabled(False)
            return checkpoint(
                run, *leaves, use_reentrant=False, preserve_rng_state=False, **options
            )

    def _traced_by_compile(self, *args: Any, **kwargs: Any) -> Any:
        self.checkpointed = 1  # a constant, so that it is no reason to compile again
        options: dict[str, Any] = {}
        if self.owner.ops:
            policy = partial(_policy_by_ops, self.owner.ops)
            options['context_fn'] = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(self.plain, *args, use_reentrant=False, **options, **kwargs)


class _Run:
    """A forward on flat arguments, so that every tensor in them is one that checkpoint saves."""

    def __init__(self, forward: Callable[..., Any], structure: Any, given: Any) -> None:
        self._forward, self._structure = forward, structure
        self._given = [given]  # for the first forward the very objects: it may write into a list

    def __call__(self, *leaves: Any) -> Any:
        if not self._given:
            return self.again(*leaves)
        args, kwargs = self._given.pop()
        return self._forward(*args, **kwargs)

    def again(self, *leaves: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return self._forward(*args, **kwargs)


class _Again:
    """The context of a repeated forward; entered once for each backward through the graph."""

    def __init__(self, state: RandomState, module: nn.Module, *more: Any) -> None:
        self._state, self._more = state, more
        self._norms = [  # how they count now; slices and schedules change it before backward
            (layer, dict(training=layer.training, track_running_stats=layer.track_running_stats))
            for layer in module.modules()
            if isinstance(layer, _NormBase)
        ]
        self._stack = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._state.replay())
            stack.enter_context(_spared_statistics(self._norms))
            for context in self._more:
                stack.enter_context(context)
            self._stack = stack.pop_all()

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)


@contextmanager
def _spared_statistics(norms: list[tuple[_NormBase, dict[str, bool]]]) -> Iterator[None]:
    """Let norm layers run as they did, and count into copies of their statistics.

    (Without statistics they would save other tensors than in the first forward.)
    """
    before = [{key: getattr(layer, key) for key in flags} for layer, flags in norms]
    buffers = [dict(layer._buffers) for layer, _ in norms]
    for layer, flags in norms:
        vars(layer).update(flags)
        if layer.training and layer.track_running_stats:
            present = {key: b for key, b in layer._buffers.items() if b is not None}
            layer._buffers.update({key: b.clone() for key, b in present.items()})
    try:
        yield
    finally:
        for (layer, _), flags, own in zip(norms, before, buffers, strict=True):
            vars(layer).update(flags)
            layer._buffers.update(own)


@contextmanager
def _repeatable(
    name: str, module: nn.Module, tensors: list[Tensor], buffers: bool
) -> Iterator[None]:
    """Refuse a forward that changes what it would be repeated from."""
    versions = [tensor._version for tensor in tensors]
    watched = {}
    if buffers:
        counted = {id(b) for m in module.modules() if isinstance(m, _NormBase) for b in m.buffers()}
        watched = {k: (b, b._version) for k, b in module.named_buffers() if id(b) not in counted}
    yield
    if versions != [tensor._version for tensor in tensors]:
        raise ValueError(
            f'{_SETTING}: {name} changes its input in place, so its forward cannot '
            'be repeated from it; set inplace=False in its first layers, or leave it out'
        )
    for key, (buffer, version) in watched.items():
        if module.get_buffer(key) is not buffer or buffer._version != version:
            raise ValueError(
                f'{_SETTING}: the buffer {key} of {name} changes in every forward, '
                'so the forward cannot be repeated; leave the module out'
            )


class _Policy:
    """Which calls are kept, counted anew in each pass."""

    def __init__(self, kept: frozenset[Call]) -> None:
        self._kept = kept
        self._counts: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        counts = self._counts[context.is_recompute]
        call = (str(op), counts[str(op)])
        counts[str(op)] += 1
        if call in self._kept and not draws(op, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def _policy_by_ops(
    ops: frozenset[str], context: Any, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """The policy where ops are not measured: the compiler leaves out what it does not need."""
    if str(op).rpartition('.')[0] in ops and not draws(op, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _op_names(keep: Op | Sequence[Op]) -> frozenset[str]:
    """Ops by name, without the overload: ``aten.mm``."""
    wanted = list(keep) if isinstance(keep, Sequence) and not isinstance(keep, str) else [keep]
    counted = {str(op) for op in flop_registry if isinstance(op, torch._ops.OpOverloadPacket)}
    counted = {name for name in counted if 'backward' not in name}
    attention = {name for name in counted if 'attention' in name}
    groups = {'matmuls': counted - attention, 'attention': attention}
    names: set[str] = set()
    for op in wanted:
        if isinstance(op, torch._ops.OpOverload):
            names.add(str(op.overloadpacket))
        elif isinstance(op, torch._ops.OpOverloadPacket):
            names.add(str(op))
        elif not isinstance(op, str):
            raise TypeError(
                f'{_SETTING}: keep: expected ops or their names, got {type(op).__name__} {op!r}'
            )
        else:
            names |= groups.get(op) or {_op_name(op, list(groups))}
    return frozenset(names)


def _op_name(text: str, groups: list[str]) -> str:
    namespace, dot, name = text.partition('.')
    if not dot:
        namespace, name = 'aten', text
    if not hasattr(getattr(torch.ops, namespace), name):
        hint = did_you_mean(text, [*groups, *dir(torch.ops.aten)], after=';')
        raise ValueError(f"{_SETTING}: keep: torch has no op '{text}'{hint}")
    return f'{namespace}.{name}'
