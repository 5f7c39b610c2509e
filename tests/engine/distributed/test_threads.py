"""Threads follow what this process may really use."""

import os

import pytest
import torch

from memengine.engine.distributed import threads


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A machine of 16 cores whose control groups are files below ``tmp_path``."""
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: set(range(16)), raising=False)

    def make(groups, **quotas):
        (tmp_path / 'proc/self').mkdir(parents=True)
        (tmp_path / 'proc/self/cgroup').write_text(groups)
        for path, text in quotas.items():
            file = tmp_path / 'sys/fs/cgroup' / path.replace('__', '/').replace('cpu_', 'cpu.')
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path

    return make


def test_without_control_groups_the_affinity_counts(tmp_path, system):
    assert threads.available_cores(tmp_path) == 16


def test_quota_of_a_container(system):
    assert threads.available_cores(system('0::/\n', cpu_max='200000 100000\n')) == 2


def test_no_quota(system):
    assert threads.available_cores(system('0::/\n', cpu_max='max 100000\n')) == 16


def test_quota_of_a_parent_group(system):
    root = system(
        '0::/a/b\n', cpu_max='max 100000', a__cpu_max='350000 100000', a__b__cpu_max='max 100000'
    )
    assert threads.available_cores(root) == 4


def test_a_part_of_a_core_is_one(system):
    assert threads.available_cores(system('0::/\n', cpu_max='10000 100000\n')) == 1


def test_quota_of_version_1(system):
    root = system(
        '4:memory:/x\n3:cpu,cpuacct:/x\n0::/\n',
        cpu__x__cpu_cfs_quota_us='300000\n',
        cpu__x__cpu_cfs_period_us='100000\n',
    )
    assert threads.available_cores(root) == 3


def test_no_quota_in_version_1(system):
    root = system(
        '3:cpu,cpuacct:/\n', cpu__cpu_cfs_quota_us='-1\n', cpu__cpu_cfs_period_us='100000\n'
    )
    assert threads.available_cores(root) == 16


@pytest.fixture
def sixteen_cores(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, 'available_cores', lambda: 16)
    for name in ('OMP_NUM_THREADS', *threads._LOCAL_WORLD_SIZE):
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    torch.set_num_threads(before)


def test_threads_are_the_ranks_share(sixteen_cores):
    assert threads.set_threads() == 16
    assert threads.set_threads(workers=2) == 15
    sixteen_cores.setenv('LOCAL_WORLD_SIZE', '4')
    assert threads.set_threads() == 4
    assert threads.set_threads(workers=1) == 3
    sixteen_cores.setenv('LOCAL_WORLD_SIZE', '8')
    assert threads.set_threads(workers=4) == 1
    sixteen_cores.setenv('LOCAL_WORLD_SIZE', '100')
    assert threads.set_threads() == torch.get_num_threads() == 1


def test_what_the_user_sets_goes_first(sixteen_cores):
    torch.set_num_threads(3)
    sixteen_cores.setenv('OMP_NUM_THREADS', '3')
    assert threads.set_threads() == 3 == torch.get_num_threads()


def test_ranks_of_other_launchers(sixteen_cores):
    sixteen_cores.setenv('SLURM_NTASKS_PER_NODE', '2')
    assert threads.local_world_size() == 2
    sixteen_cores.setenv('OMPI_COMM_WORLD_LOCAL_SIZE', '4')
    assert threads.local_world_size() == 4
