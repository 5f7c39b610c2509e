"""Checkpoints of averages of few bits can be read by any ranks."""

import os

import pytest
import torch
from torch.distributed.tensor import DTensor

from memengine._torch_private.distributed import CAN_SHARD_ON_CPU
from memengine.engine.checkpoint.convert import convert
from memengine.engine.checkpoint.sharded import read_sharded
from memengine.techniques.optimizer_memory.adamw_low_bit import in_full_precision
from memengine.techniques.sharding.clipping import local_part
from memengine.testing import relative_error, run_ranks
from tests.engine.toy import ToyModel, toy_runner

pytest.importorskip('torchao.optim')

NAMES = ['AdamW8bit', 'AdamW4bit']
WRAPPERS = [None, dict(type='FullyShardedDataParallel')][: 1 + CAN_SHARD_ON_CPU]
FORMS = dict(dcp=True, pth=False)
ROUNDING = dict(AdamW8bit=0.03, AdamW4bit=0.3)  # of an average, once more


class Wide(ToyModel):
    """With matrices that are large enough to be coded, also in shards."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(2, 128), torch.nn.Linear(128, 128), torch.nn.Linear(128, 1)
        )


def runner_of(folder, name, world_size=1, wrapper=None, sharded=True, stop=None):
    if world_size > 1:
        os.environ['WORLD_SIZE'] = str(world_size)
    return toy_runner(
        folder,
        model=Wide(),
        loader=dict(batch_size=4 // world_size),
        launcher='pytorch' if world_size > 1 else 'none',
        train_cfg=dict(by_epoch=True, max_epochs=3, stop_at_iter=stop),
        optim_wrapper=dict(optimizer=dict(type=name, lr=0.01)),
        default_hooks=dict(checkpoint=dict(interval=3, sharded=sharded)),
        resume=stop is None,
        cfg=dict(model_wrapper_cfg=wrapper) if wrapper else {},
    )


def averages(runner):
    """What the optimiser holds of the matrix in the middle, as whole numbers; and coded or not."""
    optimizer = runner.optim_wrapper.optimizer
    parameter = max(optimizer.state, key=lambda one: one.numel())
    state = optimizer.state[parameter]
    coded = type(local_part(state['exp_avg'])).__module__.startswith('torchao')
    numbers = {name: in_full_precision(state[name]) for name in ('exp_avg', 'exp_avg_sq')}
    whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in numbers.items()}
    return {name: tensor.clone() for name, tensor in whole.items()}, coded


def loaded(folder, name, *options):
    """The averages with which a run goes on from a folder; it is trained to its end then."""
    runner = runner_of(folder, name, *options)
    runner.train_loop  # noqa: B018 (built when asked for)
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    runner.load_or_resume()
    found = averages(runner)
    runner_of(folder, name, *options).train()
    return found


def _saved_and_read(rank, world_size, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    results = {}
    for name in NAMES:
        for number, wrapper in enumerate(WRAPPERS):
            for form, sharded in FORMS.items():
                options = (f'{folder}/{name}{number}{form}', name, world_size, wrapper, sharded)
                runner = runner_of(*options, stop=7)
                runner.train()
                results[name, number, form] = averages(runner), loaded(*options)
    return results


def test_ranks_go_on_from_averages_of_few_bits_and_so_does_one(tmp_path):
    for results in run_ranks(2, _saved_and_read, str(tmp_path)):
        for (name, *_), (saved, found) in results.items():
            assert_alike(found, saved, ROUNDING[name])
    for (name, number, form), (saved, _) in results.items():
        folder = tmp_path / f'{name}{number}{form}'
        (folder / 'last_checkpoint').write_text(str(folder / f'iter_7.{form}'))
        assert_alike(loaded(folder, name), saved, ROUNDING[name])


def assert_alike(found, saved, tolerance):
    assert found[1] and saved[1], 'coded'
    for key, numbers in saved[0].items():
        assert relative_error(found[0][key], numbers) < tolerance


@pytest.mark.parametrize('name', NAMES)
def test_a_file_with_codes_becomes_a_folder(tmp_path, name):
    runner = runner_of(tmp_path, name, sharded=False, stop=7)
    runner.train()
    convert(tmp_path / 'iter_7.pth', tmp_path / 'iter_7.dcp')
    states = read_sharded(tmp_path / 'iter_7.dcp')['optimizer']['state']
    numbers = averages(runner)[0]['exp_avg']
    found = [in_full_precision(state['exp_avg']) for state in states.values()]
    assert any(one.shape == numbers.shape and torch.equal(one, numbers) for one in found)
