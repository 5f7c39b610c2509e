"""Ranks evaluate one model, the one that a checkpoint holds, and do not wait for each other."""

import os
from pathlib import Path

import pytest
import torch
from mmengine.evaluator import BaseMetric
from torch.utils.data import DataLoader, IterableDataset

from memengine.testing import run_ranks
from tests.engine.test_fsdp import Images, runner_of
from tests.engine.toy import ToyData, ToyModel, params, toy_runner
from tests.marks import NEEDS_SHARDING


class MeanOutput(BaseMetric):
    default_prefix = 'mean'

    def process(self, data_batch, data_samples):
        self.results += [output.item() for output in data_samples]

    def compute_metrics(self, results):
        return dict(output=sum(results) / len(results))


def evaluating_runner(work_dir, world_size, **kwargs):
    loader = dict(dataset=ToyData(10), batch_size=2, num_workers=0)
    loader['sampler'] = dict(type='DefaultSampler', shuffle=False)
    loader['collate_fn'] = dict(type='default_collate')
    return toy_runner(
        work_dir,
        loader=dict(batch_size=4 // world_size),
        launcher='pytorch' if world_size > 1 else 'none',
        val_dataloader=loader,
        val_cfg=dict(),
        val_evaluator=[MeanOutput()],
        **kwargs,
    )


def _evaluated(rank, world_size, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    figures = []
    for work_dir, stops in (('whole', [None]), ('parts', [7, None])):
        for stop in stops:  # in the middle of the second epoch
            train_cfg = dict(by_epoch=True, max_epochs=3, stop_at_iter=stop)
            runner = evaluating_runner(
                f'{folder}/{work_dir}', world_size, train_cfg=train_cfg, resume=True
            )
            runner.train()
        figures.append(runner.message_hub.get_scalar('val/mean/output').data[0].tolist())
    return figures


def test_ranks_evaluate_what_the_checkpoint_holds(tmp_path):
    """Each rank's BatchNorm has statistics of its own; a checkpoint has those of rank 0."""
    for whole, resumed in run_ranks(2, _evaluated, str(tmp_path)):
        assert resumed == whole
        for epoch, figure in enumerate(whole, start=1):
            one = evaluating_runner(tmp_path / 'one', 1)
            one.load_checkpoint(str(Path(tmp_path, 'whole', f'epoch_{epoch}.pth')))
            assert one.val()['mean/output'] == pytest.approx(figure, rel=1e-6)


class ReadsStatistics(ToyModel):
    """Its loss reads what BatchNorm has gathered, as one with a teacher in eval mode does."""

    def forward(self, x, y, mode='loss'):
        found = super().forward(x, y, mode)
        if mode == 'loss':
            weight = sum(parameter.sum() for parameter in self.parameters())
            found['loss'] = found['loss'] + weight * self.net[1].running_mean.sum()
        return found


def _trained(rank, world_size, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    found = []
    for interval in (1, 3):
        torch.manual_seed(0)
        runner = evaluating_runner(
            f'{folder}/{interval}',
            world_size,
            model=ReadsStatistics(),
            train_cfg=dict(by_epoch=True, max_epochs=3, val_interval=interval),
        )
        runner.train()
        found.append(params(runner))
    return found


def test_what_is_learned_does_not_hang_on_evaluations(tmp_path):
    for often, once in run_ranks(2, _trained, str(tmp_path)):
        assert all(torch.equal(often[name], once[name]) for name in once)


def _unequal(rank, world_size, work_dir):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    sampler = dict(type='DefaultSampler', shuffle=False, round_up=False)
    collate = dict(type='default_collate')
    loader = dict(dataset=FiveImages(), batch_size=1, num_workers=0, sampler=sampler)
    wrapper = dict(type='FullyShardedDataParallel')
    runner, _ = runner_of(
        work_dir, world_size, wrapper, val_dataloader={**loader, 'collate_fn': collate}
    )
    with pytest.raises(ValueError, match=r'val_dataloader: .* 3, 2 batches.*round_up=True'):
        runner.train()
    runner, _ = runner_of(f'{work_dir}/ddp', world_size, None, custom_hooks=[])
    runner._val_dataloader = {**loader, 'collate_fn': collate}
    runner.val()  # where ranks hold all of the model, they need not have as many


class FiveImages(Images):
    def __len__(self):
        return 5


@NEEDS_SHARDING
@pytest.mark.edge(
    'sharding', 'refused', 'An evaluation in which ranks have different numbers of batches'
)
def test_shards_want_as_many_batches_on_each_rank(tmp_path):
    run_ranks(2, _unequal, str(tmp_path), timeout_s=120)


class Endless(IterableDataset):
    """Data without a length."""

    def __iter__(self):
        yield from map(ToyData(10).__getitem__, range(10))


class Counted(DataLoader):
    """A loader that knows how many batches it gives of data without a length."""

    def __len__(self):
        return 5


def test_a_loader_that_counts_its_batches_itself_is_trained_with(tmp_path):
    loader = Counted(Endless(), batch_size=2)
    train_cfg = dict(by_epoch=True, max_epochs=2)
    runner = toy_runner(tmp_path, train_cfg=train_cfg, train_dataloader=loader)
    runner.train()
    assert runner.iter == 10


@pytest.mark.parametrize('is_built', [False, True])
@pytest.mark.parametrize('which', ['train', 'val', 'test'])
def test_data_without_a_length_are_refused(tmp_path, which, is_built):
    loader = dict(dataset=Endless(), batch_size=2, num_workers=0)
    loader |= dict(sampler=dict(type='DefaultSampler', shuffle=False))
    given = DataLoader(Endless(), batch_size=2) if is_built else loader
    settings = {f'{which}_dataloader': given}
    if which != 'train':
        settings |= {f'{which}_cfg': dict(), f'{which}_evaluator': [MeanOutput()]}
    name = f'{which}_dataloader' if is_built else 'dataset'
    with pytest.raises(ValueError, match=f'{name}: Endless has no length'):
        getattr(toy_runner(tmp_path, **settings), which)()
