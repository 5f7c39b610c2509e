"""How many threads torch computes with.

Torch takes as many as the machine has cores, even where a container or a job may use only a few
of them, or where several ranks share them; the threads then wait for each other, and a step takes
many times as long.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

_LOCAL_WORLD_SIZE = ('LOCAL_WORLD_SIZE', 'OMPI_COMM_WORLD_LOCAL_SIZE', 'SLURM_NTASKS_PER_NODE')


def _cpu_quotas(root: Path) -> Iterator[float]:
    """CPU quotas, in cores, of the control groups that this process is in (versions 2 and 1)."""
    try:
        lines = (root / 'proc/self/cgroup').read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, name = line.split(':', 2)
        mount = root / 'sys/fs/cgroup' if not controllers else root / 'sys/fs/cgroup/cpu'
        if controllers and 'cpu' not in controllers.split(','):
            continue
        group = mount / name.lstrip('/')
        for folder in (group, *group.parents):
            quota = _cpu_quota(folder)
            if quota is not None:
                yield quota
            if folder == mount:
                break


def _cpu_quota(folder: Path) -> float | None:
    try:
        if (folder / 'cpu.max').is_file():
            quota, period = (folder / 'cpu.max').read_text().split()
        else:
            quota = (folder / 'cpu.cfs_quota_us').read_text()
            period = (folder / 'cpu.cfs_period_us').read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # no such file, or 'max': no quota
        return None


def available_cores(root: Path = Path('/')) -> int:
    """Cores that this process may use: those it may run on, within the quota of its container."""
    if hasattr(os, 'sched_getaffinity'):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, min([cores, *(int(quota + 0.5) for quota in _cpu_quotas(root))]))


def local_world_size() -> int:
    """Ranks on this machine, as the launcher says in the environment."""
    for name in _LOCAL_WORLD_SIZE:
        if os.environ.get(name, '').isdigit():
            return max(1, int(os.environ[name]))
    return 1


def set_threads(workers: int = 0) -> int:
    """Set torch's number of threads to this rank's share of the cores.

    ``OMP_NUM_THREADS`` goes first: where it is set (torchrun sets it to 1 for several ranks),
    nothing is changed. With data-loader workers one core is left to them: threads that wait for a
    core that a worker holds slow a step more than one thread less does (measured with one worker
    on two cores: 0.107 s a step of the quick start with one thread, 0.139 s with two).
    """
    if os.environ.get('OMP_NUM_THREADS'):
        return torch.get_num_threads()
    share = available_cores() // local_world_size()
    if workers and share > 1:
        share -= 1
    torch.set_num_threads(max(1, share))
    return torch.get_num_threads()
