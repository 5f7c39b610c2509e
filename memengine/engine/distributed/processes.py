"""Starting torch.distributed on whatever device there is, and what ranks then do together."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from mmengine.device import get_device
from mmengine.dist import get_comm_device, init_dist, is_distributed
from torch.distributed.rendezvous import rendezvous

from memengine._torch_private.distributed import are_ranks_pretended
from memengine.engine.distributed.launchers import DEFAULT_TIMEOUT_S, ProcessRank, read_rank

__all__ = [
    'cpu_group',
    'do_on_all_ranks',
    'group_of_one',
    'init_process_group',
    'local_device_ids',
    'use_own_gpu',
]

T = TypeVar('T')

_timeout = timedelta(seconds=DEFAULT_TIMEOUT_S)
_groups: dict[str, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}  # purpose: world, its own


def init_process_group(launcher: str, dist_cfg: dict[str, Any]) -> None:
    """Join the process group of ``launcher``; on CPU with gloo, which MMEngine cannot.

    On GPUs there is gloo beside NCCL, for what ranks tell each other from the CPU.

    Args:
        launcher: ``'pytorch'`` (torchrun), ``'slurm'`` or ``'mpi'``.
        dist_cfg: ``env_cfg.dist_cfg``: ``backend`` and arguments of
            ``torch.distributed.init_process_group``; ``timeout`` in seconds, after which a rank
            that waits for another one gives up; ``port`` for ``'slurm'`` and ``'mpi'``.

    Raises:
        ValueError: When the launcher's environment is not there, or asks for more ranks than
            there are GPUs.
    """
    global _timeout
    if is_distributed():
        return
    options = dict(dist_cfg)
    timeout = options.pop('timeout', DEFAULT_TIMEOUT_S)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout <= 0:
        raise ValueError(
            f'env_cfg.dist_cfg.timeout: how many seconds a rank waits for another; got {timeout!r}'
        )
    ranks = read_rank(launcher, options.pop('port', None))
    ranks.export()
    device = get_device()
    if device not in ('cpu', 'cuda', 'mps'):
        init_dist('pytorch', **dist_cfg)
        return
    _timeout = options['timeout'] = timedelta(seconds=timeout)
    backend = options.pop('backend', 'nccl')
    if device == 'cuda':
        use_own_gpu(ranks)
        backend = 'cpu:gloo,cuda:nccl' if backend == 'nccl' else backend
    else:
        backend = 'gloo'
    if 'init_method' in options:  # a file, say, knows nothing of ranks
        options.update(rank=ranks.rank, world_size=ranks.world_size)
    elif 'TORCHELASTIC_RESTART_COUNT' in os.environ:
        options.update(_restart_rendezvous(_timeout))
    dist.init_process_group(backend, **options)


def use_own_gpu(ranks: ProcessRank) -> None:
    """Make this rank's GPU, where there are any, the one that is asked when none is named.

    To be called before anything is: a rank that asks the first one takes memory of it for good.

    Raises:
        ValueError: When there are more ranks than GPUs.
    """
    if get_device() == 'cuda':
        torch.cuda.set_device(_device_index(ranks))


def _restart_rendezvous(timeout: timedelta) -> dict[str, Any]:
    """Where ranks find each other, apart from where they did before torchrun started them again.

    torchrun's store outlives a restart, and a rank that is faster than another would find there
    the address of the one that died.
    """
    store, rank, world_size = next(rendezvous('env://', timeout=timeout))
    start = f'start {os.environ["TORCHELASTIC_RESTART_COUNT"]}'
    return dict(store=dist.PrefixStore(start, store), rank=rank, world_size=world_size)


def _device_index(ranks: ProcessRank) -> int:
    """This rank's GPU among those that it sees."""
    gpus = torch.cuda.device_count()
    if ranks.local_world_size <= gpus:
        return ranks.local_rank
    if gpus == 1 and _has_its_own_gpu():
        return 0
    raise ValueError(
        f'{ranks.local_world_size} processes were started on a machine that has {gpus} GPU(s); '
        'start at most one process per GPU (torchrun --nproc_per_node, srun --ntasks-per-node, '
        'mpirun -npernode), or hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on CPU'
    )


def _has_its_own_gpu() -> bool:
    """Whether Slurm lets each task see one GPU only (``--gpus-per-task``, ``--gpu-bind``)."""
    return 'SLURM_PROCID' in os.environ and bool(
        os.environ.keys() & {'SLURM_GPUS_PER_TASK', 'SLURM_GPU_BIND', 'SLURM_STEP_GPU_BIND'}
    )


def cpu_group(purpose: str) -> dist.ProcessGroup | None:
    """A gloo group of all ranks for one purpose, so that two threads never share one.

    All ranks must ask for it at the same place. None in one process, or where ranks are pretended.
    """
    if not is_distributed() or are_ranks_pretended():
        return None
    world = dist.group.WORLD
    assert world is not None
    known = _groups.get(purpose)
    if known is None or known[0] is not world:
        _meet()
        group = cast(dist.ProcessGroup, dist.new_group(backend='gloo', timeout=_timeout))
        known = _groups[purpose] = world, group
    return known[1]


def group_of_one() -> dist.ProcessGroup | None:
    """A gloo group of this rank alone, for what it does by itself with a call that ranks share.

    All ranks must ask for it at the same place. None in one process.
    """
    if not is_distributed():
        return None
    _meet()
    return dist.new_subgroups(1, timeout=_timeout, backend='gloo')[0]


def _meet() -> None:
    """Wait for all ranks over their connections, which break as soon as one of them ends.

    Those that make a group wait in the store, which a launcher holds: nothing there tells of a rank
    that has ended, and no signal is heard.
    """
    dist.all_reduce(torch.zeros(1, device=get_comm_device()))


def local_device_ids() -> list[int] | None:
    """``device_ids`` for DDP: this rank's GPU, or None on CPU."""
    return [torch.cuda.current_device()] if torch.cuda.is_available() else None


def do_on_all_ranks(act: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Act on every rank; all get what each returned, or all the error of the first that failed.

    Args:
        act: What this rank does. What it returns, or raises, is pickled.
        group: A gloo group of all ranks, in which all of them call this at the same place; None in
            one process.

    Returns:
        What the ranks returned, in their order.

    Raises:
        Exception: What was raised on the first rank on which something was.

    Cost: what is returned, on the wire; the ranks wait for each other.
    """
    if group is None:
        return [act()]
    outcome: tuple[T | None, Exception | None] = (None, None)
    try:
        outcome = (act(), None)
    except Exception as error:
        outcome = (None, error)
    outcomes = [outcome] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, outcome, group=group)
    failed = next((error for _, error in outcomes if error is not None), None)
    if failed is not None:
        raise failed from outcome[1]
    return [result for result, _ in outcomes]  # type: ignore[misc]  # none failed
