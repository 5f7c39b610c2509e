"""How much memory is left."""

from __future__ import annotations

import os
from pathlib import Path

import torch

__all__ = ['headroom_bytes']

_MEMINFO = Path('/proc/meminfo')


def headroom_bytes(device: torch.device) -> int | None:
    """Bytes that this process can still allocate.

    Args:
        device: A CUDA device, where what the caching allocator holds unused counts as left, but
            not blocks that a stream may still use; or the CPU, where the processes that torchrun
            started on this machine share alike.

    Returns:
        Bytes; None where the system does not say.
    """
    if device.type == 'cuda':
        free, _ = torch.cuda.mem_get_info(device)
        stats = torch.cuda.memory_stats(device)  # empty before the first allocation
        in_use = stats.get('active_bytes.all.current', 0)  # with what waits for events
        return free + int(stats.get('reserved_bytes.all.current', 0) - in_use)
    if device.type != 'cpu' or not _MEMINFO.exists():
        return None
    fields = dict(line.split(':') for line in _MEMINFO.read_text().splitlines())
    available = int(fields['MemAvailable'].split()[0]) * 1024
    return available // int(os.environ.get('LOCAL_WORLD_SIZE', 1))
