"""Activation checkpointing: a module's activations are computed again in backward, not kept.

All of them, or all but the outputs of some ops (selective), or what a budget of bytes leaves no
room for, chosen by measured cost. Built on torch's non-reentrant checkpoint and its selective
policies; what is ours is which modules, which ops, and that a repeated forward is the first one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from memengine._torch_private.autograd import current_backward
from memengine._torch_private.ops import draw_from_known_generators_when_compiled
from memengine.technique import PausableHandle, Report, Settings, Technique, setting, with_settings
from memengine.techniques.activation_checkpointing.budget import (
    Keeping,
    Kept,
    Trace,
    plan_by_budget,
    plan_by_ops,
)
from memengine.techniques.activation_checkpointing.op_policy import Op, op_names
from memengine.techniques.activation_checkpointing.repeatable_forward import (
    SETTING,
    CheckpointedForward,
)
from memengine.techniques.modules.blocks import BLOCKS, Selector, first_of, select_modules
from memengine.techniques.modules.wrapped_forward import is_wrapped

_RECOMPUTE_ALL = Keeping()  # nothing is kept, all is computed again


def checkpoint_activations(
    model: nn.Module,
    modules: Selector | Sequence[Selector] = BLOCKS,
    *,
    every: int = 1,
    first: int | None = None,
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
        first: Only so many of these, in the model's order; all without it. What the last ones save
            is used up first in backward: to checkpoint them hardly lowers the peak.
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
        ValueError: When a selector matches nothing, or fewer modules than ``first`` says, a module
            is checkpointed already, an op is unknown, or ``keep`` and ``budget`` are both given.
            In a forward, when a module changes its inputs in place, or a buffer that is not a norm
            layer's statistics, as then its forward cannot be repeated; in the second, when none of
            the ops to keep has occurred.
        TypeError: For a selector or op that is neither a name nor a class or op.

    Cost: one more forward of the modules, but for what is kept (and for what comes after the last
    op that backward waits for). Kept from forward to backward are the modules' inputs and what is
    chosen; in backward all of one module on top. With ``keep``, or a ``budget`` above 0, one
    forward of each module more in the first step, and some 10 microseconds per op.

    Random state (of torch, Python and NumPy) is replayed. BatchNorm uses the batch's statistics
    again and counts its running ones once. Autocast is as in the first forward; with ``keep`` or a
    ``budget`` it casts a weight for each of its uses, whose gradients are added in float32 then.
    DDP (with ``static_graph`` too), FSDP (``fully_shard``), accumulation and the gradient cache
    compose. Under ``torch.compile``, modules with a ``budget`` run as they are, uncompiled (the
    budget that torch has of its own there repeats dropout with other masks:
    pytorch/pytorch#190758).

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
    chosen = first_of(select_modules(model, modules, every=every, setting=SETTING), first, SETTING)
    for name, module in chosen.items():
        if is_wrapped(module, CheckpointedForward):
            raise ValueError(f'{SETTING}: {name or "the model"} is checkpointed already')
    return Checkpointing(chosen, ops, budget)


class Checkpointing(PausableHandle):
    """Modules that are checkpointed; made by :func:`checkpoint_activations`."""

    def __init__(
        self, modules: dict[str, nn.Module], ops: frozenset[str], budget: float | None
    ) -> None:
        draw_from_known_generators_when_compiled()
        self.ops, self.budget = ops, budget
        self.is_settled = not self.measures
        self._traces: dict[tuple[str, bool], Trace] = {}  # by name and training mode
        # Replaced, never changed: another thread that uses the model may be reading it.
        self._plans: dict[tuple[str, bool], Keeping | None] = {}
        self._other_calls: Counter[tuple[str, bool]] = Counter()  # forwards that were not as traced
        self._to_measure_again: frozenset[tuple[str, bool]] = frozenset()
        self._was_measured_in_backward = False  # as within a reentrant checkpoint
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
        return bool(self.ops) or self.budget not in (None, 0)

    def unused(self) -> dict[str, str]:
        """Modules that have not been computed again so far, and why."""
        return {
            name: 'it is never called' if not forward.calls else 'nothing in it needs a gradient'
            for name, forward in self._forwards.items()
            if not forward.checkpointed
        }

    def report(self) -> Report:
        """Which modules were computed again."""
        names, unused = self.names, self.unused()
        left = done = ''
        if len(unused) < len(names):
            done = f'Activation checkpointing: {len(names)} modules, {names[0]} to {names[-1]}'
        if unused:
            name, reason = next(iter(unused.items()))
            left = (
                f'{SETTING}: {len(unused)} of {len(names)} modules were not computed again in the '
                f'first iteration, e.g. {name}: {reason}; name modules that are trained'
            )
        return Report(done, left)

    def undo(self) -> None:
        """Give the modules their own forward back."""
        for forward in self._forwards.values():
            forward.undo()

    def kept(self, name: str, training: bool, trace: Callable[[], Trace]) -> Keeping | None:
        """What a module keeps. ``trace()`` measures it, when that has not been done."""
        if not self.measures:
            return _RECOMPUTE_ALL
        key = (name, training)
        is_in_backward = current_backward() != -1
        if key not in self._traces or (key in self._to_measure_again and not is_in_backward):
            self._to_measure_again -= {key}
            self._traces[key] = measured = trace()
            self._plans = {}
            self._was_measured_in_backward = is_in_backward
            if self.budget is not None:
                return _RECOMPUTE_ALL  # until all are measured, so that the first step fits, too
            return _keeping(plan_by_ops(measured, self.ops), measured)
        plans = self._plans
        if key not in plans:
            if self.budget is not None and is_in_backward and not self._was_measured_in_backward:
                return _RECOMPUTE_ALL  # for a checkpoint around it that repeats the first step
            traces = dict(self._traces)
            kept = self._planned(traces)
            plans = self._plans = {key: _keeping(kept[key], traces[key]) for key in kept}
        return plans[key]

    def note_other_calls(self, name: str, training: bool) -> None:
        """A module has done other calls than when it was measured.

        It is measured again after the first, second, fourth, eighth ... time: what it does in most
        steps may differ from the first. Not on several ranks: measuring is a forward, in which a
        module may send to others, who need not have met other calls and would not answer.
        """
        if dist.is_initialized() and dist.get_world_size() > 1:
            return
        key = (name, training)
        times = self._other_calls[key] = self._other_calls[key] + 1
        if times & (times - 1) == 0:
            self._to_measure_again |= {key}

    def _planned(self, traces: dict[tuple[str, bool], Trace]) -> dict[tuple[str, bool], Kept]:
        if self.budget is not None:
            plans: dict[tuple[str, bool], Kept] = {}
            for mode in (True, False):
                some = {key: trace for key, trace in traces.items() if key[1] is mode}
                plans.update(
                    zip(some, plan_by_budget(list(some.values()), self.budget), strict=True)
                )
            return plans
        plans = {key: plan_by_ops(trace, self.ops) for key, trace in traces.items()}
        all_are_measured = {name for name, _ in traces}.issuperset(self.names)
        if all_are_measured and not any(plans.values()):
            there = Counter(
                op.call[0].rpartition('.')[0]
                for trace in traces.values()
                for op in trace.may_be_kept
            )
            asked = sorted(self.ops)
            more = f' and {len(asked) - 3} more' if len(asked) > 3 else ''
            raise ValueError(
                f'{SETTING}: keep: none of {", ".join(asked[:3])}{more} computes anything in '
                f'{", ".join(self.names[:3])} that backward waits for and that can be kept; there '
                f'are {", ".join(sorted(there)) or "none"}'
            )
        return plans


def _keeping(kept: Kept, trace: Trace) -> Keeping | None:
    return None if kept is None else Keeping(kept, trace.calls)


@dataclass(frozen=True)
class ActivationCheckpointingSettings(Settings):
    """Settings of :func:`checkpoint_activations`."""

    modules: Selector | Sequence[Selector] = setting(
        BLOCKS, help="which modules: names, globs, classes, or 'blocks' for the repeated ones"
    )
    every: int = setting(1, help='every k-th of them', low=1)
    first: int | None = setting(None, help='only so many of these, in their order', low=1)
    keep: Op | Sequence[Op] = setting(
        (), help="ops whose outputs are kept: 'matmuls', 'attention', or names as 'aten.gelu'"
    )
    budget: float | None = setting(
        None, help="in place of keep: bytes as a share of the plain step's", low=0, high=1
    )
    strict: bool = setting(True, help='whether it is an error when no module is computed again')


TECHNIQUE = Technique(
    key='activation_checkpointing',
    title='activation checkpointing',
    settings=ActivationCheckpointingSettings,
    apply=with_settings(checkpoint_activations),
    switch=f'{SETTING}=[{BLOCKS}]',
    call='memengine.checkpoint_activations',
    shorthand='modules',
    # Inside checkpointed modules nothing is kept, so nothing is coded; what is outside is.
    after=('quantized_activations',),
    conflicts={
        'compile_blocks.backend=eager': 'that backend runs what it traced twice, statistics with '
        "it; to try without a compiler use backend='aot_eager'"
    },
    use_when='depth is what does not fit',
    saves='activations inside the named modules: all, those of cheap ops, or what a budget says',
    price='at most one more forward of them; no product with `keep=[matmuls, attention]`',
    example=ActivationCheckpointingSettings(modules=[BLOCKS]),
)
