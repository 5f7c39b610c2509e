"""Memory of this process and of its accelerator, and what of it is held from step to step."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from memengine.memory.ledger import parts_of, tensors_in

_MIB = 2**20
_STATM = Path('/proc/self/statm')


def rss_mib() -> float | None:
    """Resident memory of this process now.

    Returns:
        MiB; None on a system that does not say (it is read from ``/proc``).
    """
    if not _STATM.exists():
        return None
    import resource

    return int(_STATM.read_text().split()[1]) * resource.getpagesize() / _MIB


def peak_rss_mib() -> float | None:
    """The most resident memory that this process ever had.

    Returns:
        MiB; None on a system without ``getrusage`` (Windows).
    """
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / _MIB if sys.platform == 'darwin' else peak / 1024  # bytes there, KiB elsewhere


def cuda_peak_mib(device: torch.device | int | None = None) -> float:
    """The most memory that tensors occupied on a CUDA device since its peak was last reset.

    Args:
        device: The device; None for the current one.

    Returns:
        MiB.
    """
    return torch.cuda.max_memory_allocated(device) / _MIB


def cuda_figures(device: torch.device | int | None = None) -> dict[str, float]:
    """What tells how near the limit of a CUDA device is, since its peaks were last reset.

    Args:
        device: The device; None for the current one.

    Returns:
        By name, in MiB: the peak of what tensors occupied (``memory_mib``), of what the allocator
        had taken from the device for them (``reserved_mib``), and of what lay unused between
        tensors in blocks that it can neither give to larger ones nor back (``fragmented_mib``);
        and ``alloc_retries``, how often in this process it gave its cache back to find room.
    """
    stats = torch.cuda.memory_stats(device)
    return {
        'memory_mib': cuda_peak_mib(device),
        'reserved_mib': stats.get('reserved_bytes.all.peak', 0) / _MIB,
        'fragmented_mib': stats.get('inactive_split_bytes.all.peak', 0) / _MIB,
        'alloc_retries': float(stats.get('num_alloc_retries', 0)),
    }


def held_bytes(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of ``weights``, ``buffers`` and ``optimizer`` states, on whatever device, of this rank.

    Args:
        model: Sharded or not.
        *optimizers: Those that train it.
    """
    states = [optimizer.state for optimizer in optimizers]
    return {
        'weights': _sum(model.parameters()),
        'buffers': _sum(model.buffers()),
        'optimizer': _sum(tensors_in(states)),
    }


def _sum(tensors: Iterable[Tensor]) -> int:
    several = {id(tensor): tensor for tensor in tensors}.values()
    return sum(part.nbytes for tensor in several for part in parts_of(tensor))
