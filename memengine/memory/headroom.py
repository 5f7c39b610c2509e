"""How much memory is left."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_MEMINFO = Path('/proc/meminfo')
# What is left over: an accelerator also holds workspaces and fragments, and the memory of the CPU
# belongs to others as well.
_SHARE = {'cuda': 0.8, 'cpu': 0.5}


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


def room_bytes(device: torch.device) -> int:
    """Bytes of what is left that a training may plan with: 0.8 on a GPU, 0.5 elsewhere.

    Args:
        device: As of :func:`headroom_bytes`.

    Returns:
        Bytes; 0 where the system does not say.
    """
    return int(_SHARE.get(device.type, 0.5) * (headroom_bytes(device) or 0))
