"""Which rank a process is: what torchrun, Slurm and MPI tell in the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ['DEFAULT_TIMEOUT_S', 'ProcessRank', 'read_rank']

DEFAULT_TIMEOUT_S = 600

# How each kind of MPI names the rank, the number of ranks, and both on this machine.
_MPI = {
    'Open MPI': (
        'OMPI_COMM_WORLD_RANK',
        'OMPI_COMM_WORLD_SIZE',
        'OMPI_COMM_WORLD_LOCAL_RANK',
        'OMPI_COMM_WORLD_LOCAL_SIZE',
    ),
    'MPICH, Intel MPI': ('PMI_RANK', 'PMI_SIZE', 'MPI_LOCALRANKID', 'MPI_LOCALNRANKS'),
}
_DEFAULT_PORT = 29500


@dataclass(frozen=True)
class ProcessRank:
    """A process among the others of its job.

    Attributes:
        rank: Its number among all.
        world_size: How many there are.
        local_rank: Its number on this machine.
        local_world_size: How many there are on this machine.
        address: Host of rank 0, where all meet.
        port: Port of rank 0.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int

    def export(self) -> None:
        """Set the variables by which torchrun says the same, which torch reads."""
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(self.local_rank),
            LOCAL_WORLD_SIZE=str(self.local_world_size),
            MASTER_ADDR=self.address,
            MASTER_PORT=str(self.port),
        )


def read_rank(launcher: str, port: int | None = None) -> ProcessRank:
    """Read which rank this process is.

    Args:
        launcher: ``'pytorch'`` (torchrun), ``'slurm'`` or ``'mpi'``.
        port: Where ranks meet; by default ``MASTER_PORT``, else one of the Slurm job's own or
            29500. torchrun chooses by itself.

    Raises:
        ValueError: When the launcher's variables are not there, saying how to start.
    """
    return {'pytorch': _torchrun, 'slurm': _slurm, 'mpi': _mpi}[launcher](os.environ, port)


def _torchrun(env: Mapping[str, str], port: int | None) -> ProcessRank:
    _require(
        env,
        'pytorch',
        ('RANK', 'LOCAL_RANK', 'WORLD_SIZE'),
        'torchrun --nproc_per_node N tools/train.py CONFIG --launcher pytorch',
    )
    return ProcessRank(
        rank=int(env['RANK']),
        world_size=int(env['WORLD_SIZE']),
        local_rank=int(env['LOCAL_RANK']),
        local_world_size=int(env.get('LOCAL_WORLD_SIZE', 1)),
        address=env.get('MASTER_ADDR', '127.0.0.1'),
        port=int(env.get('MASTER_PORT', _DEFAULT_PORT)),
    )


def _slurm(env: Mapping[str, str], port: int | None) -> ProcessRank:
    _require(
        env,
        'slurm',
        ('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_LOCALID', 'SLURM_NODELIST'),
        'srun --ntasks N python tools/train.py CONFIG --launcher slurm',
    )
    nodes = env.get('SLURM_STEP_NODELIST', env['SLURM_NODELIST'])
    per_node = env.get('SLURM_STEP_TASKS_PER_NODE', env.get('SLURM_TASKS_PER_NODE', ''))
    here = tasks_per_node(per_node)[int(env.get('SLURM_NODEID', 0)) :]
    own = 20_000 + int(env.get('SLURM_JOB_ID', 0)) % 10_000  # two jobs on one machine do not meet
    return ProcessRank(
        rank=int(env['SLURM_PROCID']),
        world_size=int(env['SLURM_NTASKS']),
        local_rank=int(env['SLURM_LOCALID']),
        local_world_size=here[0] if here else int(env['SLURM_LOCALID']) + 1,
        address=env.get('MASTER_ADDR', first_host(nodes)),
        port=port or int(env.get('MASTER_PORT', own)),
    )


def _mpi(env: Mapping[str, str], port: int | None) -> ProcessRank:
    names = next((names for names in _MPI.values() if names[0] in env), _MPI['Open MPI'])
    how = 'mpirun -np N python tools/train.py CONFIG --launcher mpi'
    _require(env, 'mpi', names[:3], how)
    rank, world_size, local_rank = (int(env[name]) for name in names[:3])
    local_world_size = int(env.get(names[3], local_rank + 1))
    if 'MASTER_ADDR' not in env and local_world_size != world_size:
        raise ValueError(
            "launcher='mpi' on several machines needs MASTER_ADDR, the host of rank 0: start with "
            f'mpirun -x MASTER_ADDR=HOST {how.partition(" ")[2]}'
        )
    return ProcessRank(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        address=env.get('MASTER_ADDR', '127.0.0.1'),
        port=port or int(env.get('MASTER_PORT', _DEFAULT_PORT)),
    )


def _require(env: Mapping[str, str], launcher: str, names: tuple[str, ...], how: str) -> None:
    missing = [name for name in names if name not in env]
    if missing:
        raise ValueError(
            f"launcher='{launcher}' needs {', '.join(missing)} in the environment: start with {how}"
        )


def first_host(nodes: str) -> str:
    """The first host of a list as Slurm writes it: ``'gpu[03-05,9],cpu1'`` begins with gpu03."""
    first = re.match(r'(?:[^,\[]|\[[^\]]*\])+', nodes)
    return re.sub(r'\[([^\],-]+)[^\]]*\]', r'\1', first[0]) if first else nodes


def tasks_per_node(counts: str) -> list[int]:
    """How many tasks each node has, as Slurm writes it: ``'4(x2),3'`` is 4, 4 and 3."""
    found = re.findall(r'(\d+)(?:\(x(\d+)\))?', counts)
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]
