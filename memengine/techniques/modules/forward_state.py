"""What a forward starts from, so that it can be run again just as it ran.

That is what its module holds, and random state: dropout, drop-path and masking draw from the
generators of torch (one per device), from Python's or from NumPy's.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from memengine._torch_private.autograd import version_of
from memengine._torch_private.modules import BatchOrInstanceNorm, own_buffers, own_parameters
from memengine._torch_private.ops import draw_from_known_generators_when_compiled
from memengine.techniques.modules.private_random import generators
from memengine.techniques.modules.saved_tensors import is_plain
from memengine.techniques.modules.tables import (
    CONTAINERS,
    ScriptedTable,
    Table,
    holds_tensor,
    tables_of,
    tables_of_object,
)

_MOST_ELEMENTS = 2**16  # of a buffer that is copied
_STANDARD_ATTRIBUTES = frozenset(vars(nn.Module()))  # hooks, parameters, submodules


class Change(NamedTuple):
    """An entry of a module's table that is another one at a later moment."""

    table: Table
    name: Any
    then: Any
    later: Any

    @property
    def place(self) -> tuple[int, Any]:
        """Which entry of which table it is."""
        return id(self.table.table), self.name

    @property
    def module(self) -> str:
        """The module's name."""
        return self.table.path

    @property
    def path(self) -> str:
        """What the entry is called in errors."""
        return self.table.path_of(self.name)

    @property
    def has_graph(self) -> bool:
        """Whether the entry now is a tensor with a graph."""
        now = self.table.now().get(self.name)
        return isinstance(now, Tensor) and now.grad_fn is not None

    def undo(self) -> None:
        """Make the entry what it was then."""
        self.table.put(self.name, self.then)

    def redo(self) -> None:
        """Make the entry what it was later."""
        self.table.put(self.name, self.later)


class ModuleState:
    """Parameters, buffers and attributes of a module, and of all inside it, at one moment.

    Attributes are modes, rates of dropout, a weight that a hook has computed, and so on, with what
    dicts, lists, deques and sets among them hold, and such in these. Nothing is copied: what is
    replaced afterwards can be put back, a tensor that is written to is named. Left out are
    statistics that a norm layer only counts, sharded parameters, which ``fully_shard`` swaps
    itself, and DDP's own books.

    Args:
        module: The module.
        given: What its forward is given. Of objects, whose attributes a forward may set and the
            next one reads, these are held likewise, and what is in them.

    Cost: some 10 microseconds and 2 kB for each module inside.
    """

    def __init__(self, module: nn.Module, given: Iterable[Any] = ()) -> None:
        self._tables: list[Table] = []
        self._attributes: list[Table] = []  # of these, all but parameters and buffers
        seen: set[int] = set()
        for path, inner in module.named_modules():
            if isinstance(inner, DistributedDataParallel):
                continue
            if isinstance(inner, torch.jit.ScriptModule):
                self._tables.append(ScriptedTable(path, inner))
                continue
            self._tables.append(Table(path, own_parameters(inner)))
            self._attributes.append(Table(path, vars(inner)))
            if not (isinstance(inner, BatchOrInstanceNorm) and inner.training):
                self._tables.append(Table(path, own_buffers(inner)))
            for name, value in vars(inner).items():
                if name not in _STANDARD_ATTRIBUTES and isinstance(value, CONTAINERS):
                    self._attributes += tables_of(path, value, name, seen)
        self._given = [table for one in given for table in tables_of_object(one, seen)]
        self._tables += [*self._attributes, *self._given]
        self._versions = [
            (table, name, tensor, version_of(tensor))
            for table in self._tables
            for name, tensor in table.tensors()
        ]

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that are held, one by one."""
        return (tensor for _, _, tensor, _ in self._versions)

    def written_to(self) -> str | None:
        """The name of a tensor that was written to since, if there is one."""
        for table, name, tensor, version in self._versions:
            if version_of(tensor) != version and not isinstance(tensor, DTensor):
                return table.path_of(name)
        return None

    def forget_replaced_outputs(self) -> None:
        """Let go of results of an earlier step, with their graphs, that the forward replaced."""
        for entry in list(self._versions):
            table, name, tensor, _ = entry
            is_held = tensor.grad_fn is not None and table.held.get(name) is tensor
            if is_held and table.now().get(name) is not tensor and table not in self._given:
                self._versions.remove(entry)
                table.forget(name)

    def forget_results(self) -> None:
        """Let go of tensors, and what holds any, that are no parameters or buffers; leave them.

        They are what earlier forwards have kept, as a rule, and the next one replaces.
        """
        for table in self._attributes:
            for name in table.held.keys() - _STANDARD_ATTRIBUTES:
                if holds_tensor(table.held[name]):
                    table.forget(name)
        self._versions = [entry for entry in self._versions if entry[1] in entry[0].held]

    def changes(self, later: ModuleState | None = None) -> list[Change]:
        """Entries that are others in a later state of the same module, or at present."""
        known = {} if later is None else {id(table.table): table.held for table in later._tables}
        return [
            Change(table, *change)
            for table in self._tables
            for change in table.changes(
                table.now() if later is None else known.get(id(table.table), table.held)
            )
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run a block with everything as it was; then all is as it is now."""
        now = [type(table)('', table.table) for table in self._tables]
        for change in self.changes():
            change.undo()
        try:
            yield
        finally:
            for table in now:
                for name, then, _ in list(table.changes(table.now())):
                    table.put(name, then)


class SmallBuffers:
    """Small buffers of a module as they are now, for a forward that writes to them in silence.

    ``F.batch_norm`` and fused observers of quantisation write to numbers, one for each channel as a
    rule, without counting a version. Left out are those of norm layers, which only count, and those
    that DDP sends to all ranks when a forward begins.

    Cost: a copy of buffers of at most one dimension, by a single operation for each of their types.
    """

    def __init__(self, module: nn.Module) -> None:
        buffers: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
        self._entries: list[tuple[dict[str, Tensor | None], str, Tensor, int]] = []
        ddp = (x for x in module.modules() if isinstance(x, DistributedDataParallel))
        sent = {id(b) for x in ddp if x.broadcast_buffers for b in x.buffers()}
        for layer in module.modules():
            if isinstance(layer, BatchOrInstanceNorm):
                continue
            table = own_buffers(layer)
            for name, buffer in table.items():
                if buffer is None or id(buffer) in sent or not _may_be_statistics(buffer):
                    continue
                buffers.setdefault((buffer.device, buffer.dtype), {})[id(buffer)] = buffer
                self._entries.append((table, name, buffer, version_of(buffer)))
        self._copied = [
            (found, torch.cat([buffer.reshape(-1) for buffer in found.values()]))
            for found in buffers.values()
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run a forward from their values, which counts into copies of them.

        One that was written to aloud since then stays: what is done once is not done again.
        """
        copies: dict[int, Tensor] = {}
        for found, values in self._copied:
            parts = values.clone().split([buffer.numel() for buffer in found.values()])
            for (key, buffer), part in zip(found.items(), parts, strict=True):
                copies[key] = part.view(buffer.shape).data  # with a version of its own
        now = [
            (table, name, _entry(table, name), copies[id(buffer)])
            for table, name, buffer, version in self._entries
            if version_of(buffer) == version
        ]
        for table, name, _, copy in now:
            table[name] = copy
        try:
            yield
        finally:
            for table, name, present, copy in now:
                if _entry(table, name) is copy:
                    table[name] = present


def _entry(table: dict[str, Tensor | None], name: str) -> Tensor | None:
    return dict(table.items()).get(name)  # TorchScript's tables have no get()


def _may_be_statistics(buffer: Tensor) -> bool:
    is_small = buffer.dim() <= 1 and buffer.numel() <= _MOST_ELEMENTS
    return is_small and not buffer.requires_grad and is_plain(buffer)


def computing_device(tensor: Tensor) -> torch.device:
    """Where a tensor is computed with: where it lies, or the ranks' device for offloaded shards."""
    kind = tensor.device.type
    if kind == 'cpu' and isinstance(tensor, DTensor):
        kind = tensor.device_mesh.device_type
    if kind == tensor.device.type:
        return tensor.device
    return torch.device(kind, torch.get_device_module(kind).current_device())


def accelerators_of(module: nn.Module, tensors: Iterable[Tensor] = ()) -> tuple[torch.device, ...]:
    """The devices other than the CPU that compute with the module's parameters, its buffers or
    tensors."""
    devices = {*map(computing_device, chain(module.parameters(), module.buffers(), tensors))}
    return tuple(sorted((d for d in devices if d.type not in ('cpu', 'meta')), key=str))


def own_generators(module: nn.Module) -> list[torch.Generator]:
    """The generators that a module and those inside it hold as attributes."""
    held = (value for part in module.modules() for value in vars(part).values())
    return [value for value in held if _is_generator(value.__class__)]


@lru_cache(maxsize=1024)
def _is_generator(kind: Any) -> bool:
    return issubclass(kind, torch.Generator)  # which torch answers in Python


class RandomState:
    """What the generators of the CPU and of some accelerators held at one moment.

    Args:
        devices: Accelerators in use; see :func:`accelerators_of`.
        generators: More generators, which modules have for themselves; see :meth:`of`.

    Cost: some 30 kB and under 100 microseconds, without a synchronisation of any device.

    Example:
        >>> state = RandomState()
        >>> first = dropout(x)
        >>> with state.replay():
        ...     again = dropout(x)  # the same mask; generators then go on as if this were not
    """

    def __init__(
        self, devices: Iterable[torch.device] = (), generators: Iterable[torch.Generator] = ()
    ) -> None:
        draw_from_known_generators_when_compiled()
        self._devices, self._generators = tuple(devices), tuple(generators)
        self._own = [generator.get_state() for generator in self._generators]
        self._cpu = torch.get_rng_state()
        self._accelerators = [
            torch.get_device_module(d).get_rng_state(*_device_argument(d)) for d in self._devices
        ]
        self._python = random.getstate()
        numpy = _numpy()
        self._numpy = None if numpy is None else numpy.random.get_state()

    @classmethod
    def of(cls, module: nn.Module, tensors: Iterable[Tensor] = ()) -> RandomState:
        """That of all generators that a module may draw from, those of its own included."""
        return cls(accelerators_of(module, tensors), own_generators(module))

    def state_dict(self) -> dict[str, Any]:
        """All but modules' own generators, as tensors, arrays and plain values to be saved."""
        return dict(
            cpu=self._cpu, accelerators=self._accelerators, python=self._python, numpy=self._numpy
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what :meth:`state_dict` gave, for as many accelerators."""
        self._cpu, self._accelerators = state['cpu'], state['accelerators']
        self._python, self._numpy = state['python'], state['numpy']

    def restore(self) -> None:
        """Set all generators back to this state."""
        torch.set_rng_state(self._cpu)
        for device, state in zip(self._devices, self._accelerators, strict=True):
            torch.get_device_module(device).set_rng_state(state, *_device_argument(device))
        for generator, state in zip(self._generators, self._own, strict=True):
            generator.set_state(state)
        random.setstate(self._python)
        if self._numpy is not None:
            _numpy().random.set_state(self._numpy)

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Run a block from this state; afterwards the generators go on as if it had not run."""
        now = RandomState(self._devices, self._generators)
        self.restore()
        try:
            yield
        finally:
            now.restore()

    def unchanged(self) -> bool:
        """Whether nothing has been drawn since (and nothing reseeded)."""
        now = RandomState(self._devices, self._generators)
        return (
            torch.equal(self._cpu, now._cpu)
            and all(map(torch.equal, self._accelerators, now._accelerators))
            and all(map(torch.equal, self._own, now._own))
            and self._python == now._python
            and _comparable(self._numpy) == _comparable(now._numpy)
        )


def _device_argument(device: torch.device) -> tuple[torch.device, ...]:
    """The argument that names the device: Apple's backend has a single one and takes none."""
    return () if device.type == 'mps' else (device,)


def _numpy() -> Any:
    """NumPy where somebody has imported it; otherwise nobody has drawn from it."""
    return sys.modules.get('numpy')


def _comparable(state: Any) -> Any:
    """NumPy's state in a form that compares as a whole."""
    return None if state is None else (state[0], state[1].tobytes(), *state[2:])


class PrivateRandomState:
    """What the private generators held at one moment, for a step that is undone."""

    def __init__(self) -> None:
        self._states = {
            device: (seed, generator.get_state())
            for device, (seed, generator) in generators.items()
        }

    def restore(self) -> None:
        """Set all of them back to this state."""
        for device in generators.keys() - self._states.keys():
            del generators[device]
        for device, (seed, state) in self._states.items():
            generator = torch.Generator(device)
            generator.set_state(state)
            generators[device] = (seed, generator)
