"""Capture and replay of random state, so that a forward pass can be run again exactly.

Dropout, drop-path and masking draw from the generators of torch (one per device), from Python's
or from NumPy's. A recomputed forward pass is the first one only if all of them start alike.

What is drawn to compress a tensor comes from generators of the techniques' own: dropout would else
get other numbers than in the plain step, and the forward pass would no longer be the same.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    'PrivateRandomState',
    'RandomState',
    'accelerators_of',
    'own_generators',
    'private_generator',
    'private_seed',
    'restart_private_generators',
]


def accelerators_of(module: nn.Module, tensors: Iterable[Tensor] = ()) -> tuple[torch.device, ...]:
    """The devices other than the CPU that hold the module's parameters, its buffers or tensors."""
    owned = chain(module.parameters(), module.buffers(), tensors)
    devices = {tensor.device for tensor in owned if tensor.device.type not in ('cpu', 'meta')}
    return tuple(sorted(devices, key=str))


def own_generators(module: nn.Module) -> list[torch.Generator]:
    """The generators that a module and those inside it hold as attributes."""
    held = (value for part in module.modules() for value in vars(part).values())
    return [value for value in held if isinstance(value, torch.Generator)]


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
            cpu=self._cpu,
            accelerators=self._accelerators,
            python=self._python,
            numpy=self._numpy,
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


# ------------------------------------------------------------------ of the techniques

_SEED_OFFSET = 0x9E3779B97F4A7C15  # so that a private stream is not the one of dropout
_generators: dict[torch.device, tuple[int, torch.Generator]] = {}


def private_generator(device: torch.device) -> torch.Generator:
    """The techniques' generator of a device, seeded by the seed of torch's global generator.

    It starts again whenever ``torch.initial_seed()`` has changed. The engine seeds each iteration
    by its place in the run, so a resumed run draws what the uninterrupted one would have drawn. In
    a loop that seeds once, it simply goes on.

    Args:
        device: Where the numbers are drawn, as in ``tensor.device``.

    Returns:
        A generator for ``generator=`` of torch's random functions. Do not keep it: ask again.

    Torch's global generators are neither drawn from nor set. Seeding them with the seed that they
    have already is not seen here: see :func:`restart_private_generators`. A recomputed forward pass
    (checkpointing, gradient cache) draws new numbers, and each of them is as good as the first.
    """
    seed = torch.initial_seed()
    seeded, generator = _generators.get(device, (None, None))
    if generator is None:
        generator = torch.Generator(device)
    if seeded != seed:
        generator.manual_seed(seed ^ _SEED_OFFSET)
        _generators[device] = (seed, generator)
    return generator


def private_seed() -> int:
    """The next seed for a kernel that counts its random numbers itself, as Philox does.

    Drawn on the host from :func:`private_generator` of the CPU, so it follows the global seed, and
    goes back with :class:`PrivateRandomState`; the device is neither asked nor given anything.

    Returns:
        From ``2 ** 62`` to below ``2 ** 63``, so that kernels are compiled for one type of integer.
    """
    seed = torch.empty((), dtype=torch.int64, device='cpu')
    seed.random_(2**62, 2**63 - 1, generator=private_generator(seed.device))
    return int(seed)


def restart_private_generators() -> None:
    """Start all private generators again from the present seed.

    For two runs in one process that are to be equal and are seeded alike:
    ``torch.manual_seed(0); restart_private_generators()`` before each.
    """
    _generators.clear()


class PrivateRandomState:
    """What the private generators held at one moment, for a step that is undone."""

    def __init__(self) -> None:
        self._states = {
            device: (seed, generator.get_state())
            for device, (seed, generator) in _generators.items()
        }

    def restore(self) -> None:
        """Set all of them back to this state."""
        for device in _generators.keys() - self._states.keys():
            del _generators[device]
        for device, (seed, state) in self._states.items():
            generator = torch.Generator(device)
            generator.set_state(state)
            _generators[device] = (seed, generator)
