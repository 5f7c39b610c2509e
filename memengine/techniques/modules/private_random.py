"""Random numbers of the techniques' own.

What is drawn to compress a tensor comes from generators of the techniques' own: dropout would else
get other numbers than in the plain step, and the forward pass would no longer be the same.
"""

from __future__ import annotations

import torch

_SEED_OFFSET = 0x9E3779B97F4A7C15  # so that a private stream is not the one of dropout

generators: dict[torch.device, tuple[int, torch.Generator]] = {}
"""Those that are in use, and the seeds that they started from, by device."""


def private_generator(device: torch.device) -> torch.Generator:
    """The techniques' generator of a device, seeded by the seed of torch's global generator.

    It starts again whenever ``torch.initial_seed()`` has changed. The engine seeds each iteration
    by its place in the run, so a resumed run draws what the uninterrupted one would have drawn. In
    a loop that seeds once, it simply goes on.

    Returns:
        A generator for ``generator=`` of torch's random functions. Do not keep it: ask again.

    Raises:
        RuntimeError: While a CUDA graph is captured, which would repeat the same numbers.

    Torch's global generators are neither drawn from nor set. Seeding them with the seed that they
    have already is not seen here: see :func:`restart_private_generators`. A recomputed forward pass
    (checkpointing, gradient cache) draws new numbers, and each of them is as good as the first.
    """
    _refuse_in_a_graph(device)
    seed = torch.initial_seed()
    seeded, generator = generators.get(device, (None, None))
    if generator is None:
        generator = torch.Generator(device)
    if seeded != seed:
        generator.manual_seed(seed ^ _SEED_OFFSET)
        generators[device] = (seed, generator)
    return generator


def private_seed(device: torch.device) -> int:
    """The next seed for a kernel that counts its random numbers itself, as Philox does.

    Drawn on the host from :func:`private_generator` of the CPU, so it follows the global seed, and
    goes back with ``PrivateRandomState``; the device is neither asked nor given anything.

    Args:
        device: That the kernel runs on.

    Returns:
        From ``2 ** 62`` to below ``2 ** 63``, so that kernels are compiled for one type of integer.

    Raises:
        RuntimeError: As :func:`private_generator` does.
    """
    _refuse_in_a_graph(device)
    seed = torch.empty((), dtype=torch.int64, device='cpu')
    seed.random_(2**62, 2**63 - 1, generator=private_generator(seed.device))
    return int(seed)


def _refuse_in_a_graph(device: torch.device) -> None:
    if device.type == 'cuda' and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            'random numbers of a technique were asked for while a CUDA graph is captured, which '
            'would repeat the same ones: leave out rounding at random (quantised activations) and '
            "dropit.strategy='random', or do without the graph"
        )


def restart_private_generators() -> None:
    """Start all private generators again from the present seed.

    For two runs in one process that are to be equal and are seeded alike:
    ``torch.manual_seed(0); restart_private_generators()`` before each.
    """
    generators.clear()
