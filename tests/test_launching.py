"""Jobs of several processes, from the command to their end: also when a process dies or hangs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from memengine.engine.checkpoint.latest import find_latest
from memengine.engine.checkpoint.sharded import read_sharded

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 250

PARTS = """
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from torch import nn
from torch.utils.data import Dataset

from memengine.engine import run_step
from memengine.registry import DATASETS, HOOKS, MODELS


@DATASETS.register_module()
class LaunchData(Dataset):
    def __len__(self):
        return 23

    def __getitem__(self, index):
        return dict(x=torch.tensor([float(index)]), index=index)


@MODELS.register_module()
class LaunchModel(BaseModel):
    def __init__(self, fails_on=None):
        super().__init__()
        if fails_on is not None and fails_on == os.environ.get('RANK'):
            raise ValueError('this rank has no model')
        self.net = nn.Linear(1, 1)

    def train_step(self, data, optim_wrapper):
        return run_step(self, data, optim_wrapper)

    def forward(self, x, index, mode='loss'):
        return {'loss': (self.net(x) - 2 * x).square().mean() / 100}


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@HOOKS.register_module()
class Trouble(Hook):
    '''What happens to rank 1 in the first attempts, within an iteration or a save.'''

    def __init__(self, what, attempts=1):
        self.what, self.attempts, self.saves = what, attempts, 0

    def before_train(self, runner):
        attempt = int(os.environ.get('TORCHELASTIC_RESTART_COUNT', '0'))
        if runner.rank != 1 or attempt >= self.attempts:
            return
        if self.what == 'fails':
            raise ValueError('this rank does not begin')
        if self.what == 'dies in a save':
            real = dcp.FileSystemWriter.write_data

            def write_data(*args):
                self.saves += 1
                return die() if self.saves == 2 else real(*args)

            dcp.FileSystemWriter.write_data = write_data
        else:
            acts = {'dies': die, 'hangs': lambda: time.sleep(10000), 'waits': lambda: None}
            runner.model.module.net.register_forward_pre_hook(
                lambda *args: acts[self.what]() if runner.iter == 8 + 4 * attempt else None
            )

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        seen = ' '.join(str(int(i)) for i in data_batch['index'])
        noise = torch.rand(()).item()
        with open(Path(runner.work_dir) / f'rank{runner.rank}.txt', 'a') as file:
            print(runner.iter, runner.epoch, noise, seen, file=file, flush=True)
        if self.what == 'waits':
            time.sleep(0.1)
"""
CONFIG = """
custom_imports = dict(imports=['launch_parts'])
model = dict(type='LaunchModel')
train_dataloader = dict(
    batch_size=2,
    dataset=dict(type='LaunchData'),
    sampler=dict(type='DefaultSampler', shuffle=True),
    collate_fn=dict(type='default_collate'),
)
train_cfg = dict(max_epochs=3)
optim_wrapper = dict(optimizer=dict(type='SGD', lr=1e-3, momentum=0.9))
randomness = dict(seed=1)
default_hooks = dict(
    logger=dict(type='LoggerHook', interval=1),
    checkpoint=dict(type='CheckpointHook', interval=1, sharded=True, max_keep_ckpts=1),
)
custom_hooks = [dict(type='Trouble', what='waits')]
env_cfg = dict(dist_cfg=dict(timeout=20))
log_level = 'WARNING'
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / 'launch_parts.py').write_text(PARTS)
    (tmp_path / 'config.py').write_text(CONFIG)
    return tmp_path


def environment(**variables):
    """This one without what launchers set; no GPU."""
    known = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'SLURM_', 'OMPI_', 'MASTER_', 'TORCHELASTIC_')
    env = {name: value for name, value in os.environ.items() if not name.startswith(known)}
    return {
        **env,
        'OMP_NUM_THREADS': '1',
        'CUDA_VISIBLE_DEVICES': '',
        'PYTHON': sys.executable,
        'PATH': f'{Path(sys.executable).parent}:{env["PATH"]}',
        **variables,
    }


def launch(folder, what, *options, wait_s=100, attempts=1, **variables):
    """``tools/dist_train.sh`` on two ranks, of which rank 1 gets into trouble."""
    settings = [
        '--cfg-options',
        f'custom_hooks.0.what={what}',
        f'custom_hooks.0.attempts={attempts}',
        f'env_cfg.dist_cfg.timeout={wait_s}',
    ]
    return subprocess.run(
        ['bash', ROOT / 'tools/dist_train.sh', 'config.py', '2', *options, *settings],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def draws(folder, rank):
    """What a rank noted of each iteration: its number, the pass, noise, and the samples."""
    lines = (folder / 'work_dirs/config' / f'rank{rank}.txt').read_text().splitlines()
    rows = [line.split() for line in lines]
    return [(int(r[0]), int(r[1]), float(r[2]), [int(i) for i in r[3:]]) for r in rows]


@pytest.mark.slow
@pytest.mark.parametrize('what', ['dies', 'dies in a save'])
@pytest.mark.fault('a rank is killed', 'the job ends; the last checkpoint is whole')
def test_a_killed_rank_ends_the_job_and_leaves_the_last_checkpoint_whole(folder, what):
    done = launch(folder, what)
    assert done.returncode != 0
    lost = 'memengine [rank 0]: error: the connection to another rank was lost: rank 1 (host'
    assert lost in done.stderr or 'closing signal SIGTERM' in done.stderr  # whoever was first
    assert 'SIGKILL' in done.stderr, "torchrun's account of rank 1"
    last = find_latest(folder / 'work_dirs/config')
    assert last.name == 'epoch_1.dcp'
    checkpoint = read_sharded(last)
    assert checkpoint['meta']['iter'] == 6
    assert checkpoint['optimizer']['state'].keys() == {'net.weight', 'net.bias'}


@pytest.mark.slow
@pytest.mark.parametrize('setting', ['custom_hooks.0.what=fails', "model.fails_on='1'"])
@pytest.mark.fault('a rank fails before its first step', 'the others name it at once')
def test_a_rank_that_fails_before_its_first_step_is_named(folder, setting):
    """As under torchrun, whose store outlives the rank, but nobody signals the other one."""
    store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [sys.executable, ROOT / 'tools/train.py', 'config.py', '--launcher', 'pytorch']
            + ['--cfg-options', 'env_cfg.dist_cfg.timeout=60', setting],
            cwd=folder,
            env=environment(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE='2',
                LOCAL_WORLD_SIZE='2',
                MASTER_ADDR='127.0.0.1',
                MASTER_PORT=str(store.port),
                TORCHELASTIC_USE_AGENT_STORE='True',
                TORCHELASTIC_RESTART_COUNT='0',
            ),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    waited, failed = (rank.communicate(timeout=TIMEOUT_S)[1] for rank in ranks)
    assert 'this rank ' in failed
    assert 'memengine [rank 0]: error: the connection to another rank was lost: rank 1 (' in waited
    assert 'ended by ValueError in start-up; its own error says why' in waited


@pytest.mark.slow
@pytest.mark.fault(
    'a rank is killed three times', 'the job goes on from its last checkpoint, bit for bit'
)
def test_a_job_that_is_started_again_goes_on_by_itself(folder):
    done = launch(folder, 'dies', '--resume', 'auto', attempts=3, MAX_RESTARTS='3')
    assert done.returncode == 0, done.stderr[-3000:]
    rows = draws(folder, 1)
    starts = [*range(8), *range(6, 12), *range(12, 16), *range(12, 18)]
    assert [row[0] for row in rows] == starts
    of_iteration = {row[0]: row for row in rows}
    assert all(row == of_iteration[row[0]] for row in rows), 'the same samples and random numbers'
    assert (folder / 'work_dirs/config/epoch_3.dcp').is_dir()


@pytest.mark.slow
@pytest.mark.fault(
    'a rank hangs', 'every rank ends after `dist_cfg.timeout`; they say which, since when and where'
)
def test_a_rank_that_hangs_ends_the_job_within_the_timeout(folder):
    done = launch(folder, 'hangs', wait_s=20)
    assert done.returncode != 0
    found = re.search(
        r'memengine \[rank 0\]: error: another rank did not answer within 20 s '
        r'\(env_cfg\.dist_cfg\.timeout\): rank 1 \(host .*, process \d+\) has been in training, '
        r'iteration 8 since \d\d:\d\d:\d\d, at <lambda> \(launch_parts\.py, line \d+\)',
        done.stderr,
    )
    assert found, done.stderr[-3000:]
    assert 'memengine [rank 1]: warning: this rank has been in training, iteration 8' in done.stderr


@pytest.mark.slow
@pytest.mark.fault('Ctrl-C on several ranks', 'one checkpoint; the message says how to go on')
def test_ctrl_c_on_ranks_saves_once_and_says_what_to_go_on_from(folder):
    process = subprocess.Popen(
        ['bash', ROOT / 'tools/dist_train.sh', 'config.py', '2']
        + ['--cfg-options', 'train_cfg.max_epochs=100000'],
        cwd=folder,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not list(folder.glob('work_dirs/config/rank1.txt')):
            assert process.poll() is None
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)  # to torchrun, which passes it on
        _, said = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode != 0
    last = find_latest(folder / 'work_dirs/config')
    done = read_sharded(last)['meta']['iter']
    assert last.name == f'iter_{done}.dcp'
    assert f'start again with --resume to go on from work_dirs/config/iter_{done}.dcp' in said
    assert {len(draws(folder, rank)) for rank in (0, 1)} == {done}, 'ranks stop together'


SRUN = """#!/usr/bin/env python
# Stands for Slurm's srun: starts the tasks with the variables that it sets.
import os, subprocess, sys
options = [word for word in sys.argv[1:] if word.startswith('--')]
begin = next(i for i, word in enumerate(sys.argv) if i and not word.startswith('-'))
tasks = int(next(o for o in options if o.startswith('--ntasks=')).partition('=')[2])
variables = dict(SLURM_NTASKS=tasks, SLURM_NODELIST='localhost', SLURM_TASKS_PER_NODE=tasks,
                 SLURM_NODEID=0, SLURM_JOB_ID=os.getpid())
started = [
    subprocess.Popen(sys.argv[begin:], env={**os.environ, **{
        k: str(v) for k, v in dict(variables, SLURM_PROCID=rank, SLURM_LOCALID=rank).items()}})
    for rank in range(tasks)
]
sys.exit(max(process.wait() for process in started))
"""


@pytest.mark.slow
def test_slurm_script_and_each_sample_goes_to_one_rank_once(folder):
    """Three ranks of two share 23 samples: in each pass 21 are drawn, and no one twice."""
    (folder / 'bin').mkdir()
    (folder / 'bin/srun').write_text(SRUN)
    (folder / 'bin/srun').chmod(0o755)
    env = environment(GPUS='3')
    env['PATH'] = f'{folder / "bin"}:{env["PATH"]}'
    words = ['debug', 'job', 'config.py', 'work_dirs/config', '--max-iters', '8']
    done = subprocess.run(
        ['bash', ROOT / 'tools/slurm_train.sh', *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [draws(folder, rank) for rank in range(3)]
    for epoch in (0, 1):
        drawn = [i for of_rank in rows for row in of_rank if row[1] == epoch for i in row[3]]
        assert len(drawn) == len(set(drawn)) == 21
    noise = [row[2] for of_rank in rows for row in of_rank]
    assert len(set(noise)) == len(noise), 'every rank draws its own in every iteration'
    assert json.loads(next(folder.rglob('scalars.json')).read_text().splitlines()[-1])['iter'] == 8
