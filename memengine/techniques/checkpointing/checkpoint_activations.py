"""Activation checkpointing: a module's activations are computed again in backward, not kept.

All of them, or all but the outputs of some ops (selective), or what a budget of bytes leaves no
room for, chosen by measured cost. Built on torch's non-reentrant checkpoint and its selective
policies; what is ours is which modules, which ops, and that a repeated forward is the first one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import nn

from memengine.techniques.checkpointing.budget import Kept, Trace, plan_by_budget, plan_by_ops
from memengine.techniques.checkpointing.op_policy import Op, op_names
from memengine.techniques.checkpointing.repeatable_forward import SETTING, CheckpointedForward
from memengine.techniques.modules.blocks import BLOCKS, Selector, select_modules
from memengine.techniques.modules.wrapped_forward import is_wrapped

__all__ = ['Checkpointing', 'checkpoint_activations', 'refuse_to_compile']

_ALL: Kept = frozenset()  # nothing is kept, all is computed again


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
            classes; see :func:`~memengine.techniques.modules.blocks.select_modules`.
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
            f'{SETTING}: budget is a fraction of the plain bytes from 0 to 1, got {budget!r}'
        )
    ops = op_names(keep, SETTING)
    if ops and budget is not None:
        raise ValueError(f'{SETTING}: keep and budget both say what is kept; give one of them')
    chosen = select_modules(model, modules, every=every, setting=SETTING)
    for name, module in chosen.items():
        if is_wrapped(module, CheckpointedForward):
            raise ValueError(f'{SETTING}: {name or "the model"} is checkpointed already')
    return Checkpointing(chosen, ops, budget)


def refuse_to_compile(module: nn.Module, setting: str, backend: object) -> None:
    """Refuse what a compiler would leave uncompiled, or compute again inexactly.

    Raises:
        ValueError: When something in the module is checkpointed by a budget, or at all and the
            backend is ``'eager'``, which runs what it traced twice, statistics with it, as do
            all in torch 2.6.
    """
    for part in module.modules():
        forward = vars(part).get('forward')
        if not isinstance(forward, CheckpointedForward):
            continue
        if forward.owner.budget is not None:
            raise ValueError(
                f'{setting} and {SETTING} with a budget do not go together, as a budget is '
                f'measured op by op ({forward.name}); use keep, or set '
                'torch._functorch.config.activation_memory_budget for the compiler'
            )
        if not forward.can_be_compiled:
            raise ValueError(
                f'{setting} and {SETTING} do not go together for {forward.name}, as compilers of '
                f'torch {torch.__version__} would write into its buffers (statistics of BatchNorm) '
                'twice in a step; use either, or a newer torch'
            )
        if backend == 'eager':
            raise ValueError(
                f"{setting}: backend='eager' and {SETTING} do not go together "
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
        self._forwards = {
            name: CheckpointedForward(name, module, self) for name, module in modules.items()
        }
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
                f'{SETTING}: keep: none of {", ".join(sorted(self.ops))} computes anything in '
                f'{", ".join(self.names[:3])} that backward waits for and that can be kept; there '
                f'are {", ".join(sorted(there)) or "none"}'
            )
