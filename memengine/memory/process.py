"""Memory of this process and of its accelerator, in MiB."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

__all__ = ['cuda_peak_mib', 'peak_rss_mib', 'rss_mib']

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
