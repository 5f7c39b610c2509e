"""The books of the meter: pieces of memory, and how many holders each has."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from memengine._torch_private.autograd import storage_key
from memengine._torch_private.modules import own_buffers, own_modules, own_parameters
from memengine._torch_private.ops import is_traceable_wrapper_subclass, parts_of_sparse

_opaque_keys = itertools.count(-1, -1)  # never an address
_OF_ONE_STORAGE = frozenset((Tensor, nn.Parameter))  # where they are strided
_HOLD_NOTHING = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size)
)


class Block:
    """A piece of memory: its key, its bytes and the object whose end is the memory's end."""

    __slots__ = ('key', 'nbytes', 'owner')

    def __init__(self, key: int, nbytes: int, owner: Any) -> None:
        self.key, self.nbytes, self.owner = key, nbytes, owner


def blocks_of(tensor: Tensor) -> Iterator[Block]:
    """The memory behind a tensor: one storage, or those of the parts of a composite tensor."""
    # Most are none of these, which takes longer to find out than of what class they are.
    if type(tensor) not in _OF_ONE_STORAGE and hasattr(tensor, '__tensor_flatten__'):  # a DTensor
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, Tensor):  # of a DTensor also its mesh is named
                yield from blocks_of(part)
    elif tensor.layout == torch.strided:
        storage = tensor.untyped_storage()
        yield Block(storage_key(storage), storage.nbytes(), storage)
    elif parts := parts_of_sparse(tensor):
        for part in parts:
            yield from blocks_of(part)
    else:  # a layout without a storage (MKLDNN): nothing shares its memory
        yield Block(next(_opaque_keys), tensor.numel() * tensor.element_size(), tensor)


def parts_of(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors that hold a tensor's values on this rank."""
    if is_traceable_wrapper_subclass(tensor):  # sharded, or an optimiser's state in few bits
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts_of(getattr(tensor, name))
    elif isinstance(tensor, Tensor):  # a shard names its mesh, too
        yield tensor


def key_of(tensor: Tensor) -> int | None:
    """The key of a plain tensor's one block; None of others."""
    if type(tensor) in _OF_ONE_STORAGE and tensor.layout is torch.strided:
        return storage_key(tensor.untyped_storage())
    return None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in containers and in the attributes of plain objects; modules are not entered."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        item = pending.pop()
        if type(item) in _HOLD_NOTHING or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, Mapping):
            pending.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset, deque)):
            pending.extend(item)
        elif not isinstance(item, (nn.Module, type)) and not callable(item):
            pending.extend(getattr(item, '__dict__', {}).values())
            pending.extend(getattr(item, slot, None) for slot in _slots_of(item.__class__))


@functools.cache
def _slots_of(kind: Any) -> tuple[str, ...]:
    return tuple(itertools.chain(*(getattr(c, '__slots__', ()) for c in kind.__mro__)))


def owned_by(owners: Iterable[nn.Module | Tensor]) -> dict[int, Any]:
    """Storages of the owners' parameters, buffers or own data; held, so that no key is reused."""
    owned: dict[int, Any] = {}
    for owner in owners:
        if isinstance(owner, nn.Module):
            tensors = _tensors_of(owner)
        elif isinstance(owner, Tensor):
            tensors = [owner]
        else:
            raise TypeError(
                f'exclude: expected modules or tensors, got {type(owner).__name__}; '
                'pass the model whose parameters are not to be counted'
            )
        for tensor in tensors:
            if (key := key_of(tensor)) is not None:
                owned[key] = tensor.untyped_storage()
            else:
                owned.update((block.key, block.owner) for block in blocks_of(tensor))
    return owned


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers, without their names, which take longer than they do.

    Those of lazy modules have no storage before their first forward.
    """
    tensors: list[Tensor | None] = []
    seen = {module}
    pending = [module]
    while pending:
        one = pending.pop()
        tensors.extend(own_parameters(one).values())
        tensors.extend(own_buffers(one).values())
        for child in own_modules(one).values():
            if child is not None and child not in seen:
                seen.add(child)
                pending.append(child)
    return [tensor for tensor in tensors if tensor is not None and not is_lazy(tensor)]


class Ledger:
    """Which blocks are kept, by how many holders.

    Holders end in finalisers, which run in any thread and in the middle of anything. They
    therefore only append to ``freed`` (atomic); the books are balanced before each entry and
    reading.
    """

    def __init__(self) -> None:
        self.freed: deque[tuple[int, ...]] = deque()
        self.excluded: dict[int, Any] = {}
        self._owners: tuple[nn.Module | Tensor, ...] = ()
        self._lock = threading.Lock()
        self._holders: dict[int, int] = {}
        self._nbytes: dict[int, int] = {}
        self._live = self._peak = self._total = 0

    def exclude(self, owners: tuple[nn.Module | Tensor, ...]) -> None:
        """Leave out from now on what the owners have, and nothing else."""
        self._owners, self.excluded = owners, owned_by(owners)

    def refresh_owners(self, parameter: nn.Parameter) -> None:
        """Look again at what the owners have if this is not known to be theirs."""
        if self._owners and any(b.key not in self.excluded for b in blocks_of(parameter)):
            self.excluded.update(owned_by(self._owners))

    def _release_freed(self) -> None:
        while self.freed:
            for key in self.freed.popleft():
                self._holders[key] -= 1
                if not self._holders[key]:
                    del self._holders[key]
                    self._live -= self._nbytes.pop(key)

    def count(self, blocks: Iterable[Block]) -> tuple[int, ...]:
        """Count the blocks; their holder appends the returned keys to ``freed`` at its end."""
        with self._lock:
            if self.freed:
                self._release_freed()
            held = []
            for block in blocks:
                key = block.key
                if key in self.excluded:
                    continue
                holders = self._holders.get(key, 0)
                if not holders:
                    self._nbytes[key] = block.nbytes
                    self._live += block.nbytes
                    self._total += block.nbytes
                    self._peak = max(self._peak, self._live)
                self._holders[key] = holders + 1
                held.append(key)
            return tuple(held)

    def count_until_freed(self, owner: Any, blocks: Iterable[Block]) -> None:
        """Count the blocks until ``owner`` is freed, whoever holds it."""
        weakref.finalize(owner, self.freed.append, self.count(blocks)).atexit = False

    def figures(self) -> tuple[int, int, int]:
        """Live, peak and total bytes."""
        with self._lock:
            self._release_freed()
            return self._live, self._peak, self._total

    def known_keys(self) -> set[int]:
        """Keys of all blocks that are counted now or excluded."""
        with self._lock:
            self._release_freed()
            return {*self._holders, *self.excluded}
