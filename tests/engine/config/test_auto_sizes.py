"""Sizes of slices that are ``'auto'``: planned, remembered, agreed upon."""

import math

import pytest
import torch

from memengine.engine.config import memory_budget
from memengine.engine.config.check import ConfigError, check_config
from memengine.engine.config.file import load_config
from memengine.engine.config.memory_budget import keep_budget
from memengine.engine.config.planning import Planner, budget_for
from memengine.engine.config.planning.predictions import Predictions
from memengine.engine.distributed import processes
from memengine.memory.planning import Cost
from memengine.testing import run_ranks
from tests.engine.config.test_planning import CLASSIFIER, DINO, SIMCLR, SMALL

MIB = 2**20
AUTO = {
    'optim_wrapper.type': 'AccumulationOptimWrapper',
    'optim_wrapper.micro_batch_size': 'auto',
}
CACHE = {'optim_wrapper.type': 'GradCacheOptimWrapper', 'optim_wrapper.chunk_size': 'auto'}


def predicted(predictions, options, blocks):
    """In place of a prediction: a mebibyte for each image of a slice, on two that stay."""
    batch = options.get('train_dataloader.batch_size', 32)
    size = options.get('optim_wrapper.micro_batch_size', batch)
    flops = int(1e9 * (1 + 0.01 * math.ceil(batch / size)))
    return Cost((2 + size) * MIB, flops, 0, 100, {'parameters': MIB}), ''


@pytest.fixture
def room(monkeypatch):
    """Sets how many mebibytes a prediction may come to."""
    monkeypatch.setattr(Predictions, '_predict', predicted)

    def there_is(mib):
        monkeypatch.setattr(memory_budget, 'room_bytes', lambda device: budget_for(mib * MIB))

    return there_is


def config(folder, name=CLASSIFIER, **options):
    options = {**SMALL, 'train_dataloader.batch_size': 32, 'work_dir': str(folder), **options}
    cfg = load_config(name, options)
    check_config(cfg)
    return cfg


def planned(folder, **options):
    cfg = config(folder, **{**AUTO, **options})
    assert keep_budget(cfg)
    return cfg.optim_wrapper.micro_batch_size


def test_the_size_follows_the_memory_and_is_remembered(tmp_path, room, monkeypatch):
    room(18)
    cfg = config(tmp_path, **AUTO)
    assert keep_budget(cfg).startswith("micro_batch_size='auto': ")
    number = {**AUTO, 'optim_wrapper.micro_batch_size': 16}
    assert cfg.to_dict() == config(tmp_path, **number).to_dict(), 'the training is the same'
    assert planned(tmp_path, memory_budget='40MiB') == 32  # it may grow ...
    room(10)
    assert planned(tmp_path) == 8  # ... and shrink
    room(18)  # a moment's figure, which would be another one at each start
    monkeypatch.setattr(memory_budget, 'Planner', None)
    assert planned(tmp_path, resume=True) == 8
    with pytest.raises(TypeError):  # of another batch it is asked again
        planned(tmp_path, **{'train_dataloader.batch_size': 16})


def test_what_is_remembered_is_planned_anew_where_it_no_longer_fits(tmp_path, room):
    room(18)
    assert planned(tmp_path) == 16
    room(10)
    assert planned(tmp_path, resume=True) == 8


@pytest.mark.parametrize(
    ('name', 'options', 'why'),
    [
        (DINO, AUTO, 'BatchNorm'),
        (SIMCLR, {**CACHE, 'optim_wrapper.keep_graph': 2}, 'keep_graph: .* is planned with it'),
        (CLASSIFIER, CACHE, "use 'AccumulationOptimWrapper'"),
    ],
)
def test_what_is_refused(tmp_path, room, name, options, why):
    room(100)
    with pytest.raises(ConfigError, match=why):
        keep_budget(config(tmp_path, name, **options))


def test_kept_graphs_follow_from_the_memory(tmp_path, room, monkeypatch):
    def by_graphs(predictions, options, blocks):
        kept = options.get('optim_wrapper.keep_graph', 64)  # the plain step's is all
        return Cost((2 + kept) * MIB, int(1e9 / (1 + kept)), 0, 100), ''

    monkeypatch.setattr(Predictions, '_predict', by_graphs)
    monkeypatch.setattr(
        Planner, 'cost', lambda self, plan: self._steps.predicted(self.options(plan))
    )
    auto = {**CACHE, 'optim_wrapper.chunk_size': 4, 'optim_wrapper.keep_graph': 'auto'}
    room(10)  # of 16 slices
    cfg = config(tmp_path, SIMCLR, **auto)
    assert keep_budget(cfg) == (
        "keep_graph='auto': optim_wrapper.type=GradCacheOptimWrapper optim_wrapper.chunk_size=4 "
        'optim_wrapper.keep_graph=8'
    )
    expected = config(tmp_path, SIMCLR, **{**auto, 'optim_wrapper.keep_graph': 8})
    assert cfg.to_dict() == expected.to_dict(), 'the training is that of the number'
    room(1)  # for nothing at all, as free memory is only a guess
    cfg = config(tmp_path / 'other', SIMCLR, **auto)
    assert keep_budget(cfg).endswith('it is measured in the first iterations')
    assert cfg.optim_wrapper.keep_graph == 'auto'


def plan_on_rank(rank, world_size, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Predictions, '_predict', predicted)
        room = budget_for((10 - 2 * rank) * MIB)
        patch.setattr(memory_budget, 'room_bytes', lambda device: room)
        cfg = config(folder / 'both', launcher='pytorch', **AUTO)
        keep_budget(cfg)
        patch.setattr(memory_budget, 'room_bytes', lambda device: (20 - 19 * rank) * MIB)
        with pytest.raises(ConfigError) as raised:  # by rank 1, and rank 0 does not wait
            keep_budget(config(folder / 'one', launcher='pytorch', **AUTO))
    return cfg, str(raised.value)


def test_ranks_take_the_plan_of_the_one_with_the_least_room(tmp_path):
    number = {**AUTO, 'optim_wrapper.micro_batch_size': 6}  # of 8 MiB
    expected = config(tmp_path / 'both', launcher='pytorch', **number)
    for cfg, refused in run_ranks(2, plan_on_rank, tmp_path):
        assert cfg.to_dict() == expected.to_dict(), 'the training is that of the number'
        assert 'nothing fits 1.0 MiB' in refused


def test_a_rank_asks_its_own_gpu(tmp_path, room, monkeypatch):
    """One that asked the first one would take memory of it, and plan for what that has."""
    ranks = dict(RANK='1', LOCAL_RANK='1', WORLD_SIZE='2', LOCAL_WORLD_SIZE='2')
    for name, value in {**ranks, 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '1'}.items():
        monkeypatch.setenv(name, value)
    current = []
    monkeypatch.setattr(processes, 'get_device', lambda: 'cuda')
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setattr(torch.cuda, 'set_device', current.append)
    room(18)
    there_is = memory_budget.room_bytes
    asked = []

    def room_bytes(device):
        asked.append(list(current))
        return there_is(device)

    class MeetingError(Exception):
        """All is planned."""

    def meet(*_):
        raise MeetingError

    monkeypatch.setattr(memory_budget, 'room_bytes', room_bytes)
    monkeypatch.setattr(memory_budget, 'init_process_group', meet)
    with pytest.raises(MeetingError):
        keep_budget(config(tmp_path, launcher='pytorch', **AUTO))
    assert asked == [[1]]
