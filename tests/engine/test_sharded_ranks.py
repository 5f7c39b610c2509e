"""Sharded checkpoints on several ranks: a run goes on, on any number, as one process does."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from memengine._torch_private.distributed import CAN_SHARD_ON_CPU
from memengine.engine.checkpoint.sharded import read_sharded
from memengine.engine.checkpoint.state import gather_state, run_state
from memengine.testing import assert_same_step, run_ranks
from tests.engine.toy import Losses, ToyData, ToyModel, toy_runner

BATCH = 8  # of all ranks
STEPS = dict(two=4, four=9, one=15)  # where each part of the run stops; 4 and 9 are within an epoch
TIMEOUT_S = 600.0


class Model(ToyModel):
    """No dropout, BatchNorm over all ranks: follows one process on any number of ranks.

    A layer has two names, as a tied weight has.
    """

    def __init__(self):
        super().__init__()
        hidden = nn.Linear(2, 40, bias=False), nn.BatchNorm1d(40), nn.Linear(40, 9)
        self.net = nn.Sequential(*hidden, nn.GELU(), nn.Linear(9, 1)).double()
        self.tied = self.net[2]

    def forward(self, x, y, mode='loss'):
        return super().forward(x.double(), y.double(), mode)


WRAPPERS = {
    'ddp': dict(type='MMDistributedDataParallel'),
    'shards': dict(type='FullyShardedDataParallel', units=['net.0', 'net.2', 'net.4']),
}
if not CAN_SHARD_ON_CPU:  # fully_shard of torch 2.6 needs GPUs
    del WRAPPERS['shards']


def runner_of(
    work_dir,
    world_size,
    wrapper,
    losses=None,
    stop=15,
    resume=True,
    model=None,
    sync_bn='torch',
    **kwargs,
):
    cfg = dict(sync_bn=sync_bn)
    if world_size > 1:
        cfg['model_wrapper_cfg'] = WRAPPERS[wrapper]
    torch.manual_seed(0)
    return toy_runner(
        work_dir,
        losses,
        model=Model() if model is None else model,
        loader=dict(dataset=ToyData(43), batch_size=BATCH // world_size),  # 43: no rank's share
        launcher='pytorch' if world_size > 1 else 'none',
        train_cfg=dict(by_epoch=True, max_epochs=3, stop_at_iter=stop),
        optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.05)),
        default_hooks=dict(checkpoint=dict(interval=1, sharded=True, asynchronous=world_size == 4)),
        resume=resume,
        cfg=cfg,
        **kwargs,
    )


def state_of(runner):
    state = gather_state(run_state(runner, {}, save_optimizer=True, save_param_scheduler=True))
    momenta = state['optimizer']['state']
    flat = {f'{i}.{key}': value for i, part in momenta.items() for key, value in part.items()}
    return {**state['state_dict'], **flat}


def train_part(rank, world_size, folder, wrapper, stop):
    if world_size > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    losses = Losses()
    runner = runner_of(f'{folder}/{wrapper}', world_size, wrapper, losses, stop)
    runner.train()
    return [loss for _, loss in losses.seen], state_of(runner)


def train_both(rank, world_size, folder, stop):
    """One part of a run under DDP, and of one with shards; and what else ranks can check here."""
    results = {wrapper: train_part(rank, world_size, folder, wrapper, stop) for wrapper in WRAPPERS}
    if 'shards' in WRAPPERS:
        check_files(rank, world_size, Path(folder))
    return results


def check_files(rank, world_size, folder):
    """Two ranks write one file of all shards; four read it as the shards that they hold."""
    work_dir = folder / 'single'
    runner = runner_of(work_dir, world_size, 'shards', resume=world_size == 4)
    if world_size == 2:
        runner.train_loop  # noqa: B018 (built when asked for)
        runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
        runner.resume(str(folder / 'shards' / 'iter_4.dcp'))
        runner.save_checkpoint(str(work_dir), 'one.pth', meta=dict(epoch=0, iter=4))
        return
    runner._load_from = str(work_dir / 'one.pth')
    runner.train_loop  # noqa: B018
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    runner.load_or_resume()
    from_file = state_of(runner)
    runner.resume(str(folder / 'shards' / 'iter_4.dcp'))
    assert all(isinstance(p, DTensor) for p in runner.model.parameters())
    if rank == 0:
        assert_same_step(from_file, state_of(runner), tolerance=0.0)
    else:
        state_of(runner)  # gathers, with rank 0


@pytest.mark.slow
def test_a_run_goes_on_from_two_ranks_on_four_and_then_on_one(tmp_path):
    losses, expected = train_part(0, 1, str(tmp_path / 'whole'), 'none', 15)
    parts = {
        2: run_ranks(2, train_both, str(tmp_path), STEPS['two'], timeout_s=TIMEOUT_S),
        4: run_ranks(4, train_both, str(tmp_path), STEPS['four'], timeout_s=TIMEOUT_S),
    }
    for wrapper in WRAPPERS:
        seen = []
        for ranks in parts.values():
            of_ranks = [results[wrapper][0] for results in ranks]
            seen += torch.tensor(of_ranks, dtype=torch.float64).mean(0).tolist()
        last, final = train_part(0, 1, str(tmp_path), wrapper, STEPS['one'])
        assert seen + last == pytest.approx(losses, rel=1e-9), wrapper
        assert_same_step(final, expected, tolerance=1e-9)
        assert len(last) == 15 - 9


@pytest.mark.slow
@pytest.mark.parametrize('wrapper', WRAPPERS)
def test_each_rank_writes_its_share(tmp_path, wrapper):
    run_ranks(2, train_part, str(tmp_path), wrapper, 2, timeout_s=TIMEOUT_S)
    folder = tmp_path / wrapper / 'iter_2.dcp'
    sizes = [path.stat().st_size for path in sorted(folder.glob('*.distcp'))]
    assert len(sizes) == 2
    assert max(sizes) < 0.7 * sum(sizes)
    assert read_sharded(folder)['state_dict']['net.0.weight'].shape == (40, 2)


class Unsynced(Model):
    """BatchNorm of each rank's own, under a second name, too."""

    def __init__(self):
        super().__init__()
        self.again = self.net[1]


def save_with_average(rank, world_size, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    runner = runner_of(folder, world_size, 'ddp', stop=2, model=Unsynced(), sync_bn=None)
    runner.register_hook(dict(type='EMAHook'))
    runner.train()
    return {name: tensor.clone() for name, tensor in runner.model.module.state_dict().items()}


@pytest.mark.slow
def test_statistics_are_those_of_rank_0_also_in_what_hooks_add(tmp_path):
    states = run_ranks(2, save_with_average, str(tmp_path), timeout_s=TIMEOUT_S)
    checkpoint = read_sharded(tmp_path / 'iter_2.dcp')
    buffers = [name for name in states[0] if 'running' in name]
    assert len(buffers) == 4
    for name in buffers:
        assert not torch.equal(states[0][name], states[1][name])
        # EMAHook has swapped the two; its copy's statistics are the model's
        assert torch.equal(checkpoint['ema_state_dict'][f'module.{name}'], states[0][name]), name
        assert torch.equal(checkpoint['state_dict'][name], states[0][name]), name
