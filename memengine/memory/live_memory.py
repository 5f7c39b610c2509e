"""Every piece of memory of a step that is carried out on fake tensors: when it lived, and for whom.

Operators are seen below autograd, one by one, as they would be carried out. What each of them makes
is noted until nobody holds it any more. Nothing is computed, except small tensors that follow from
constants (a schedule's rates, an optimiser's count of steps): programs read these.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    READS_A_NUMBER,
    SHAPE_OF_VALUES,
    is_fake,
    unset_fake_temporarily,
)
from memengine._torch_private.ops import (
    FLOPS_OF,
    OpOverload,
    TorchDispatchMode,
    pytree,
    written_arguments,
)
from memengine.memory.cpu_workspaces import packed_bytes, workspace_bytes
from memengine.memory.ledger import Block, Ledger, blocks_of
from memengine.memory.meter import SavedBytes

__all__ = ['SAVED', 'TRANSIENT', 'LiveMemory', 'Piece', 'Place']

TRANSIENT, SAVED, WORKSPACE = 'transients', 'saved activations', 'workspaces'

_MOST_BYTES = 4096  # of memory whose numbers are computed
_DRAWS = torch.Tag.nondeterministic_seeded
_CARRIES_OUT = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, __file__))


class Place(NamedTuple):
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


class Piece:
    """Memory that is there from an operator on until nobody holds it.

    Attributes:
        nbytes: Its size.
        category: What it is for.
        place: What in the model made it.
        op: The operator that made it.
        shape: Of the tensor that it was made for.
    """

    __slots__ = ('category', 'nbytes', 'numbers', 'op', 'place', 'shape', 'watch')

    def __init__(
        self, nbytes: int, category: str, place: Place, op: str, shape: tuple[int, ...] = ()
    ) -> None:
        self.nbytes, self.category, self.place, self.op = nbytes, category, place, op
        self.shape = shape
        self.watch: Any = None  # tells when it is freed
        self.numbers: Tensor | None = None  # all that it holds, if that is known


class _MarksSaved(Ledger):
    """In place of a meter's books: marks what autograd saves."""

    def __init__(self, pieces: Mapping[int, Piece]) -> None:
        super().__init__()
        self._pieces = pieces

    def count(self, blocks: Iterable[Block]) -> tuple[int, ...]:
        for block in blocks:
            piece = self._pieces.get(block.key)
            if piece is not None and piece.category == TRANSIENT:
                piece.category = SAVED
        return ()


class LiveMemory(TorchDispatchMode):
    """Notes what is made and freed while it is entered, inside a ``FakeTensorMode``.

    Attributes:
        events: Bytes (negative when freed) and piece, in order.
        begin: How many events are of what was there when the account began.
        begun: Where among them a part of the model (its child) began a forward pass, and its name.
        flops: Of products of matrices and convolutions.
        moved_bytes: Read and written by operators that are no views.
        operators: How many of these there were.
        guessed: How many numbers were read that follow from no constant; each was taken for 1, what
            asks whether any of many is so for no.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, Piece]] = []
        self.begun: list[tuple[int, str]] = []
        self.flops = self.moved_bytes = self.operators = self.guessed = 0
        self.begin, self._is_over = 0, False
        self._pieces: dict[int, Piece] = {}
        self._buffers: list[Piece] = []  # which MKL keeps, each larger than those before
        self._largest_buffer = 0
        self._modules: list[str] = []
        self._place = Place()  # of the operator that is being carried out
        self._places: dict[int, Place] = {}  # of autograd's nodes, by their numbers

    # ------------------------------------------------------------------ what is there

    def note(self, tensor: Tensor, category: str = TRANSIENT, op: str = '') -> None:
        """Note the memory of a tensor, or say what it is for."""
        for block in blocks_of(tensor):
            piece = self._pieces.get(block.key)
            if piece is None:
                piece = Piece(block.nbytes, category, self._place, op, tuple(tensor.shape))
                self._pieces[block.key] = piece
                self.events.append((piece.nbytes, piece))
                piece.watch = weakref.ref(block.owner, self._end_of(block.key))
            elif category != TRANSIENT:
                piece.category = category

    def _end_of(self, key: int) -> Callable[[Any], None]:
        def end(_: Any) -> None:
            piece = self._pieces.pop(key)
            if not self._is_over:
                self.events.append((-piece.nbytes, piece))

        return end

    def start_again(self) -> None:
        """Begin the account anew, with what is there now."""
        self.events = [(one.nbytes, one) for one in (*self._buffers, *self._pieces.values())]
        self.begin = len(self.events)
        self.begun.clear()
        self._modules.clear()
        self.flops = self.moved_bytes = self.operators = self.guessed = 0
        self._places.clear()

    def end(self) -> None:
        """End the account: what is freed from now on is no part of it."""
        self._is_over = True

    def left(self) -> list[Piece]:
        """What was made since the account began, and is there still."""
        before = {piece for _, piece in self.events[: self.begin]}
        return [piece for piece in self._pieces.values() if piece not in before]

    def as_if_there(self, pieces: Iterable[Piece]) -> None:
        """Take it that these pieces, each of an operator's, were there when the account began."""
        there = set(pieces)
        moved = [(nbytes, piece) for nbytes, piece in self.events if piece in there]
        gone = list(accumulate(piece in there for _, piece in self.events))
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
            hooks.enter_context(SavedBytes(ledger=_MarksSaved(self._pieces)))
            yield

    # ------------------------------------------------------------------ operators

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is ASKS_FOR_THE_DEVICE:  # more often than all else together
            return func(*args)
        if func is READS_A_NUMBER:
            return self._read(args[0])
        self._place = self._find_place()
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        there = {storage_key(t.untyped_storage()) for t in inputs if t.layout == torch.strided}
        try:
            out = func(*args, **kwargs)
        except SHAPE_OF_VALUES:
            with unset_fake_temporarily():
                if any(self._value_of(tensor) is None for tensor in inputs):
                    raise
                values = func(*self._with_values(args), **self._with_values(kwargs))
            out = pytree.tree_map_only(Tensor, torch.empty_like, values)
        made = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        fresh = [t for t in made if storage_key(t.untyped_storage()) not in there]
        for tensor in fresh:
            self.note(tensor, op=str(func))
        if fresh or written_arguments(func, args, kwargs):
            self._count_cost(func, args, kwargs, out, [*inputs, *fresh])
        self._compute_small(func, args, kwargs, inputs, made)
        return out

    def _find_place(self) -> Place:
        """Where the program stands; in backward, where the forward stood that it is of."""
        node = current_node()
        if node is not None and not self._modules:  # with modules, a forward is repeated in it
            known = self._places.get(node_number(node), Place('', *_innermost_line()))
            return known._replace(in_backward=True)
        place = Place(self._modules[-1] if self._modules else '', *_innermost_line())
        # Of operators with a gradient the node is there before they are carried out.
        self._places.setdefault(next_node_number() - 1, place)
        return place

    def _count_cost(
        self, func: OpOverload, args: Any, kwargs: Any, out: Any, tensors: list[Tensor]
    ) -> None:
        flops = FLOPS_OF.get(func.overloadpacket)
        if flops is not None:
            self.flops += flops(*args, **kwargs, out_val=out)
        self.operators += 1
        self.moved_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if nbytes := workspace_bytes(func, args, out):
            piece = Piece(nbytes, WORKSPACE, self._place, str(func))
            self.events += [(nbytes, piece), (-nbytes, piece)]
        needed, written = packed_bytes(func, args)
        if needed > self._largest_buffer:
            self._largest_buffer = needed
            piece = Piece(written, WORKSPACE, Place(), str(func))
            self._buffers.append(piece)
            self.events.insert(self.begin, (written, piece))  # there since the first step
            self.begin += 1
            self.begun = [(index + 1, name) for index, name in self.begun]

    # ------------------------------------------------------------------ values

    def _read(self, tensor: Tensor) -> Any:
        """What a program reads of a tensor of one number."""
        with unset_fake_temporarily():
            value = self._value_of(tensor)
            if value is None:
                self.guessed += 1
                piece = self._piece_of(tensor)
                is_any = piece is not None and piece.op.startswith('aten.any')
                # Of no number does what is asked for hold, as if all were as they should be:
                # `trunc_normal_` draws again until it does not.
                return torch.full((), not is_any, dtype=tensor.dtype).item()
            return value.item()

    def _value_of(self, tensor: Tensor) -> Tensor | None:
        """A real tensor on the known numbers of a fake one's memory."""
        if not is_fake(tensor):
            return tensor
        piece = self._piece_of(tensor)
        if piece is None or piece.numbers is None or piece.numbers.dtype != tensor.dtype:
            return None
        layout = tensor.shape, tensor.stride(), tensor.storage_offset()
        return piece.numbers.as_strided(*layout)

    def _piece_of(self, tensor: Tensor) -> Piece | None:
        is_plain = tensor.layout == torch.strided
        return self._pieces.get(storage_key(tensor.untyped_storage())) if is_plain else None

    def _compute_small(
        self, func: OpOverload, args: Any, kwargs: Any, inputs: list[Tensor], made: list[Tensor]
    ) -> None:
        """Give small results their numbers, if those of the inputs are known."""
        pieces = [self._piece_of(tensor) for tensor in made]
        small = made and all(p is not None and p.nbytes <= _MOST_BYTES for p in pieces)
        if small and _DRAWS not in func.tags:
            with unset_fake_temporarily():
                if all(self._value_of(tensor) is not None for tensor in inputs):
                    values = func(*self._with_values(args), **self._with_values(kwargs))
                    given = [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]
                    for piece, value in zip(pieces, given, strict=True):
                        whole = value.untyped_storage().nbytes() // value.element_size()
                        assert piece is not None, 'small results are in memory that is known'
                        piece.numbers = value.as_strided((whole,), (1,), 0)
                    return
        for tensor in written_arguments(func, args, kwargs):
            for one in tensor if isinstance(tensor, (list, tuple)) else [tensor]:
                piece = self._piece_of(one) if isinstance(one, Tensor) else None
                if piece is not None:
                    piece.numbers = None

    def _with_values(self, arguments: Any) -> Any:
        return pytree.tree_map(
            lambda leaf: self._value_of(leaf) if isinstance(leaf, Tensor) else leaf, arguments
        )
