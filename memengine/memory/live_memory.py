"""All memory of a step that is carried out on fake tensors: when it lived, and for whom.

Operators are seen below autograd, one by one, as they would be carried out. What each of them makes
is noted until nobody holds it any more. Nothing is computed, except small tensors that follow from
constants (a schedule's rates, an optimiser's count of steps): programs read these.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memengine._torch_private.autograd import (
    current_node,
    next_node_number,
    node_number,
    storage_key,
)
from memengine._torch_private.fake import (
    ASKS_FOR_THE_DEVICE,
    COMPARES,
    MAPS_A_FILE,
    READS_A_NUMBER,
    SHAPE_OF_VALUES,
    fake_mode,
    is_fake,
    unset_fake_temporarily,
    without_modes,
)
from memengine._torch_private.fake_operators import inputs_by_shape
from memengine._torch_private.ops import OperatorMode, OpOverload, pytree, written_arguments
from memengine.memory.cpu_workspaces import (
    MOST_COMPUTED_BYTES,
    Operator,
    tensors_of,
    with_lstm_workspace,
)
from memengine.memory.ledger import Block, Ledger, blocks_of
from memengine.memory.meter import SavedBytes

TRANSIENT, SAVED, WORKSPACE = 'transients', 'saved activations', 'workspaces'

_DRAWS = torch.Tag.nondeterministic_seeded
_CARRIES_OUT = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, __file__))


class Origin(NamedTuple):
    """What in the model an operator is of.

    Attributes:
        module: The module in whose forward it is, by its name; empty outside.
        file: Of the innermost line that is neither torch's nor of this package.
        line: Its number.
        in_backward: Whether it is of the backward of that line.
    """

    module: str = ''
    file: str = ''
    line: int = 0
    in_backward: bool = False


def _innermost_line() -> tuple[str, int]:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_CARRIES_OUT):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ('', 0)


class Allocation:
    """Memory that is there from an operator on until nobody holds it.

    Attributes:
        nbytes: Its size.
        category: What it is for.
        origin: What in the model made it.
        op: The operator that made it.
        shape: Of the tensor that it was made for.
    """

    __slots__ = ('category', 'nbytes', 'numbers', 'op', 'origin', 'shape', 'watch')

    def __init__(
        self, nbytes: int, category: str, origin: Origin, op: str, shape: tuple[int, ...] = ()
    ) -> None:
        self.nbytes, self.category, self.origin, self.op = nbytes, category, origin, op
        self.shape = shape
        self.watch: Any = None  # tells when it is freed
        self.numbers: Tensor | None = None  # all that it holds, if that is known


class _MarksSaved(Ledger):
    """In place of a meter's books: marks what autograd saves."""

    def __init__(self, allocations: Mapping[int, Allocation]) -> None:
        super().__init__()
        self._allocations = allocations

    def count(self, blocks: Iterable[Block]) -> tuple[int, ...]:
        for block in blocks:
            allocation = self._allocations.get(block.key)
            if allocation is not None and allocation.category == TRANSIENT:
                allocation.category = SAVED
        return ()


class KnownOperators:
    """Operators that were carried out on fake tensors of one mode, whose results are known.

    Attributes:
        mode: The mode.
        by_shapes: What each has made and cost, by the shapes of its inputs.
    """

    def __init__(self) -> None:
        self.mode = fake_mode()
        self.by_shapes: dict[Hashable, Operator] = {}


class LiveMemory(OperatorMode):
    """Notes what is made and freed while it is entered, inside the mode of known operators.

    Args:
        known: Operators that need not be carried out; others are added.
        lines: Whether origins say the line, which is looked for in the stack at each operator.

    Attributes:
        events: Bytes (negative when freed) and allocation, in order.
        begin: How many events are of what was there when the account began.
        begun: Where among them a part of the model (its child) began a forward pass, and its name.
        flops: Of products of matrices and convolutions.
        moved_bytes: Read and written by operators that are no views.
        offloaded_bytes: Written to files, and read from there.
        operators: How many of these there were.
        guessed: How many numbers were read that follow from no constant; each was taken for 1, what
            asks whether any of many is so for no.
    """

    def __init__(self, known: KnownOperators, lines: bool = True) -> None:
        super().__init__()
        self._known = known.by_shapes
        self._line = _innermost_line if lines else lambda: ('', 0)
        self.events: list[tuple[int, Allocation]] = []
        self.begun: list[tuple[int, str]] = []
        self.flops = self.moved_bytes = self.offloaded_bytes = self.operators = self.guessed = 0
        self.begin, self._is_over = 0, False
        self._allocations: dict[int, Allocation] = {}
        self._kept: list[Allocation] = []  # by libraries
        self._largest_buffer = 0
        self._kernels: set[Hashable] = set()
        self._sent: Allocation | None = None  # what the last collective has copied
        self._modules: list[str] = []
        self._origin = Origin()  # of the operator that is being carried out
        self._origins: dict[int, Origin] = {}  # of autograd's nodes, by their numbers

    # ------------------------------------------------------------------ what is there

    def note(self, tensor: Tensor, category: str = TRANSIENT, op: str = '') -> None:
        """Note the memory of a tensor, or say what it is for."""
        for block in blocks_of(tensor):
            allocation = self._allocations.get(block.key)
            if allocation is None:
                allocation = Allocation(
                    block.nbytes, category, self._origin, op, tuple(tensor.shape)
                )
                self._allocations[block.key] = allocation
                self.events.append((allocation.nbytes, allocation))
                allocation.watch = weakref.ref(block.owner, self._end_of(block.key))
            elif category != TRANSIENT:
                allocation.category = category

    def _end_of(self, key: int) -> Callable[[Any], None]:
        def end(_: Any) -> None:
            allocation = self._allocations.pop(key)
            if not self._is_over:
                self.events.append((-allocation.nbytes, allocation))

        return end

    def start_again(self) -> None:
        """Begin the account anew, with what is there now."""
        self._sent = None
        self.events = [(one.nbytes, one) for one in (*self._kept, *self._allocations.values())]
        self.begin = len(self.events)
        self.begun.clear()
        self._modules.clear()
        self.flops = self.moved_bytes = self.offloaded_bytes = self.operators = self.guessed = 0
        self._origins.clear()

    def end(self) -> None:
        """End the account: what is freed from now on is no part of it."""
        self._is_over = True

    def left(self) -> list[Allocation]:
        """What was made since the account began, and is there still."""
        before = {allocation for _, allocation in self.events[: self.begin]}
        return [allocation for allocation in self._allocations.values() if allocation not in before]

    def count_as_held_before(self, allocations: Iterable[Allocation]) -> None:
        """Take it that these, each of an operator's, were there when the account began."""
        there = set(allocations)
        moved = [(nbytes, allocation) for nbytes, allocation in self.events if allocation in there]
        gone = list(accumulate(allocation in there for _, allocation in self.events))
        self.begun = [
            (index + len(moved) - (gone[index - 1] if index else 0), name)
            for index, name in self.begun
        ]
        self.events = moved + [event for event in self.events if event[1] not in there]
        self.begin += len(moved)
        self.operators -= len(moved)
        self.moved_bytes -= sum(2 * nbytes for nbytes, _ in moved)  # as `zeros_like` counts

    @contextmanager
    def named(self, model: nn.Module) -> Iterator[None]:
        """Say of what is made in which module it is, and what autograd saves."""
        names = {module: name for name, module in model.named_modules()}

        def begin(module: nn.Module, _: Any) -> None:
            if module is model:
                self._modules.clear()  # of what recomputation has broken off
            if not any(self._modules):  # in no part of the model yet
                self.begun.append((len(self.events), names[module]))
            self._modules.append(names[module])

        def end(module: nn.Module, *_: Any) -> None:
            if names[module] in self._modules:  # forwards that are broken off end nothing
                while self._modules.pop() != names[module]:
                    pass

        with ExitStack() as hooks:
            for module in names:
                hooks.callback(module.register_forward_pre_hook(begin).remove)
                hooks.callback(module.register_forward_hook(end).remove)
            hooks.enter_context(SavedBytes(ledger=_MarksSaved(self._allocations)))
            yield

    # ------------------------------------------------------------------ operators

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is ASKS_FOR_THE_DEVICE:  # more often than all else together
            return args[0].fake_device if is_fake(args[0]) else func(*args)
        if func is READS_A_NUMBER:
            return self._read(args[0])
        if func is COMPARES:
            return self._compare(*args)
        if func is MAPS_A_FILE:  # into memory that is the file's
            mapped = torch.empty(args[2], dtype=kwargs['dtype'])
            self.offloaded_bytes += 2 * mapped.nbytes  # out, and back
            return mapped
        origin = self._find_origin()
        if self._sent and origin.in_backward != self._origin.in_backward:
            self._free_sent()
        self._origin = origin
        inputs: list[Tensor] = []
        shapes = inputs_by_shape(func, args, kwargs, inputs)
        operator = self._known.get(shapes) if shapes is not None else None
        if operator is not None:
            assert operator.results is not None
            out = operator.results.again(inputs)
        else:
            out = self._carry_out(func, args, kwargs)
            inputs = tensors_of((args, kwargs))
            operator = Operator.of(func, args, kwargs, out, inputs)
            is_so_again = inputs_by_shape(func, args, kwargs, []) == shapes
            if shapes is not None and is_so_again and operator.results is not None:
                self._known[shapes] = operator
        made = [out] if isinstance(out, Tensor) else tensors_of(out)
        for index in operator.fresh:
            self.note(made[index], op=operator.name)
        if operator.fresh or operator.written or operator.workspace_bytes:
            self._count_cost(operator)
        if operator.may_be_small or operator.written:
            self._compute_small(func, args, kwargs, inputs, made)
        return out

    def _carry_out(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        if func.namespace == 'profiler':  # marks in the program, without tensors
            with without_modes():
                return func(*args, **kwargs)
        try:
            return with_lstm_workspace(func, args, func(*args, **kwargs))
        except SHAPE_OF_VALUES:
            with unset_fake_temporarily():
                if any(self._value_of(tensor) is None for tensor in tensors_of((args, kwargs))):
                    raise
                values = self._carry_out_on_values(func, args, kwargs)
            return pytree.tree_map_only(Tensor, torch.empty_like, values)

    def _find_origin(self) -> Origin:
        """Where the program stands; in backward, where the forward stood that it is of."""
        node = current_node()
        if node is not None and not self._modules:  # with modules, a forward is repeated in it
            known = self._origins.get(node_number(node), Origin('', *self._line()))
            return known._replace(in_backward=True)
        origin = Origin(self._modules[-1] if self._modules else '', *self._line())
        # Of operators with a gradient the node is there before they are carried out.
        self._origins.setdefault(next_node_number() - 1, origin)
        return origin

    def _count_cost(self, operator: Operator) -> None:
        self.flops += operator.flops
        self.operators += 1
        self.moved_bytes += operator.moved_bytes
        if nbytes := operator.workspace_bytes:
            allocation = Allocation(nbytes, WORKSPACE, self._origin, operator.name)
            if operator.is_collective:  # goes on beside what is computed next
                self._free_sent()
                self._sent = allocation
                self.events.append((nbytes, allocation))
            else:
                self.events += [(nbytes, allocation), (-nbytes, allocation)]
        needed, written = operator.packed_bytes
        if needed > self._largest_buffer:
            self._largest_buffer = needed
            self._keep(written, operator.name)
        for kernel, nbytes in operator.kernels.items():
            if kernel not in self._kernels:
                self._kernels.add(kernel)
                self._keep(nbytes, operator.name)

    def _free_sent(self) -> None:
        if self._sent:
            self.events.append((-self._sent.nbytes, self._sent))
            self._sent = None

    def _keep(self, nbytes: int, op: str) -> None:
        """Count what a library keeps for good, and so has since the first step."""
        allocation = Allocation(nbytes, WORKSPACE, Origin(), op)
        self._kept.append(allocation)
        self.events.insert(self.begin, (nbytes, allocation))
        self.begin += 1
        self.begun = [(index + 1, name) for index, name in self.begun]

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Count memory that is now larger or smaller than it was made."""
        key = storage_key(storage)
        before = self._allocations.get(key)
        if before is not None and before.nbytes != nbytes:
            now = Allocation(nbytes, before.category, before.origin, before.op, before.shape)
            now.watch, self._allocations[key] = before.watch, now
            self.events += [(-before.nbytes, before), (nbytes, now)]

    # ------------------------------------------------------------------ values

    def _read(self, tensor: Tensor) -> Any:
        """What a program reads of a tensor of one number."""
        with unset_fake_temporarily():
            value = self._value_of(tensor)
            if value is None:
                self.guessed += 1
                allocation = self._allocation_of(tensor)
                is_any = allocation is not None and allocation.op.startswith('aten.any')
                # Of no number does what is asked for hold, as if all were as they should be:
                # `trunc_normal_` draws again until it does not.
                return torch.full((), not is_any, dtype=tensor.dtype).item()
            return value.item()

    def _compare(self, tensor: Tensor, other: Tensor) -> bool:
        """Whether two tensors are equal; if that cannot be known, as if all were as it should."""
        with unset_fake_temporarily():
            value, another = self._value_of(tensor), self._value_of(other)
            if value is not None and another is not None:
                return torch.equal(value, another)
        self.guessed += 1
        return tensor.shape == other.shape

    def _value_of(self, tensor: Tensor) -> Tensor | None:
        """A real tensor on the known numbers of a fake one's memory."""
        if not is_fake(tensor):
            return tensor
        allocation = self._allocation_of(tensor)
        if (
            allocation is None
            or allocation.numbers is None
            or allocation.numbers.dtype != tensor.dtype
        ):
            return None
        layout = tensor.shape, tensor.stride(), tensor.storage_offset()
        return allocation.numbers.as_strided(*layout)

    def _allocation_of(self, tensor: Tensor) -> Allocation | None:
        is_plain = tensor.layout == torch.strided
        return self._allocations.get(storage_key(tensor.untyped_storage())) if is_plain else None

    def _compute_small(
        self, func: OpOverload, args: Any, kwargs: Any, inputs: list[Tensor], made: list[Tensor]
    ) -> None:
        """Give small results their numbers, if those of the inputs are known."""
        allocations = [self._allocation_of(tensor) for tensor in made]
        small = made and all(p is not None and p.nbytes <= MOST_COMPUTED_BYTES for p in allocations)
        if small and _DRAWS not in func.tags:
            with unset_fake_temporarily():
                if all(self._value_of(tensor) is not None for tensor in inputs):
                    values = self._carry_out_on_values(func, args, kwargs)
                    for allocation, value in zip(allocations, tensors_of(values), strict=True):
                        whole = value.untyped_storage().nbytes() // value.element_size()
                        assert allocation is not None, 'small results are in memory that is known'
                        allocation.numbers = value.as_strided((whole,), (1,), 0)
                    return
        for tensor in written_arguments(func, args, kwargs):
            for one in tensor if isinstance(tensor, (list, tuple)) else [tensor]:
                allocation = self._allocation_of(one) if isinstance(one, Tensor) else None
                if allocation is not None:
                    allocation.numbers = None

    def with_known_numbers(self, tree: Any) -> Any:
        """The same outside this mode, with real tensors for those whose numbers are known."""

        def known(tensor: Tensor) -> Tensor:
            value = self._value_of(tensor)
            return tensor if value is None else value

        with without_modes():
            return pytree.tree_map_only(Tensor, known, tree)

    def _carry_out_on_values(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        given = {name: self._with_values(value) for name, value in kwargs.items()}
        return func(*self._with_values(args), **given)

    def _with_values(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self._value_of(argument)
        if isinstance(argument, (list, tuple)):
            return [*map(self._with_values, argument)]
        return argument
