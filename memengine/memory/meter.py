"""How many bytes autograd keeps for the backward pass, counted on any device.

Counted are storages, as they are what occupies memory: a view, or a tensor that several
operations save, costs its storage once. What a model owns anyway (parameters, buffers) is left
out. The figures need no allocator, so they are exact on CPU, CUDA, meta and fake tensors alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memengine.memory.ledger import Block, Ledger, blocks_of, owned_by, tensors_in

__all__ = ['SavedBytes', 'count_kept', 'hidden_bytes', 'saved_bytes']


def _blocks(tensor: Tensor, ledgers: Iterable[Ledger]) -> list[Block]:
    """The memory behind a saved tensor, of which the ledgers know whether a model owns it: sharding
    gathers parameters after a meter was entered, into memory that was not the model's then."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter):
        for ledger in ledgers:
            ledger.see_parameter(base)
    return list(blocks_of(tensor))


class _Kept:
    """What autograd holds in place of a saved tensor; its end is the end of the saving.

    The tensor is detached, as a saved output would otherwise hold its own graph in a cycle that
    no collector sees. The version is checked because autograd leaves that to the hooks.
    """

    __slots__ = ('holdings', 'tensor', 'version')

    def __init__(self, tensor: Tensor, ledgers: tuple[Ledger, ...]) -> None:
        self.holdings: list[tuple[deque[tuple[int, ...]], tuple[int, ...]]] = []
        self.tensor, self.version = tensor.detach(), tensor._version
        blocks = _blocks(tensor, ledgers)
        for ledger in ledgers:
            self.holdings.append((ledger.freed, ledger.hold(blocks)))

    def unpack(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                'one of the variables needed for gradient computation has been modified by an '
                f'inplace operation: {self.tensor.type()} of shape {tuple(self.tensor.shape)} is '
                f'at version {self.tensor._version}; expected version {self.version} instead'
            )
        return self.tensor

    def __del__(self) -> None:
        for freed, keys in getattr(self, 'holdings', ()):  # not there when tracing broke off
            freed.append(keys)


def _count(ledgers: Iterable[Ledger], owner: Any, blocks: list[Block]) -> None:
    for ledger in ledgers:
        ledger.hold_with(owner, blocks)


class _Watch:
    """Somebody else's pack hook, with what it keeps counted.

    Where it keeps a tensor is its own affair, so the tensor counts until it is freed. Attributes
    are those of the hook: activation checkpointing marks its own hooks by attributes.
    """

    def __init__(self, pack: Callable[[Tensor], Any], ledgers: tuple[Ledger, ...]) -> None:
        self._pack, self._ledgers = pack, ledgers

    def __call__(self, tensor: Tensor) -> Any:
        try:
            packed = self._pack(tensor)
        except Exception:  # checkpointing ends its recomputation so, keeping the tensor's memory
            for block in blocks_of(tensor):
                self._count(block.owner, [block])
            raise
        for kept in tensors_in(packed):
            self._count(kept, _blocks(kept, self._ledgers))
        return packed

    def _count(self, owner: Any, blocks: list[Block]) -> None:
        _count(self._ledgers, owner, blocks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__['_pack'], name)


class _Pack:
    """The pack hook of the meters that are active."""

    def __init__(self, ledgers: tuple[Ledger, ...]) -> None:
        self._ledgers = ledgers

    def __call__(self, tensor: Tensor) -> _Kept:
        return _Kept(tensor, self._ledgers)


_active: list[Ledger] = []  # of the meters that are entered, outermost first
_enter_hooks = saved_tensors_hooks.__enter__


def _enter_watched(hooks: saved_tensors_hooks) -> None:
    """``saved_tensors_hooks.__enter__`` while a meter is active: only the innermost hooks see a
    tensor, so those entered inside a meter are watched by it."""
    pack = hooks.pack_hook
    hooks.pack_hook = _Watch(pack, tuple(_active))
    try:
        _enter_hooks(hooks)
    finally:
        hooks.pack_hook = pack


def _surrounding_hooks() -> tuple[Callable, Callable] | None:
    """The hooks in force here, if they are not a meter's (None also before torch 2.8)."""
    top = getattr(torch._C._autograd, '_top_saved_tensors_default_hooks', lambda _: None)(False)
    return None if top is None or isinstance(top[0], _Pack) else top


class SavedBytes:
    """Counts the bytes that autograd keeps for backward while it is entered.

    The step itself is unchanged: the very tensors come back (double backward works), a tensor
    modified in place is still an error, other saved-tensor hooks (activation checkpointing,
    offloading, compression) still act, and what these keep is counted in place of what they were
    given. Graphs built inside stay counted after the exit, until they are freed. Meters nest;
    each sees everything. One that is entered again goes on from its figures.

    Not seen: tensors that a ``torch.autograd.Function`` hides as attributes of ``ctx`` (see
    ``hidden_bytes``). ``torch.func`` transforms refuse to run under any saved-tensor hooks.

    Args:
        *exclude: Modules whose parameters and buffers, and tensors whose memory, are not counted:
            usually the model, and the batch where a function of its size is wanted.

    Raises:
        TypeError: For anything else in ``exclude``.

    Cost: some microseconds per saved tensor, no memory that grows with its size.

    Example:
        >>> with SavedBytes(model) as saved:
        ...     model(images).sum().backward()
        >>> saved.peak_bytes
    """

    def __init__(self, *exclude: nn.Module | Tensor) -> None:
        self._exclude = exclude
        self._ledger = Ledger()
        self._entered: list[saved_tensors_hooks] = []
        owned_by(exclude)  # complains here, where the mistake is

    @property
    def live_bytes(self) -> int:
        """Bytes kept by graphs that are alive now."""
        return self._ledger.figures()[0]

    @property
    def peak_bytes(self) -> int:
        """The most bytes kept at once."""
        return self._ledger.figures()[1]

    @property
    def total_bytes(self) -> int:
        """All bytes ever kept; a block that is freed and kept again counts again."""
        return self._ledger.figures()[2]

    def __enter__(self) -> SavedBytes:
        self._ledger.exclude(self._exclude)
        around = _surrounding_hooks()
        if not _active:
            saved_tensors_hooks.__enter__ = _enter_watched  # type: ignore[method-assign]
        _active.append(self._ledger)
        ledgers = tuple(dict.fromkeys(_active))
        if around is None:
            hooks = saved_tensors_hooks(_Pack(ledgers), _Kept.unpack)
        else:
            hooks = saved_tensors_hooks(_Watch(around[0], ledgers), around[1])
        _enter_hooks(hooks)
        self._entered.append(hooks)
        return self

    def __exit__(self, *exception: object) -> None:
        self._entered.pop().__exit__(*exception)
        _active.reverse()
        _active.remove(self._ledger)  # the innermost of its entries
        _active.reverse()
        if not _active:
            saved_tensors_hooks.__enter__ = _enter_hooks  # type: ignore[method-assign]
        if not self._entered:
            self._ledger.exclude(())

    def hidden_bytes(self, outputs: Tensor | Iterable[Tensor]) -> int:
        """As the function ``hidden_bytes``, without what this meter has counted or excludes."""
        known = self._ledger.known() | set(owned_by(self._exclude))
        return _hidden_bytes(outputs, known)


def count_kept(value: Any) -> None:
    """Count on the active meters what now stands in for tensors that were packed before.

    For hooks that decide only after packing what they keep. What they packed counts until it is
    freed.

    Args:
        value: Holds tensors, in containers or attributes. Each counts until it is freed.
    """
    for kept in tensors_in(value) if _active else ():
        _count(dict.fromkeys(_active), kept, list(blocks_of(kept)))


def hidden_bytes(outputs: Tensor | Iterable[Tensor], *exclude: nn.Module | Tensor) -> int:
    """Bytes that custom autograd functions keep as attributes of ``ctx``.

    Saved-tensor hooks do not see them, and autograd does not free them after backward: they live
    as long as the graph.

    Args:
        outputs: Tensors whose graph is searched, e.g. the loss, before or after backward.
        *exclude: Modules and tensors whose memory is not counted.

    Returns:
        Bytes of the unique storages found.
    """
    return _hidden_bytes(outputs, set(owned_by(exclude)))


def _hidden_bytes(outputs: Tensor | Iterable[Tensor], known: set[int]) -> int:
    tensors = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    pending = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(pending)  # holds the nodes, so that each keeps its one Python object
    nbytes: dict[int, int] = {}
    while pending:
        node = pending.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            for tensor in tensors_in(vars(node)):
                nbytes |= {block.key: block.nbytes for block in blocks_of(tensor)}
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return sum(size for key, size in nbytes.items() if key not in known)


def saved_bytes(fn: Callable[[], Any], *exclude: nn.Module | Tensor) -> int:
    """Most bytes that autograd keeps at once while ``fn()`` runs.

    Args:
        fn: Runs a forward pass, with or without its backward. What it returns is held until the
            end of the count.
        *exclude: Modules and tensors whose memory is not counted.

    Returns:
        ``SavedBytes.peak_bytes``.
    """
    with SavedBytes(*exclude) as meter:
        held = fn()
    del held
    return meter.peak_bytes
