"""How many bytes autograd keeps for the backward pass, counted on any device.

Counted are storages, as they are what occupies memory: a view, or a tensor that several
operations save, costs its storage once. What a model owns anyway (parameters, buffers) is left
out. The figures need no allocator, so they are exact on CPU, CUDA, meta and fake tensors alike.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memengine._torch_private.autograd import (
    SavedTensorHooks,
    base_of,
    check_unmodified,
    saved_tensor_hooks_in_force,
    version_of,
)
from memengine.memory.ledger import Block, Ledger, blocks_of, key_of, owned_by, tensors_in


def _owned_blocks(tensor: Tensor, ledgers: Iterable[Ledger]) -> list[Block]:
    """The memory behind a saved tensor, of which the ledgers know whether a model owns it: sharding
    gathers parameters after a meter was entered, into memory that was not the model's then."""
    whole = base_of(tensor)
    base = tensor if whole is None else whole
    if type(base) is not Tensor and isinstance(base, nn.Parameter):
        for ledger in ledgers:
            ledger.refresh_owners(base)
    return list(blocks_of(tensor))


class _KeptTensor:
    """What autograd holds in place of a saved tensor.

    A tensor with a graph is detached, as a saved output would otherwise hold its own in a cycle
    that no collector sees. The version is checked because autograd leaves that to the hooks.
    """

    __slots__ = ('tensor', 'version')

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = version_of(tensor)

    def unpack(self) -> Tensor:
        if version_of(self.tensor) != self.version:
            check_unmodified(self.tensor, self.version)  # which raises
        return self.tensor


class _CountedTensor(_KeptTensor):
    """One that counts; its end is the end of the saving."""

    __slots__ = ('holdings',)

    def __init__(self, tensor: Tensor, ledgers: tuple[Ledger, ...]) -> None:
        self.holdings: list[tuple[deque[tuple[int, ...]], tuple[int, ...]]] = []
        super().__init__(tensor)
        blocks = _owned_blocks(tensor, ledgers)
        for ledger in ledgers:
            self.holdings.append((ledger.freed, ledger.count(blocks)))

    def __del__(self) -> None:
        for freed, keys in getattr(self, 'holdings', ()):  # not there when tracing broke off
            freed.append(keys)


def _count_blocks(ledgers: Iterable[Ledger], owner: Any, blocks: list[Block]) -> None:
    for ledger in ledgers:
        ledger.count_until_freed(owner, blocks)


class _OthersHook:
    """Somebody else's pack hook, with what it keeps counted.

    Where it keeps a tensor is its own affair, so the tensor counts until it is freed. Attributes
    are those of the hook: activation checkpointing marks its own hooks by attributes, and is known
    by their module.
    """

    def __init__(self, pack: Callable[[Tensor], Any], ledgers: tuple[Ledger, ...]) -> None:
        self.pack, self.ledgers = pack, ledgers
        self.__module__ = pack.__module__

    def __call__(self, tensor: Tensor) -> Any:
        try:
            packed = self.pack(tensor)
        except Exception:  # checkpointing ends its recomputation so, keeping the tensor's memory
            for block in blocks_of(tensor):
                _count_blocks(self.ledgers, block.owner, [block])
            raise
        for kept in tensors_in(packed):
            _count_blocks(self.ledgers, kept, _owned_blocks(kept, self.ledgers))
        return packed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__['pack'], name)


class _CountingHook:
    """The pack hook of meters that are entered where no other hooks are in force."""

    def __init__(self, ledgers: tuple[Ledger, ...]) -> None:
        self.ledgers = ledgers

    def __call__(self, tensor: Tensor) -> _KeptTensor:
        key = key_of(tensor)
        for ledger in self.ledgers:
            if key not in ledger.excluded:
                return _CountedTensor(tensor, self.ledgers)
        return _KeptTensor(tensor)  # a weight, as half of what is saved


def _ledgers_of(hooks: SavedTensorHooks | None) -> tuple[Ledger, ...]:
    """The ledgers of the meters in these hooks, outermost first."""
    return hooks[0].ledgers if hooks and isinstance(hooks[0], (_CountingHook, _OthersHook)) else ()


def _ledgers_in_force() -> tuple[Ledger, ...]:
    """Those of the meters that are entered around this, in this thread.

    torch keeps the hooks in force for each thread, and takes them along where a backward runs in
    threads of its own; so it knows the meters, and they need no account of threads.
    """
    return _ledgers_of(saved_tensor_hooks_in_force())


_enter_hooks = saved_tensors_hooks.__enter__


def _enter_inside_meters(hooks: saved_tensors_hooks) -> None:
    """``saved_tensors_hooks.__enter__`` while there is a meter: only the innermost hooks see a
    tensor, so those entered inside a meter are watched by it. Elsewhere nothing is changed."""
    ledgers = _ledgers_in_force()
    pack = hooks.pack_hook
    hooks.pack_hook = _OthersHook(pack, ledgers) if ledgers else pack
    try:
        _enter_hooks(hooks)
    finally:
        hooks.pack_hook = pack


_lock = threading.Lock()
_meters = 0  # that are entered, in all threads


def _add_meters(number: int) -> None:
    global _meters
    with _lock:
        _meters += number
        saved_tensors_hooks.__enter__ = (  # type: ignore[method-assign]
            _enter_inside_meters if _meters else _enter_hooks
        )


class SavedBytes:
    """Counts the bytes that autograd keeps for backward while it is entered.

    The step itself is unchanged: the very tensors come back (double backward works), a tensor
    modified in place is still an error, other saved-tensor hooks (activation checkpointing,
    offloading, compression) still act, and what these keep is counted in place of what they were
    given. Graphs built inside stay counted after the exit, until they are freed. Meters nest;
    each sees everything. One that is entered again goes on from its figures.

    Counted is what the thread that entered it does, and the backward passes that it starts.
    Not seen: tensors that a ``torch.autograd.Function`` hides as attributes of ``ctx`` (see
    ``hidden_bytes``). ``torch.func`` transforms refuse to run under any saved-tensor hooks.

    Args:
        *exclude: Modules whose parameters and buffers, and tensors whose memory, are not counted:
            usually the model, and the batch where a function of its size is wanted.
        ledger: Books of another kind, which are told what is saved.

    Raises:
        TypeError: For anything else in ``exclude``.

    Cost: some microseconds per saved tensor, no memory that grows with its size.

    Example:
        >>> with SavedBytes(model) as saved:
        ...     model(images).sum().backward()
        >>> saved.peak_bytes
    """

    def __init__(self, *exclude: nn.Module | Tensor, ledger: Ledger | None = None) -> None:
        self._exclude = exclude
        self._ledger = ledger or Ledger()
        self._entered: list[saved_tensors_hooks] = []
        # Complains here, where the mistake is; what modules own is looked for when it is entered.
        owned_by(owner for owner in exclude if not isinstance(owner, nn.Module))

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
        around = saved_tensor_hooks_in_force()
        ledgers = tuple(dict.fromkeys((*_ledgers_of(around), self._ledger)))
        if around is None or isinstance(around[0], _CountingHook):
            hooks = saved_tensors_hooks(_CountingHook(ledgers), _KeptTensor.unpack)
        else:
            pack = around[0].pack if isinstance(around[0], _OthersHook) else around[0]
            hooks = saved_tensors_hooks(_OthersHook(pack, ledgers), around[1])
        _add_meters(1)
        _enter_hooks(hooks)
        self._entered.append(hooks)
        return self

    def __exit__(self, *exception: object) -> None:
        self._entered.pop().__exit__(*exception)
        _add_meters(-1)
        if not self._entered:
            self._ledger.exclude(())

    def hidden_bytes(self, outputs: Tensor | Iterable[Tensor]) -> int:
        """As the function ``hidden_bytes``, without what this meter has counted or excludes."""
        known = self._ledger.known_keys() | set(owned_by(self._exclude))
        return _hidden_bytes(outputs, known)


def is_counting() -> bool:
    """Whether a meter is entered, in any thread."""
    return _meters > 0


def count_kept(value: Any) -> None:
    """Count on the meters around this what now stands in for tensors that were packed before.

    For hooks that decide only after packing what they keep. What they packed counts until it is
    freed.

    Args:
        value: Holds tensors, in containers or attributes. Each counts until it is freed.
    """
    ledgers = _ledgers_in_force() if _meters else ()
    for kept in tensors_in(value) if ledgers else ():
        _count_blocks(ledgers, kept, list(blocks_of(kept)))


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
