"""What torch keeps private of autograd: its nodes, its passes, and the hooks in force."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from operator import attrgetter, methodcaller
from threading import get_ident
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

SavedTensorHooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

# --- tensors ---

version_of: Callable[[Tensor], int] = attrgetter('_version')
"""How often a tensor was written to in place, which hooks have to check themselves."""


def check_unmodified(tensor: Tensor, version: int, shape: torch.Size | None = None) -> None:
    """Raise autograd's RuntimeError when a tensor was written to since it had this version."""
    if version_of(tensor) != version:
        shape = tensor.shape if shape is None else shape
        raise RuntimeError(
            'one of the variables needed for gradient computation has been modified by an inplace '
            f'operation: {tensor.type()} of shape {tuple(shape)} is at version '
            f'{version_of(tensor)}; expected version {version} instead'
        )


def check_of_later_writes(tensor: Tensor) -> Callable[[], None]:
    """The same for a tensor whose memory is not to be held: to be called later."""
    counter = tensor.detach()
    counter.data = counter.new_empty(0)  # in place of the memory, and not of the version
    return partial(check_unmodified, counter, version_of(tensor), tensor.shape)


base_of: Callable[[Tensor], Tensor | None] = attrgetter('_base')
"""The tensor that this one is a view of. FSDP hands out views of what it has gathered."""

storage_key: Callable[[torch.UntypedStorage], int] = attrgetter('_cdata')
"""The address of a storage: what is the same memory, on devices without pointers (meta) too."""

gradient_hooks_of: Callable[[Tensor], Any] = attrgetter('_backward_hooks')
"""A tensor's own hooks, None without any: whoever has put one there asks for its gradient."""


def dispatch_keys(tensor: Tensor) -> int:
    """Which of torch's kernels a tensor takes: device, layout, what is lazy, wrapped or quantised.

    A number to compare, for what else takes half a dozen questions.
    """
    return torch._C._dispatch_keys(tensor).raw_repr()


is_functorch_tensor: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether ``torch.func`` has wrapped the tensor, so that its storage is not its memory."""


def is_under_functorch() -> bool:
    """Whether a transform of ``torch.func`` is in force, which keeps its own graph."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_under_forward_ad() -> bool:
    """Whether a ``torch.autograd.forward_ad.dual_level()`` is entered: tensors have tangents."""
    return forward_ad._current_level >= 0


# --- nodes of the graph ---

next_node_number: Callable[[], int] = torch.autograd._get_sequence_nr
"""The number of the node that autograd will make next in this thread.

Nodes are numbered in the order in which they are made, and a node saves right after it was made: so
the number, less one, says to hooks who is saving.
"""

node_number: Callable[[Any], int] = methodcaller('_sequence_nr')
"""A node's number; of leaves it is the largest there is."""


def has_saved(node: Any, field: str) -> bool:
    """Whether nodes of this kind have a field in which they save: ``'mat1'``."""
    return hasattr(type(node), f'_saved_{field}')


def saved_by(node: Any, field: str) -> Any:
    """What a node has saved in a field: a number, or a tensor, which is unpacked.

    Raises:
        RuntimeError: When a backward has freed it.
    """
    return getattr(node, f'_saved_{field}')


@cache
def asking_for(field: str) -> Callable[[Any], Any]:
    """What asks a node for that, where many are asked."""
    return attrgetter(f'_saved_{field}')


def result_metadata_of(node: Any) -> Any:
    """Shape, dtype and device of the (first) result of a node's operation.

    As backward checks gradients by: the only record of a result that nobody has kept.
    """
    return node._input_metadata[0]


def input_metadata_of(node: Any) -> Any:
    """The same of its operation's first input, which has to have a gradient."""
    producer, output = node.next_functions[0]
    return producer._input_metadata[output]


# --- backward passes ---

current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that autograd runs in this thread, -1 outside."""

current_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node whose backward runs in this thread, None outside."""


def after_backward(call: Callable[[], None]) -> None:
    """Have something called at the end of the backward that runs, as DDP and FSDP do."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


# --- saved-tensor hooks ---


class _EnteredHooks:
    """The saved-tensor hooks that are entered, for a torch that does not tell (before 2.8).

    It notes them in ``saved_tensors_hooks``' own methods, from the import on.
    """

    def __init__(self) -> None:
        self._of_thread: dict[int, list[SavedTensorHooks]] = defaultdict(list)
        enter, leave = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__

        def note(hooks: saved_tensors_hooks) -> None:
            enter(hooks)
            self._of_thread[get_ident()].append((hooks.pack_hook, hooks.unpack_hook))

        def forget(hooks: saved_tensors_hooks, *exception: object) -> None:
            leave(hooks, *exception)
            entered = self._of_thread.pop(get_ident(), [])[:-1]
            if entered:
                self._of_thread[get_ident()] = entered

        saved_tensors_hooks.__enter__ = note  # type: ignore[method-assign]
        saved_tensors_hooks.__exit__ = forget  # type: ignore[method-assign]

    def __call__(self, ignore_is_tracing: bool) -> SavedTensorHooks | None:
        entered = self._of_thread.get(get_ident())
        if entered is None and current_backward() != -1:
            # In a thread of autograd's, for a GPU: those of the thread that asked for backward.
            entered = next(iter(self._of_thread.values()), None)
        return entered[-1] if entered else None


_top_hooks: Callable[[bool], SavedTensorHooks | None] = (
    getattr(torch._C._autograd, '_top_saved_tensors_default_hooks', None) or _EnteredHooks()
)


def saved_tensor_hooks_in_force() -> SavedTensorHooks | None:
    """The pack and unpack hook that what is saved here now passes through: the innermost.

    Hooks that are entered inside of others have to call these themselves. torch tells from 2.8 on;
    before, it is noted which are entered.
    """
    return _top_hooks(False)


def is_checkpointing() -> bool:
    """Whether torch's checkpointing looks for what is saved here, in its first pass or its second.

    It is known by the module in which its pack hook is defined. Were that moved, what a
    checkpointed module saves would be compressed while it is recomputed: dearer, still right.
    """
    hooks = _top_hooks(False)  # asked of each node, so without another call
    return hooks is not None and hooks[0].__module__ == _OF_CHECKPOINTING


def checkpointed_pass() -> Callable[..., Any] | None:
    """What stands for a pass of torch's checkpointing: one object for all that it runs."""
    hooks = saved_tensor_hooks_in_force()
    return hooks[0] if hooks is not None and hooks[0].__module__ == _OF_CHECKPOINTING else None


_OF_CHECKPOINTING = 'torch.utils.checkpoint'
