"""A step that was not finite is carried out again bit for bit, and what is wrong in it named."""

import os
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from torch import nn

from memengine.engine.checkpoint.files import CheckpointError
from memengine.engine.faults.culprit import watched
from memengine.engine.faults.finite_state import NonFiniteError
from memengine.engine.faults.replay import replay
from memengine.testing import run_ranks
from tests.engine.faults.faulty import BAD, build
from tests.marks import NEEDS_SHARDING

WEIGHT = 'backbone.blocks.1.fault.weight'
MODULE = 'backbone.blocks.1.fault'
SLICES = dict(type='AccumulationOptimWrapper', micro_batch_size=1)
CACHE = dict(type='GradCacheOptimWrapper', chunk_size=2)

CHEAP = {
    'output': dict(fault='output'),
    'gradient': dict(fault='gradient'),
    'loss': dict(model='FaultySimCLR'),
}
DEAR = {
    'one by one': dict(model='OneByOne', fault='output', batch_norm=False),
    'one by one, image': dict(model='OneByOne', data=dict(not_finite=True), batch_norm=False),
    'parameter': dict(fault='parameter'),
    'image': dict(data=dict(not_finite=True), batch_norm=False),
    'loss of a sum': dict(model='FaultyClassifier', optim_wrapper=dict(accumulative_counts=2)),
    'slice, output': dict(fault='output', optim_wrapper=SLICES, batch_norm=False),
    'slice, gradient': dict(fault='gradient', optim_wrapper=SLICES, batch_norm=False),
    'cache, output': dict(model='SimCLR', fault='output', optim_wrapper=CACHE, batch_norm=False),
    'cache, gradient': dict(
        model='SimCLR', fault='gradient', optim_wrapper=CACHE, batch_norm=False
    ),
    'cache, kept graph': dict(
        model='SimCLR',
        fault='gradient',
        optim_wrapper=dict(CACHE, keep_graph=1),
        batch_norm=False,
    ),
    'cache, loss': dict(model='FaultySimCLR', optim_wrapper=CACHE, batch_norm=False),
    'bf16': dict(fault='gradient', optim_wrapper=dict(precision='bf16')),
    'fp16, output': dict(fault='output', optim_wrapper=dict(precision='fp16')),
    'fp16, gradient that no scale mends': dict(
        fault='gradient',
        data=dict(every=True),
        optim_wrapper=dict(precision='fp16'),
        train_cfg=dict(by_epoch=True, max_epochs=10),
    ),
    'checkpointed': dict(fault='gradient', activation_checkpointing=['backbone.blocks.*']),
    'recomputed': dict(fault='gradient', recomputed_activations=True),
    'quantised': dict(fault='gradient', quantized_activations=dict(bits=8, min_numel=1)),
    'dropped': dict(fault='gradient', dropit=0.5),
    'accumulated': dict(fault='gradient', optim_wrapper=dict(accumulative_counts=2)),
    'in backward': dict(
        fault='gradient', optim_wrapper=dict(type='OptimizerInBackwardOptimWrapper')
    ),
}
SHARDED = dict(model_wrapper_cfg=dict(type='FullyShardedDataParallel'))
RANKS = {
    'data parallel': [dict(fault='gradient'), dict(fault='output', batch_norm=False)],
    'sharded': [
        dict(fault='gradient', **SHARDED),
        dict(fault='output', optim_wrapper=SLICES, batch_norm=False, **SHARDED),
    ],
}
EACH = [
    *(pytest.param(case, id=name) for name, case in CHEAP.items()),
    *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in DEAR.items()),
]


def captured(tmp_path, **case):
    """The file that a run leaves that meets a fault."""
    with pytest.raises(NonFiniteError, match='memengine replay'):
        build(tmp_path, **case).train()
    (path,) = (tmp_path / 'nonfinite').glob('iter_*.pth')
    return path


def check(found, case):
    assert found.same
    fault = case.get('fault')
    if fault == 'output':
        assert found.culprit.module == MODULE
        assert found.losses['loss'] != found.losses['loss'] or 'inf' in str(found.losses['loss'])
    if fault == 'gradient':
        assert found.culprit.module is None
        # Compressed and checkpointed blocks may hand on what the module inside gave.
        assert found.culprit.gradient_of.startswith('backbone.blocks.1')
        assert found.losses['loss'] == found.losses['loss']
    if fault == 'parameter':
        assert found.culprit.parameter == WEIGHT
        assert found.culprit.gradient_of is None
    if fault in ('output', 'gradient') and not case.get('data'):
        assert found.samples == [f'image_{BAD}.png']
    if 'data' in case and 'not_finite' in case['data']:
        assert found.culprit.in_data
        assert found.samples == [f'image_{BAD}.png']
    if 'chunk_size' in str(case) or 'micro_batch_size' in str(case):
        assert found.culprit.slices > 1
        assert (found.culprit.slice is None) == (fault is None)
    if fault != 'parameter' and fault is not None:
        assert found.culprit.parameter is not None


@pytest.mark.fault(
    'A NaN in a loss, a gradient, an image, a slice, a rank',
    'the step is captured; memengine replay repeats it bit for bit and names where it begins',
    '27 of 27 injected faults',
)
@pytest.mark.parametrize('case', EACH)
def test_a_fault_is_replayed_and_named(tmp_path, case):
    path = captured(tmp_path, **case)
    (found,) = replay(path, Config.fromfile(path.with_name('config.py')))
    check(found, case)


def _on_ranks(rank, world_size, folder, cases):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    found = []
    for number, case in enumerate(cases):
        with pytest.raises(NonFiniteError, match='memengine replay') as error:
            build(Path(folder, str(number)), launcher='pytorch', **case).train()
        torch.distributed.barrier()  # rank 0 writes the config last
        path = Path(str(error.value).rpartition(' ')[2])
        found.append(replay(path, Config.fromfile(path.with_name('config.py'))))
    return found


@pytest.mark.parametrize('kind', ['data parallel', pytest.param('sharded', marks=NEEDS_SHARDING)])
def test_a_fault_on_one_of_two_ranks_is_named_with_its_rank(tmp_path, kind):
    cases = RANKS[kind]
    for found in run_ranks(2, _on_ranks, str(tmp_path), cases):
        for case, ranks in zip(cases, found, strict=True):
            assert [one.rank for one in ranks] == [0, 1]
            assert all(one.same for one in ranks)
            (bad,) = [one for one in ranks if one.samples]
            check(bad, case)


def test_a_step_of_two_ranks_is_not_replayed_by_one(tmp_path, monkeypatch):
    path = captured(tmp_path, fault='output')
    content = torch.load(path, weights_only=False)
    torch.save({**content, 'world_size': 2}, path)
    cfg = Config.fromfile(path.with_name('config.py'))
    with pytest.raises(ValueError, match='by 2 rank.* torchrun --nproc_per_node 2'):
        replay(path, cfg)
    monkeypatch.delenv('RANK', raising=False)
    cfg.launcher = 'pytorch'
    with pytest.raises(ValueError, match='by 2 rank.* torchrun --nproc_per_node 2'):
        replay(path, cfg)


class Windows(nn.Module):
    """Runs a layer on windows: twice as many rows as samples, those of a sample together."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(2, 2), nn.Linear(4, 1)

    def forward(self, inputs, data_samples=None, mode='loss'):
        return {'loss': self.outer(self.inner(inputs.reshape(-1, 2)).reshape(-1, 4))}


def test_rows_of_windows_are_not_taken_for_samples():
    inputs = torch.zeros(4, 4)
    inputs[2, 3] = torch.finfo(torch.float32).max  # finite; what comes of it is not
    model = Windows()
    model.inner.weight.data.fill_(8)
    with watched(model, dict(inputs=inputs)) as culprit:
        model(inputs)
    assert culprit.module == 'inner'
    assert culprit.samples == [2]
    with watched(model, dict(inputs=[inputs, inputs])) as culprit:  # two views, so twice the rows
        model.inner(torch.cat([inputs, inputs])[:, 2:])
    assert culprit.samples == [2]


def test_as_many_faults_as_are_told_of():
    assert len(CHEAP) + len(DEAR) + sum(map(len, RANKS.values())) == 27


def test_a_file_that_is_no_capture_is_refused(tmp_path):
    torch.save(dict(format=-1), tmp_path / 'x.pth')
    with pytest.raises(CheckpointError, match='no captured step'):
        replay(tmp_path / 'x.pth', Config({}))
    with pytest.raises(CheckpointError, match='there is no captured step'):
        replay(tmp_path / 'y.pth', Config({}))
