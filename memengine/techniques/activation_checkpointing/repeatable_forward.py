"""A module's forward that runs once more in backward, just as it ran the first time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from memengine._torch_private.autograd import is_under_functorch, version_of
from memengine._torch_private.modules import BatchOrInstanceNorm
from memengine._torch_private.ops import (
    CHECKPOINT_HEEDS_HOOKS,
    compiled_checkpoints_write_twice,
    do_not_compile,
    pytree,
)
from memengine.techniques.activation_checkpointing.budget import (
    Keeping,
    Trace,
    measure,
    without_autocast_cache,
)
from memengine.techniques.activation_checkpointing.op_policy import KeepCalls, keep_ops
from memengine.techniques.modules.forward_state import ModuleState, RandomState, SmallBuffers
from memengine.techniques.modules.running_statistics import copied_statistics
from memengine.techniques.modules.wrapped_forward import WrappedForward

SETTING = 'activation_checkpointing'  # what errors call it


class Planner(Protocol):
    """Says what a module keeps."""

    ops: frozenset[str]
    budget: float | None
    is_paused: bool

    def kept(self, name: str, training: bool, trace: Callable[[], Trace]) -> Keeping | None:
        """What is kept, None for all of it; ``trace()`` measures the module."""
        ...

    def note_other_calls(self, name: str, training: bool) -> None:
        """A forward of the module has done other calls than those that were measured."""
        ...


class CheckpointedForward(WrappedForward):
    """Stands in a module's ``forward``; ``planner`` says what is kept.

    Attributes:
        calls: How often the module was called.
        checkpointed: How often of these something was left to be computed again.
        has_buffers: Whether the module has any, which its forward may write into.
    """

    setting = SETTING

    def __init__(self, name: str, module: nn.Module, planner: Planner) -> None:
        super().__init__(name, module)
        self.planner = planner
        self.calls = self.checkpointed = 0
        self.has_buffers = any(True for _ in module.buffers())
        to_their_end = (nn.RReLU, torch.jit.ScriptModule)
        self._runs_to_its_end = any(isinstance(part, to_their_end) for part in module.modules())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; what it computes is computed again in backward."""
        if torch.compiler.is_compiling() and self.can_be_compiled:
            return self._traced_by_compile(*args, **kwargs)
        return self._eager(*args, **kwargs)

    @property
    def can_be_compiled(self) -> bool:
        """Whether compiled code would repeat the forward as it was, and knows what to keep."""
        if self.planner.budget is not None:
            return False
        return not (self.has_buffers and compiled_checkpoints_write_twice())

    @do_not_compile
    def _eager(self, *args: Any, **kwargs: Any) -> Any:
        if self.planner.is_paused or is_under_functorch():  # which has no saved-tensor hooks
            return self.plain(*args, **kwargs)
        self.calls += 1
        run = _FlatCall(self.plain, (args, kwargs))
        tensors = [leaf for leaf in run.leaves if isinstance(leaf, Tensor)]
        if not torch.is_grad_enabled() or not self._needs_gradient(tensors):
            return self.plain(*args, **kwargs)
        state = RandomState.of(self.module, tensors)
        keeping = self.planner.kept(
            self.name, self.module.training, partial(self._measure, run, tensors, state)
        )
        self.checkpointed += 1
        if keeping is None:
            return self.plain(*args, **kwargs)
        again = _RepeatContext(state, self.name, self.module, run.leaves)
        with _refusing_changes(again, tensors):
            return self._checkpoint(run, again, keeping)

    def _needs_gradient(self, tensors: list[Tensor]) -> bool:
        parameters = self.module.parameters()
        return any(t.requires_grad for t in tensors) or any(p.requires_grad for p in parameters)

    def _measure(self, run: _FlatCall, tensors: list[Tensor], state: RandomState) -> Trace:
        with _RepeatContext(state, self.name, self.module, run.leaves):
            return measure(self.module, partial(run.repeat, *run.leaves), tensors)

    def _checkpoint(self, run: _FlatCall, again: _RepeatContext, keeping: Keeping) -> Any:
        options: dict[str, Any] = dict(context_fn=lambda: (ExitStack(), again))
        policy = KeepCalls(keeping, self.name)
        with ExitStack() as stack:
            # Stopped when all is saved again, RReLU has yet to fill its noise; and of the exception
            # by which torch stops TorchScript makes an error.
            if self._runs_to_its_end:
                stack.enter_context(set_checkpoint_early_stop(False))
            if keeping.kept:
                forward, repeated = create_selective_checkpoint_contexts(policy)
                policy.mode = weakref.ref(forward)
                again.inside.append(repeated)
                options = dict(context_fn=lambda: (forward, again))
                if CHECKPOINT_HEEDS_HOOKS:
                    options['respect_saved_tensors_hooks'] = True
                stack.enter_context(without_autocast_cache())
            outputs = checkpoint(
                run, *run.leaves, use_reentrant=False, preserve_rng_state=False, **options
            )
        if not policy.is_as_measured:
            self.planner.note_other_calls(self.name, self.module.training)
        return outputs

    def _traced_by_compile(self, *args: Any, **kwargs: Any) -> Any:
        self.checkpointed = 1  # a constant, so that it is no reason to compile again
        options: dict[str, Any] = {}
        if self.planner.ops:
            policy = partial(keep_ops, self.planner.ops)
            options['context_fn'] = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(self.plain, *args, use_reentrant=False, **options, **kwargs)


class _FlatCall:
    """A forward on flat arguments, so that every tensor in them is one that checkpoint saves.

    Attributes:
        leaves: The arguments, each object once: a forward may ask whether two are the same.
    """

    def __init__(self, forward: Callable[..., Any], given: Any) -> None:
        self._forward = forward
        leaves, self._structure = pytree.tree_flatten(given)
        self.leaves = list({id(leaf): leaf for leaf in leaves}.values())
        numbers = {id(leaf): number for number, leaf in enumerate(self.leaves)}
        self._places = [numbers[id(leaf)] for leaf in leaves]
        self._given = [given]  # for the first forward the very objects: it may write into a list

    def __call__(self, *leaves: Any) -> Any:
        if not self._given:
            return self.repeat(*leaves)
        args, kwargs = self._given.pop()
        return self._forward(*args, **kwargs)

    def repeat(self, *leaves: Any) -> Any:
        everything = [leaves[place] for place in self._places]
        args, kwargs = pytree.tree_unflatten(everything, self._structure)
        return self._forward(*args, **kwargs)


class _RepeatContext:
    """The context of a repeated forward; entered once for each backward through the graph.

    Made just before the first forward, whose random state, modes and weights it brings back. Norm
    layers count into copies of their statistics: without any they would save other tensors than in
    the first forward. So does what writes to other small buffers in silence, from their values.
    """

    def __init__(
        self, random: RandomState, name: str, module: nn.Module, given: Iterable[Any]
    ) -> None:
        self._random, self.name = random, name
        self.state, self._buffers = ModuleState(module, given), SmallBuffers(module)
        self.inside: list[Any] = []  # more contexts
        self._norms = [m for m in module.modules() if isinstance(m, BatchOrInstanceNorm)]
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self.refuse_changes('between its forward and backward')
        with ExitStack() as stack:
            stack.enter_context(self._random.replay())
            stack.enter_context(self.state.restored())
            stack.enter_context(self._buffers.restored())
            stack.enter_context(copied_statistics(self._norms))
            for context in self.inside:
                stack.enter_context(context)
            self._stack = stack.pop_all()

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)
        if 'not found in storage' in str(exception[1]):  # torch: an op that the first one had not
            raise ValueError(
                f'{SETTING}: {self.name} computes something else when its forward is repeated, and '
                'what keep or budget has kept is not found; if the model keeps a cache, switch it '
                "off (transformers' use_cache=False), or leave keep and budget out"
            ) from exception[1]

    def refuse_changes(self, when: str) -> None:
        """Refuse to repeat a forward of which a weight or buffer is another one by now."""
        changed = self.state.written_to()
        if changed is not None:
            raise ValueError(
                f'{SETTING}: {changed} of {self.name} changes {when}, so the forward cannot be '
                'repeated as it was; leave the module out'
            )


@contextmanager
def _refusing_changes(again: _RepeatContext, tensors: list[Tensor]) -> Iterator[None]:
    """Refuse a forward that changes what it would be repeated from."""
    versions = [version_of(tensor) for tensor in tensors]
    yield
    if versions != [version_of(tensor) for tensor in tensors]:
        raise ValueError(
            f'{SETTING}: {again.name} changes its input in place, so its forward cannot '
            'be repeated from it; set inplace=False in its first layers, or leave it out'
        )
    again.refuse_changes('in its forward')
    again.state.forget_replaced_outputs()
