"""Bytes that the allocator holds at once, temporaries inside operations too; CPU and CUDA."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch.autograd import profiler


def allocated_peak_bytes(fn: Callable[[], Any], device: torch.device | str = 'cpu') -> int:
    """Most bytes allocated at once while ``fn()`` runs, beyond those that were before.

    On a CPU the events of torch's profiler are added up, so nothing is sampled and nothing
    missed; the step takes some time longer. On CUDA it is the allocator's own peak.

    Args:
        fn: The step. What it returns is held until the end of the count.
        device: Where to count.

    Returns:
        Bytes.
    """
    device = torch.device(device)
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        held = fn()
        torch.cuda.synchronize(device)
        del held
        return torch.cuda.max_memory_allocated(device) - before
    with profiler.profile(profile_memory=True) as profile:
        held = fn()
    del held
    events = [event for event in profile.kineto_results.events() if event.name() == '[memory]']
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in events), initial=0))
