"""Starting torch.distributed on whatever device there is."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mmengine.dist import init_dist, is_distributed

__all__ = ['init_process_group', 'local_device_ids']

DEFAULT_TIMEOUT_S = 1800


def init_process_group(launcher: str, dist_cfg: dict[str, Any]) -> None:
    """Join the process group of ``launcher``; on CPU with gloo, which MMEngine cannot.

    Args:
        launcher: ``'pytorch'`` (torchrun), ``'slurm'`` or ``'mpi'``.
        dist_cfg: ``env_cfg.dist_cfg``: ``backend`` and arguments of
            ``torch.distributed.init_process_group``; ``timeout`` in seconds.

    Raises:
        ValueError: When the launcher's environment is not there, or asks for more ranks than
            there are GPUs.
    """
    if is_distributed():
        return
    if launcher == 'pytorch':
        missing = [name for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE') if name not in os.environ]
        if missing:
            raise ValueError(
                f"launcher='pytorch' needs {', '.join(missing)} in the environment: start with "
                'torchrun --nproc_per_node N tools/train.py CONFIG --launcher pytorch'
            )
    if torch.cuda.is_available():
        ranks = int(os.environ.get('LOCAL_WORLD_SIZE', 1))
        if ranks > torch.cuda.device_count():
            raise ValueError(
                f'--nproc_per_node {ranks}: this machine has {torch.cuda.device_count()} GPU(s); '
                'start at most one process per GPU (or hide the GPUs to train on CPU)'
            )
        init_dist(launcher, **dist_cfg)
        return
    if launcher != 'pytorch':
        raise ValueError(
            f"launcher='{launcher}' needs GPUs; on CPU use torchrun and --launcher pytorch"
        )
    options = {key: value for key, value in dist_cfg.items() if key != 'backend'}
    options['timeout'] = timedelta(seconds=options.get('timeout', DEFAULT_TIMEOUT_S))
    if 'init_method' in options:  # a file, say, knows nothing of ranks
        options.update(rank=int(os.environ['RANK']), world_size=int(os.environ['WORLD_SIZE']))
    dist.init_process_group('gloo', **options)


def local_device_ids() -> list[int] | None:
    """``device_ids`` for DDP: this rank's GPU, or None on CPU."""
    return [int(os.environ['LOCAL_RANK'])] if torch.cuda.is_available() else None
