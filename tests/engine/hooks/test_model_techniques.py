"""Checkpointing, offload and compiled blocks from a config: keys, hooks, base configs."""

from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.model import BaseModel
from mmengine.runner import Runner as PlainRunner
from torch import nn

from memengine._torch_private.ops import compiled_checkpoints_write_twice
from memengine.engine.hooks import (
    ActivationCheckpointingHook,
    ActivationOffloadHook,
    CompileBlocksHook,
)
from memengine.memory import SavedBytes
from memengine.testing import assert_same_step
from tests.engine.hooks.images import Images, image_runner, loader

BASE = Path(__file__).parents[3] / 'configs/_base_/techniques'


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.one, self.two = nn.BatchNorm1d(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.dropout(self.two(self.one(self.norm(x)).tanh()))


class Network(BaseModel):
    """Blocks with BatchNorm and dropout, an unused layer, and a note of what a forward leaves."""

    def __init__(self):
        super().__init__()
        self.stem, self.head, self.unused = nn.Linear(64, 16), nn.Linear(16, 3), Block()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.kept = []

    def forward(self, inputs, data_samples=None, mode='tensor'):
        with SavedBytes(self, inputs) as saved:
            features = self.blocks(self.stem(inputs.flatten(1)))
        if mode == 'predict':
            return [{'feature': feature} for feature in features]
        self.kept.append(saved.live_bytes)
        loss = nn.functional.cross_entropy(self.head(features), data_samples['label'])
        return {'loss': loss}


def train(work_dir, *hooks, **cfg):
    torch.manual_seed(0)
    run = image_runner(work_dir, *hooks, model=Network(), epochs=1, cfg=Config(cfg))
    run.train()
    assert all('forward' not in vars(module) for module in run.model.modules())
    return run.model.state_dict(), run.model.kept


def base(name):
    return Config.fromfile(BASE / f'{name}.py').to_dict()


CHECKPOINTED = {
    'key': dict(activation_checkpointing=['blocks']),
    'key as a string': dict(activation_checkpointing='[blocks]'),
    'key with a dict': dict(activation_checkpointing=dict(modules='Block', every=1)),
    'names': dict(activation_checkpointing=[f'blocks.{index}' for index in range(4)]),
    'hook': dict(hooks=[ActivationCheckpointingHook()]),
    'hook by name': dict(hooks=[dict(type='ActivationCheckpointingHook', modules='blocks.*')]),
    'base config': base('activation_checkpointing'),
}


@pytest.fixture(scope='module')
def expected(tmp_path_factory):
    return train(tmp_path_factory.mktemp('plain'))


@pytest.mark.parametrize('way', CHECKPOINTED)
def test_checkpointing(way, expected, tmp_path):
    settings = dict(CHECKPOINTED[way])
    state, kept = train(tmp_path, *settings.pop('hooks', ()), **settings)
    assert_same_step(state, expected[0], 1e-5)  # in fp32, over six steps of AdamW
    assert len(kept) == 6 and max(kept) < 0.3 * max(expected[1])
    log = next(tmp_path.glob('*/*.log')).read_text()
    assert 'Activation checkpointing: ' in log and 'blocks.3' in log


def test_selective_budget_offload_and_compile_together(expected, tmp_path):
    settings = dict(
        activation_checkpointing=dict(keep=['matmuls']),
        activation_offload=dict(min_bytes=64),
    )
    if not compiled_checkpoints_write_twice():  # else refused, as the blocks have BatchNorm
        settings.update(compile_blocks=dict(backend='aot_eager'))
    state, kept = train(tmp_path / 'together', **settings)
    assert_same_step(state, expected[0], 1e-5)
    settings = dict(
        activation_checkpointing=dict(budget=0.5),
        activation_offload=dict(min_bytes=64, store='host'),
    )
    assert_same_step(train(tmp_path / 'budget', **settings)[0], expected[0], 1e-5)


OFFLOADED = {
    'key': dict(activation_offload=dict(min_bytes=64)),
    'hook': dict(hooks=[ActivationOffloadHook('host', min_bytes=64)]),
}


@pytest.mark.parametrize('way', OFFLOADED)
def test_offload(way, expected, tmp_path):
    settings = dict(OFFLOADED[way])
    state, kept = train(tmp_path, *settings.pop('hooks', ()), **settings)
    assert_same_step(state, expected[0], 1e-5)
    assert max(kept) < 0.1 * max(expected[1])
    assert 'MiB moved in the first iteration' in next(tmp_path.glob('*/*.log')).read_text()


@pytest.mark.parametrize(
    'settings', [dict(compile_blocks=dict(backend='eager')), dict(hooks=True)], ids=['key', 'hook']
)
def test_compiled_blocks(settings, expected, tmp_path):
    torch._dynamo.reset()
    hooks = [CompileBlocksHook(backend='eager')] if settings.pop('hooks', None) else []
    assert_same_step(train(tmp_path, *hooks, **settings)[0], expected[0], 1e-5)
    assert 'Compiled blocks: 4 modules' in next(tmp_path.glob('*/*.log')).read_text()


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        (dict(activation_checkpointing=['block']), "did you mean 'blocks'"),
        (dict(activation_checkpointing=['unused']), 'unused: it is never called; name modules'),
        (dict(activation_offload=True), 'saved nothing of at least min_bytes=1048576'),
        (dict(compile_blocks=['bloks']), "compile_blocks: .* did you mean 'blocks'"),
        (dict(compile_blocks=True, compile=True), 'compile_blocks its blocks; set one'),
    ],
)
def test_what_does_nothing_is_an_error(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(tmp_path, **settings)


def test_what_does_nothing_and_is_allowed_to(tmp_path):
    train(tmp_path / 'a', ActivationCheckpointingHook('unused', strict=False))
    assert 'unused: it is never called' in next((tmp_path / 'a').glob('*/*.log')).read_text()
    train(tmp_path / 'b', ActivationOffloadHook(strict=False))
    train(tmp_path / 'c', activation_checkpointing=['unused', 'blocks'])
    assert '1 of 5 modules' in next((tmp_path / 'c').glob('*/*.log')).read_text()


def test_plain_runner_of_mmengine_takes_the_hooks(tmp_path):
    hooks = [ActivationCheckpointingHook(), ActivationOffloadHook(min_bytes=64)]
    if not compiled_checkpoints_write_twice():
        hooks.append(CompileBlocksHook(backend='aot_eager'))
    run = PlainRunner(
        Network(),
        str(tmp_path),
        train_dataloader=loader(Images()),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01)),
        custom_hooks=hooks,
        experiment_name='techniques_plain',
    )
    run.train()
    assert all('forward' not in vars(module) for module in run.model.modules())
