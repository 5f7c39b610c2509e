"""How to compute a saved tensor again from others that are saved anyway, and what stands for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from memengine._torch_private.autograd import base_of, current_backward, version_of
from memengine.techniques.compression.backward_needs import behind_views, operation_name
from memengine.techniques.modules.saved_tensors import is_in_backward

Ask = Callable[[Any], Any]  # what is asked of a node


class Source(Protocol):
    """A saved tensor as hooks hold it, from which others can be computed."""

    @property
    def is_exact(self) -> bool:
        """Whether what it gives back is what was saved."""

    @property
    def is_whole(self) -> bool:
        """Whether it stays as it is."""

    @property
    def module(self) -> nn.Module | None:
        """Which saved it, if that is known."""

    def decode(self) -> Tensor:
        """The tensor, or what stands for it."""

    def prefetch(self) -> Tensor:
        """The same, before autograd itself asks for it."""


FindSource = Callable[[Any, str], Source | None]  # what hooks hold of a node's field, if ours
Compute = Callable[[Sequence[Source]], Tensor]


class Whole(NamedTuple):
    """A tensor that is all of its memory, as a rule."""

    shape: torch.Size
    stride: tuple[int, ...]
    nbytes: int  # of the memory

    @classmethod
    def of(cls, tensor: Tensor) -> Whole:
        """Of a tensor, or of what it is a view of, which a detached one does not know."""
        base = base_of(tensor)
        whole = tensor if base is None else base
        return cls(whole.shape, whole.stride(), whole.untyped_storage().nbytes())


@dataclass
class Derivation:
    """How sources were found, and what has to be so for what is computed from them to be right.

    Attributes:
        is_certain: Whether all that was used is known, and not only what a module says of itself.
        keeps_layout: Whether the result surely lies in memory as the first one did.
        places: For each source, which of the nodes has saved it; or where it is to be had.
        asked: What was asked of which node, and answered; or by which input it leads to the next.
        nodes: How many were asked. The first is the one whose result it is.
    """

    is_certain: bool = True
    keeps_layout: bool = True
    places: list[int | Callable[[], Source]] = field(default_factory=list)
    asked: list[tuple[int, Ask | int, Any]] = field(default_factory=list)
    nodes: int = 1

    def find_again(self, last: Any) -> list[Any] | None:
        """Nodes that led to a node of another forward, if all of them answer as these did."""
        nodes = [behind_views(last)]
        if nodes[0] is None:
            return None
        for place, ask, answer in self.asked:
            node = nodes[place]
            if not isinstance(ask, int):
                if ask(node) != answer:
                    return None
                continue
            before, output = node.next_functions[ask]
            if before is None or output or operation_name(before) != answer:
                return None
            nodes.append(before)
        return nodes


@dataclass
class Recomputation:
    """How to compute a storage's content again.

    Args:
        operation: What made it.
        compute: Runs that, into memory of its own that is laid out as the first result's.
        sources: What it starts from: what is held of the operations, and of modules.
        derivation: How they were found.
        number: Of the tensor that it is for, among those that its module saves in a forward.
        version: That the storage has if only these operations have worked in place in it; None if
            that cannot be told.
        stride: Of the first result, where another's may differ.
    """

    operation: str
    compute: Compute
    sources: Sequence[Source]
    derivation: Derivation = field(default_factory=Derivation)
    number: int = 0
    version: int | None = None
    stride: tuple[int, ...] | None = None

    @property
    def is_exact(self) -> bool:
        """Whether it gives what there was; not, when a source is in a lossy code."""
        return all(source.is_exact for source in self.sources)

    @property
    def is_from_whole(self) -> bool:
        """Whether all that it starts from stays as it is."""
        return all(source.is_whole for source in self.sources)

    def __call__(self) -> Tensor:
        """The result. (Meters do not look into what can be called: sources are counted already.)"""
        if not torch.is_grad_enabled():  # as in most backward passes, where to enter it costs
            result = self.compute(self.sources)
        else:
            with torch.no_grad():
                result = self.compute(self.sources)
        if self.stride is None or result.stride() == self.stride:
            return result
        # In memory as the first one was, which views of that ask for.
        return result.new_empty_strided(result.shape, self.stride).copy_(result)

    def again_from(self, sources: Sequence[Source]) -> Recomputation:
        """The same, of another forward."""
        how = self.operation, self.compute, sources, self.derivation, self.number
        return Recomputation(*how, stride=self.stride)

    def code(self, view: Tensor) -> RecomputedCode:
        """A codec for views of the storage."""
        return RecomputedCode(self, tuple(view.shape), view.stride(), int(view.storage_offset()))


@dataclass(frozen=True)
class RecomputedCode:
    """Code of a view of a storage, of which nothing is kept.

    Args:
        recomputation: Gives the storage.
        shape: The view's.
        stride: As well, in elements.
        offset: In the storage, in elements.
    """

    recomputation: Recomputation
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def decode(self) -> Tensor:
        """The view, of the result computed again."""
        return self.recomputation().as_strided(self.shape, self.stride, self.offset)


class ComputedAgain:
    """A saved tensor of which the plan says that nothing is kept.

    (Meters do not look into what can be called.)
    """

    __slots__ = ('__weakref__', '_offset', '_prefetched', '_shape', '_stride', 'memory', 'module')
    is_exact, is_whole = True, False  # as a source of others

    def __init__(self, memory: ComputedMemory, tensor: Tensor, module: nn.Module) -> None:
        self.memory, self.module = memory, module
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset()
        self._prefetched: Tensor | None = None

    def __call__(self) -> Tensor:
        """The tensor."""
        tensor, self._prefetched = self._prefetched, None
        if tensor is not None:
            return tensor
        content = self.memory.content()
        if not self._offset and content.stride() == self._stride and content.shape == self._shape:
            return content
        return content.as_strided(self._shape, self._stride, self._offset)

    decode = tensor = __call__

    def prefetch(self) -> Tensor:
        """The tensor, for what is computed from it in backward before autograd asks for it too."""
        tensor = self()
        if is_in_backward():
            self._prefetched = tensor
        return tensor


class ComputedMemory:
    """A storage whose content is computed again, once for several views that are held at a time."""

    __slots__ = ('_decoded', '_decoded_in', '_layout', '_storage', '_version', 'recomputation')
    _layout: tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]

    def __init__(self, recomputation: Recomputation, shared: Tensor | None) -> None:
        """How, and for which tensor, if there are others of the same memory."""
        self.recomputation = recomputation
        self._storage = None if shared is None else weakref.ref(shared.untyped_storage())
        self._version = None if shared is None else version_of(shared)
        self._decoded: weakref.ref[torch.UntypedStorage] | None = None
        self._decoded_in = -1

    def is_of(self, tensor: Tensor) -> bool:
        """Whether the tensor is a view of it, in the same state."""
        storage = self._storage() if self._storage is not None else None
        return storage is tensor.untyped_storage() and self._version == version_of(tensor)

    def content(self) -> Tensor:
        """All of it."""
        if self._storage is None:
            return self.recomputation()
        storage = self._decoded() if self._decoded is not None else None
        if storage is not None and self._decoded_in == current_backward():
            shape, stride, dtype, device = self._layout
            return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape, stride)
        content = self.recomputation()
        self._layout = content.shape, content.stride(), content.dtype, content.device
        self._decoded = weakref.ref(content.untyped_storage())
        self._decoded_in = current_backward()
        return content
