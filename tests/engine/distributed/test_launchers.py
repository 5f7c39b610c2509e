"""Who a process is, as torchrun, Slurm and MPI say it; and what they start, on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memengine.engine.distributed import processes as distributed
from memengine.engine.distributed.launchers import (
    ProcessRank,
    first_host,
    read_rank,
    tasks_per_node,
)

ROOT = Path(__file__).parents[3]
PREFIXES = ('SLURM_', 'OMPI_', 'PMI_', 'MPI_', 'MASTER_', 'TORCHELASTIC_')
NAMES = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith(PREFIXES) or name in NAMES:
            monkeypatch.delenv(name)


def set_all(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


SLURM = dict(
    SLURM_PROCID=5,
    SLURM_NTASKS=7,
    SLURM_LOCALID=1,
    SLURM_NODEID=1,
    SLURM_NODELIST='gpu[03-05,9]',
    SLURM_TASKS_PER_NODE='4,3',
    SLURM_JOB_ID=1234567,
)


def test_slurm(monkeypatch):
    set_all(monkeypatch, **SLURM)
    assert read_rank('slurm') == ProcessRank(5, 7, 1, 3, 'gpu03', 24567)
    assert read_rank('slurm', port=4000).port == 4000
    set_all(monkeypatch, MASTER_ADDR='head', MASTER_PORT=1)
    assert read_rank('slurm') == ProcessRank(5, 7, 1, 3, 'head', 1)


def test_a_slurm_step_on_some_of_the_jobs_nodes(monkeypatch):
    set_all(monkeypatch, **SLURM, SLURM_STEP_NODELIST='gpu9', SLURM_STEP_TASKS_PER_NODE='2(x2)')
    ranks = read_rank('slurm')
    assert (ranks.address, ranks.local_world_size) == ('gpu9', 2)


@pytest.mark.parametrize(
    ('nodes', 'first'),
    [
        ('node1', 'node1'),
        ('a,b', 'a'),
        ('gpu[03-05,9],cpu1', 'gpu03'),
        ('r[1-2]n[7,9]', 'r1n7'),
        ('n[4]-ib.cluster', 'n4-ib.cluster'),
    ],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


def test_tasks_per_node():
    assert tasks_per_node('4(x2),3') == [4, 4, 3]
    assert tasks_per_node('8') == [8]


def test_mpi(monkeypatch):
    set_all(
        monkeypatch,
        OMPI_COMM_WORLD_RANK=1,
        OMPI_COMM_WORLD_SIZE=2,
        OMPI_COMM_WORLD_LOCAL_RANK=1,
        OMPI_COMM_WORLD_LOCAL_SIZE=2,
    )
    assert read_rank('mpi') == ProcessRank(1, 2, 1, 2, '127.0.0.1', 29500)
    set_all(monkeypatch, OMPI_COMM_WORLD_LOCAL_SIZE=1, OMPI_COMM_WORLD_LOCAL_RANK=0)
    with pytest.raises(ValueError, match='mpirun -x MASTER_ADDR=HOST -np N'):
        read_rank('mpi')
    set_all(monkeypatch, MASTER_ADDR='head')
    assert read_rank('mpi').address == 'head'


def test_mpich(monkeypatch):
    set_all(monkeypatch, PMI_RANK=1, PMI_SIZE=2, MPI_LOCALRANKID=1, MPI_LOCALNRANKS=2)
    assert read_rank('mpi') == ProcessRank(1, 2, 1, 2, '127.0.0.1', 29500)


@pytest.mark.parametrize(
    ('launcher', 'missing', 'how'),
    [
        ('pytorch', 'RANK, LOCAL_RANK, WORLD_SIZE', 'torchrun'),
        ('slurm', 'SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_NODELIST', 'srun'),
        ('mpi', 'OMPI_COMM_WORLD_RANK, .*_SIZE, .*_LOCAL_RANK', 'mpirun'),
    ],
)
def test_a_launcher_that_was_not_used_is_said(launcher, missing, how):
    with pytest.raises(
        ValueError, match=f"launcher='{launcher}' needs {missing}.*start with {how}"
    ):
        read_rank(launcher)


def ranks_on_gpus(monkeypatch, ranks, gpus):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: gpus)
    return distributed._device_index(ranks)


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    assert ranks_on_gpus(monkeypatch, ProcessRank(6, 8, 2, 4, 'a', 1), gpus=4) == 2
    with pytest.raises(ValueError, match=r'8 processes .* has 4 GPU\(s\)'):
        ranks_on_gpus(monkeypatch, ProcessRank(6, 8, 6, 8, 'a', 1), gpus=4)


def test_a_slurm_task_that_sees_its_own_gpu_only_takes_it(monkeypatch):
    task = ProcessRank(3, 4, 3, 4, 'a', 1)
    with pytest.raises(ValueError, match='4 processes'):
        ranks_on_gpus(monkeypatch, task, gpus=1)
    set_all(monkeypatch, **SLURM, SLURM_GPUS_PER_TASK=1)
    assert ranks_on_gpus(monkeypatch, task, gpus=1) == 0


@pytest.mark.parametrize('timeout', [0, -1, '10', True, None])
def test_a_timeout_that_is_none_is_refused(timeout):
    with pytest.raises(ValueError, match='env_cfg.dist_cfg.timeout'):
        distributed.init_process_group('pytorch', dict(timeout=timeout))


PROGRAM = """
import sys
import torch
import torch.distributed as dist
from memengine.engine.distributed.processes import cpu_group, init_process_group

init_process_group(sys.argv[1], dict(backend='nccl', timeout=60))
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
dist.all_reduce(total, group=cpu_group('test'))
print(dist.get_backend(), dist.get_rank(), dist.get_world_size(), int(total))
"""


@pytest.mark.slow
@pytest.mark.parametrize('launcher', ['slurm', 'mpi'])
def test_two_processes_meet_on_gloo(tmp_path, launcher):
    """As srun and mpirun start them, which are not there: by the variables that these set."""
    (tmp_path / 'program.py').write_text(PROGRAM)
    port = 20000 + os.getpid() % 10000
    processes = []
    for rank in (0, 1):
        variables = dict(
            slurm=dict(
                SLURM_PROCID=rank,
                SLURM_NTASKS=2,
                SLURM_LOCALID=rank,
                SLURM_NODELIST='localhost',
                SLURM_TASKS_PER_NODE=2,
                SLURM_JOB_ID=port,
            ),
            mpi=dict(
                OMPI_COMM_WORLD_RANK=rank,
                OMPI_COMM_WORLD_SIZE=2,
                OMPI_COMM_WORLD_LOCAL_RANK=rank,
                OMPI_COMM_WORLD_LOCAL_SIZE=2,
                MASTER_PORT=port,
            ),
        )[launcher]
        env = {**os.environ, **{k: str(v) for k, v in variables.items()}, 'PYTHONPATH': str(ROOT)}
        command = [sys.executable, str(tmp_path / 'program.py'), launcher]
        env['CUDA_VISIBLE_DEVICES'] = ''
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=200)[0].split('\n')[-2] for process in processes]
    assert said == ['gloo 0 2 6', 'gloo 1 2 6']
