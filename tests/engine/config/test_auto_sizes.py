"""Sizes of slices that are ``'auto'``: planned, remembered, agreed upon, and the same training."""

import math
import os

import pytest
import torch
from mmengine.config import Config

from memengine.engine.config import memory_budget
from memengine.engine.config.check import ConfigError, check_config
from memengine.engine.config.file import load_config
from memengine.engine.config.memory_budget import keep_budget
from memengine.engine.config.planning import Planner
from memengine.engine.runner import Runner
from memengine.memory.planning import Cost
from memengine.testing import assert_same_step, run_ranks
from tests.engine.config.test_planning import CLASSIFIER, DINO, SIMCLR, SMALL

MIB = 2**20
AUTO = {
    'optim_wrapper.type': 'AccumulationOptimWrapper',
    'optim_wrapper.micro_batch_size': 'auto',
}
CACHE = {'optim_wrapper.type': 'GradCacheOptimWrapper', 'optim_wrapper.chunk_size': 'auto'}


def predicted(planner, options):
    """In place of a prediction: a mebibyte for each image of a slice, on two that stay."""
    batch = options.get('train_dataloader.batch_size', 32)
    size = options.get('optim_wrapper.micro_batch_size', batch)
    flops = int(1e9 * (1 + 0.01 * math.ceil(batch / size)))
    return Cost((2 + size) * MIB, flops, 0, 100, {'parameters': MIB})


@pytest.fixture
def room(monkeypatch):
    """Sets how much memory there is."""
    monkeypatch.setattr(Planner, '_predict', predicted)

    def there_is(mib):
        monkeypatch.setattr(memory_budget, 'room_bytes', lambda device: int(mib * MIB))

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
    room(20)
    assert planned(tmp_path) == 16  # 2 % and half a mebibyte are left over
    assert planned(tmp_path, memory_budget='40MiB') == 32  # it may grow ...
    room(12)
    assert planned(tmp_path) == 8  # ... and shrink
    room(20)  # a moment's figure, which would be another one at each start
    monkeypatch.setattr(memory_budget, 'Planner', None)
    assert planned(tmp_path, resume=True) == 8
    with pytest.raises(TypeError):  # of another batch it is asked again
        planned(tmp_path, **{'train_dataloader.batch_size': 16})


@pytest.mark.parametrize(
    ('name', 'options', 'why'),
    [
        (DINO, AUTO, 'BatchNorm'),
        (SIMCLR, {**CACHE, 'optim_wrapper.keep_graph': 2}, 'keep_graph: .* is planned with it'),
        (CLASSIFIER, CACHE, "use 'AccumulationOptimWrapper'"),
        (
            SIMCLR,
            {
                **CACHE,
                'optim_wrapper.chunk_size': 8,
                'optim_wrapper.keep_graph': 'auto',
                'memory_budget': '1GiB',
            },
            "set chunk_size='auto', too",
        ),
    ],
)
def test_what_is_refused(tmp_path, room, name, options, why):
    room(100)
    with pytest.raises(ConfigError, match=why):
        keep_budget(config(tmp_path, name, **options))


# ------------------------------------------------------------------ training


def train(folder, name, **options):
    cfg = config(
        folder / name,
        experiment_name=f'{folder.name}_{name}_{os.environ.get("RANK", 0)}',
        console='quiet',
        train_cfg={'stop_at_iter': 2},
        **options,
    )
    runner = Runner.from_cfg(Config(cfg))
    runner.train()
    size = runner.cfg.optim_wrapper.get('micro_batch_size')
    return size, {key: value.clone() for key, value in runner.model.state_dict().items()}


def train_on_rank(rank, world_size, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    launched = {'launcher': 'pytorch'} if world_size > 1 else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Planner, '_predict', predicted)
        patch.setattr(memory_budget, 'room_bytes', lambda device: (14 - 4 * rank) * MIB)
        auto = train(folder, 'auto', **AUTO, **launched)
        patch.setattr(memory_budget, 'room_bytes', lambda device: (14 - 13 * rank) * MIB)
        refused = ''
        if world_size > 1:
            with pytest.raises(ConfigError) as raised:  # by rank 1, and rank 0 does not wait
                train(folder, 'refused', **AUTO, **launched)
            refused = str(raised.value)
    explicit = {**AUTO, 'optim_wrapper.micro_batch_size': auto[0]}
    same = train(folder, 'same', **explicit, **launched)
    plain = train(folder, 'plain', **launched)
    return auto, same, plain, refused


@pytest.mark.parametrize(('world_size', 'size'), [(1, 11), (2, 6)])
def test_the_training_is_that_of_the_number_on_all_ranks(tmp_path, world_size, size):
    for auto, same, plain, refused in run_ranks(world_size, train_on_rank, tmp_path):
        assert auto[0] == same[0] == size  # what the rank with the least room has planned
        assert all(torch.equal(value, auto[1][key]) for key, value in same[1].items())
        assert_same_step(auto[1], plain[1], tolerance=1e-4)  # in fp32: up to the order of sums
        assert world_size == 1 or 'nothing fits 1.0 MiB' in refused
