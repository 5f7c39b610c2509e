"""What a module's tables hold: parameters, buffers, attributes, and containers among these."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memengine._torch_private.modules import scripted_attributes
from memengine._torch_private.ops import pytree

CONTAINERS = (dict, list, deque, set)  # that a forward may keep something in
_MOST_NESTED = 3  # objects within each other: a cache, its layers, what these hold
_NO_PLAIN_OBJECTS = (Tensor, nn.Module, type, ModuleType, FunctionType, MethodType)
_ABSENT: Any = object()  # in place of a value: there is no such entry


def holds_tensor(value: Any) -> bool:
    """Whether it is one or a container of some; pytree takes ten times as long to tell."""
    if isinstance(value, dict):
        value = tuple(value.values())
    is_one = isinstance(value, Tensor)
    return any(map(holds_tensor, value)) if isinstance(value, (tuple, *CONTAINERS)) else is_one


class Table:
    """What one of a module's tables holds (its parameters, buffers, attributes, a dict of its own).

    Attributes:
        path: The module's name.
        table: The table itself.
        attribute: Which of the module's it is, where it is one of its own.
        held: The entries at the time.
    """

    def __init__(self, path: str, table: Any, attribute: str = '') -> None:
        self.path, self.table, self.attribute = path, table, attribute
        self.held = dict(self.now())
        self._ignored: set[Any] = set()

    def path_of(self, name: Any) -> str:
        """What an entry is called in errors."""
        return '.'.join(filter(None, (self.path, self.attribute, str(name))))

    def now(self) -> dict[Any, Any]:
        """The entries at present; a dict's is the table itself."""
        entries: dict[Any, Any] = self.table
        return entries

    def forget(self, name: Any) -> None:
        """Hold an entry no longer; it is left as it is."""
        del self.held[name]
        self._ignored.add(name)

    def put(self, name: Any, value: Any) -> None:
        """Set an entry, or remove it."""
        if value is _ABSENT:
            self.table.pop(name, None)
        else:
            self.table[name] = value

    def same(self, one: Any, other: Any) -> bool:
        """Whether two values of an entry are the same object; of sharded ones nobody asks."""
        return one is other or isinstance(one, DTensor) or isinstance(other, DTensor)

    def entries(self) -> Iterable[Any]:
        """What is held."""
        return self.held.values()

    def tensors(self) -> Iterator[tuple[Any, Tensor]]:
        """The tensors that are held, by name."""
        for name, value in self.held.items():
            if isinstance(value, Tensor) and not value.is_inference():
                yield name, value

    def changes(self, later: dict[Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
        """Entries that are other ones later: name, what was held, what is."""
        missing = 0
        for name, then in self.held.items():
            now = later.get(name, _ABSENT)
            missing += now is _ABSENT
            if now is not then and name != 'forward' and not self.same(then, now):
                yield name, then, now
        if len(later) + missing > len(self.held):
            for name in later.keys() - self.held.keys() - self._ignored - {'forward'}:
                yield name, _ABSENT, later[name]


class _ListTable(Table):
    """The same of a list, whose one entry is all that is in it."""

    def now(self) -> dict[Any, Any]:
        return {'': list(self.table)}

    def put(self, name: Any, value: Any) -> None:
        self.table[:] = value

    def same(self, one: Any, other: Any) -> bool:
        return len(one) == len(other) and all(map(super().same, one, other))

    def entries(self) -> Iterable[Any]:
        held: Iterable[Any] = self.held['']
        return held

    def tensors(self) -> Iterator[tuple[Any, Tensor]]:
        for number, value in enumerate(self.entries()):
            if isinstance(value, Tensor) and not value.is_inference():
                yield number, value


class _DequeTable(_ListTable):
    def put(self, name: Any, value: Any) -> None:
        self.table.clear()
        self.table.extend(value)


class _SetTable(_ListTable):
    def now(self) -> dict[Any, Any]:
        return {'': set(self.table)}

    def put(self, name: Any, value: Any) -> None:
        self.table.clear()
        self.table.update(value)

    def same(self, one: Any, other: Any) -> bool:
        return bool(one == other)


class _SlotTable(Table):
    """Of an object whose class states ``__slots__``."""

    def now(self) -> dict[Any, Any]:
        names = _slots_of(self.table.__class__)
        return {name: getattr(self.table, name) for name in names if hasattr(self.table, name)}

    def put(self, name: Any, value: Any) -> None:
        if value is _ABSENT:
            object.__delattr__(self.table, name)
        else:
            object.__setattr__(self.table, name, value)


@lru_cache(maxsize=1024)
def _slots_of(kind: Any) -> tuple[str, ...]:
    bases = (vars(base) for base in kind.__mro__ if '__slots__' in vars(base))
    return tuple(
        name
        for members in bases
        for name, member in members.items()
        if isinstance(member, MemberDescriptorType) and not name.startswith('__')
    )


class ScriptedTable(Table):
    """Of a module of TorchScript: its parameters, buffers and attributes, the mode among them."""

    def now(self) -> dict[Any, Any]:
        """The entries at present."""
        return {name: getattr(self.table, name) for name in scripted_attributes(self.table)}

    def put(self, name: Any, value: Any) -> None:
        """Set an entry; none can be removed."""
        setattr(self.table, name, value)

    def same(self, one: Any, other: Any) -> bool:
        """Whether two values are the same; what is no tensor is made anew when it is asked for."""
        pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=False)
        return pytree.tree_structure(one) == pytree.tree_structure(other) and all(
            super(ScriptedTable, self).same(x, y) or (isinstance(x, (int, float, str)) and x == y)
            for x, y in pairs
        )


def tables_of(path: str, value: Any, attribute: str, seen: set[int]) -> Iterator[Table]:
    """Tables of a container, and of those in it.

    Args:
        path: The module's name.
        value: The container.
        attribute: The module's that it is, or is in.
        seen: Containers so far, by id: one may be in itself.
    """
    if id(value) in seen:
        return
    seen.add(id(value))
    for kind, table in _TABLES.items():
        if isinstance(value, kind):
            yield table(path, value, attribute)
    entries = value.values() if isinstance(value, dict) else value
    if any(issubclass(kind, CONTAINERS) for kind in {*map(type, entries)}):
        for entry in entries:
            if isinstance(entry, CONTAINERS):
                yield from tables_of(path, entry, attribute, seen)


def tables_of_object(value: Any, seen: set[int], depth: int = _MOST_NESTED) -> Iterator[Table]:
    """Tables of an object's attributes, and of containers and further objects in these.

    Args:
        value: Anything; of what is no plain object (tensors, modules, functions) nothing is said.
        seen: Objects and containers so far, by id.
        depth: Of objects within each other that are looked into.
    """
    if not depth or id(value) in seen or isinstance(value, _NO_PLAIN_OBJECTS):
        return
    path = type(value).__name__
    tables = [Table(path, vars(value))] if hasattr(value, '__dict__') else []
    if _slots_of(value.__class__):
        tables.append(_SlotTable(path, value))
    if not tables:
        return
    seen.add(id(value))
    for table in list(tables):
        for name, entry in table.held.items():
            if isinstance(entry, CONTAINERS):
                tables += tables_of(path, entry, name, seen)
    for table in tables:
        yield table
        for entry in table.entries():
            yield from tables_of_object(entry, seen, depth - 1)


_TABLES: dict[type, type[Table]] = {
    dict: Table, list: _ListTable, deque: _DequeTable, set: _SetTable
}  # fmt: skip
