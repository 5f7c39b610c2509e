"""What a checkpointed module keeps: ops by their names, and the policy that torch asks for each."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from memengine._torch_private.autograd import storage_key
from memengine._torch_private.ops import (
    FLOPS_OF,
    OpOverload,
    OpOverloadPacket,
    last_kept,
    pytree,
    written_arguments,
)
from memengine.suggest import did_you_mean
from memengine.techniques.activation_checkpointing.budget import Keeping, draws_random
from memengine.techniques.modules.saved_tensors import is_plain

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
    """Which calls are kept, as long as they are those that were measured, in their order.

    With others, as of a longer sequence, the same number means another call: one that the module
    may write into afterwards, so that the repeated forward would go on from what was written. From
    the first other call on, nothing is kept.

    Args:
        keeping: What is kept, and what was measured.
        name: The module's, for errors.

    Attributes:
        is_as_measured: Whether all calls of the first forward so far were those.
    """

    def __init__(self, keeping: Keeping, name: str) -> None:
        self._kept, self._measured, self._name = *keeping, name
        self._counts = {False: 0, True: 0}  # of calls, in the first forward and when repeated
        self._is_other = {False: False, True: False}
        self._outputs: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # that are kept
        self._not_noted: Any = None  # the op whose output is kept as of the call before
        # What carries the policy out, of which torch 2.6 tells no outputs; not held by it in turn.
        self.mode: Callable[[], Any] = lambda: None

    @property
    def is_as_measured(self) -> bool:
        """See the class."""
        return not self._is_other[False]

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Whether the call that is carried out is kept."""
        is_repeated = context.is_recompute
        number = self._counts[is_repeated]
        self._counts[is_repeated] = number + 1
        if self._not_noted is not None:
            self._note_kept(last_kept(self.mode(), self._not_noted))
            self._not_noted = None
        self._refuse_writes(written_arguments(op, args, kwargs))
        if self._is_other[is_repeated] or number >= len(self._measured):
            return CheckpointPolicy.PREFER_RECOMPUTE
        call = self._measured[number]
        if call[0] != str(op):
            self._is_other[is_repeated] = True
        elif call in self._kept and not draws_random(op, args, kwargs):
            if hasattr(context, 'op_output'):
                self._note_kept(context.op_output)
            elif not is_repeated:  # torch 2.6 asks before the call
                self._not_noted = op
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def _note_kept(self, outputs: Any) -> None:
        for storage in _storages(outputs):
            self._outputs[storage_key(storage)] = weakref.ref(storage)

    def _refuse_writes(self, written: list[Any]) -> None:
        for storage in _storages(written) if written and self._outputs else ():
            kept = self._outputs.get(storage_key(storage))
            if kept is not None and kept() is storage:
                raise ValueError(
                    f'activation_checkpointing: {self._name} writes into what keep or budget has '
                    'kept of it, which it did not when it was measured; leave it out, or leave '
                    'keep and budget out'
                )


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [leaf.untyped_storage() for leaf in leaves if is_plain(leaf)]


def keep_ops(
    ops: frozenset[str], context: Any, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """The policy where ops are not measured: the compiler leaves out what it does not need."""
    if str(op).rpartition('.')[0] in ops and not draws_random(op, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
