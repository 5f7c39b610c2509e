"""What a checkpointed module keeps: ops by their names, and the policy that torch asks for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.utils.checkpoint import CheckpointPolicy

from memengine._torch_private.ops import FLOPS_OF, OpOverload, OpOverloadPacket
from memengine.suggest import did_you_mean
from memengine.techniques.activation_checkpointing.budget import Call, draws_random

Op: TypeAlias = str | OpOverload | OpOverloadPacket


def op_names(keep: Op | Sequence[Op], setting: str) -> frozenset[str]:
    """Ops by name, without the overload: ``aten.mm``.

    Raises:
        ValueError: For a name that torch does not have; ``setting`` is what the error calls it.
        TypeError: For what is neither an op nor a name.
    """
    wanted = list(keep) if isinstance(keep, Sequence) and not isinstance(keep, str) else [keep]
    counted = {str(op) for op in FLOPS_OF if isinstance(op, OpOverloadPacket)}
    counted = {name for name in counted if 'backward' not in name}
    attention = {name for name in counted if 'attention' in name}
    groups = {'matmuls': counted - attention, 'attention': attention}
    names: set[str] = set()
    for op in wanted:
        if isinstance(op, OpOverload):
            names.add(str(op.overloadpacket))
        elif isinstance(op, OpOverloadPacket):
            names.add(str(op))
        elif not isinstance(op, str):
            raise TypeError(
                f'{setting}: keep: expected ops or their names, got {type(op).__name__} {op!r}'
            )
        else:
            names |= groups.get(op) or {_op_name(op, list(groups), setting)}
    return frozenset(names)


def _op_name(text: str, groups: list[str], setting: str) -> str:
    namespace, dot, name = text.partition('.')
    if not dot:
        namespace, name = 'aten', text
    if not hasattr(getattr(torch.ops, namespace), name):
        hint = did_you_mean(text, [*groups, *dir(torch.ops.aten)], after=';')
        raise ValueError(f"{setting}: keep: torch has no op '{text}'{hint}")
    return f'{namespace}.{name}'


class KeepCalls:
    """Which calls are kept, counted anew in each pass."""

    def __init__(self, kept: frozenset[Call]) -> None:
        self._kept = kept
        self._counts: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Whether the call that is about to be carried out is kept."""
        counts = self._counts[context.is_recompute]
        call = (str(op), counts[str(op)])
        counts[str(op)] += 1
        if call in self._kept and not draws_random(op, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def keep_ops(
    ops: frozenset[str], context: Any, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """The policy where ops are not measured: the compiler leaves out what it does not need."""
    if str(op).rpartition('.')[0] in ops and not draws_random(op, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
