"""Conv-BN eval from a config: the hook, MMEngine's key, the base config."""

from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner as PlainRunner
from torch import nn

from memengine.engine import Runner
from memengine.engine.hooks import EfficientConvBNEvalHook
from memengine.memory import SavedBytes
from memengine.testing import assert_same_step
from tests.engine.hooks.images import Images, image_runner, loader

ROOT = Path(__file__).parents[3]


class FrozenBN(BaseModel):
    """As mmdet's backbones with ``norm_eval=True``: BatchNorm stays in eval mode."""

    def __init__(self, norm_eval=True):
        super().__init__()
        self.norm_eval = norm_eval
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        )
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4, 3)

    def train(self, mode=True):
        super().train(mode)
        for layer in self.backbone if self.norm_eval else ():
            layer.train(mode and not isinstance(layer, nn.BatchNorm2d))
        return self

    def forward(self, inputs, data_samples=None, mode='tensor'):
        features = self.backbone(inputs).mean((2, 3))
        if mode == 'predict':
            return [{'feature': feature} for feature in features]
        logits = self.head(self.dropout(features))
        return {'loss': nn.functional.cross_entropy(logits, data_samples['label'])}


class Kept(Hook):
    """The bytes that the model's forward leaves in every iteration."""

    priority = 'LOWEST'

    def __init__(self):
        self.live_bytes = []

    def before_train(self, runner):
        model, forward = runner.model, runner.model.forward

        def metered(*args, **kwargs):
            with SavedBytes(model) as meter:
                out = forward(*args, **kwargs)
            self.live_bytes += [meter.live_bytes] if kwargs.get('mode') == 'loss' else []
            return out

        model.forward = metered


def train(work_dir, *hooks, runner=Runner, norm_eval=True, **cfg):
    torch.manual_seed(0)
    kept = Kept()
    run = image_runner(
        work_dir,
        kept,
        *hooks,
        model=FrozenBN(norm_eval),
        runner=runner,
        epochs=1,
        cfg=Config(cfg),
    )
    run.train()
    return dict(run.model.named_parameters()), kept.live_bytes


WAYS = {
    'hook': dict(hooks=[EfficientConvBNEvalHook()]),
    'hook by name': dict(hooks=[dict(type='EfficientConvBNEvalHook', modules=['backbone'])]),
    'key': dict(efficient_conv_bn_eval=['backbone']),
    "key as in MMEngine's page": dict(efficient_conv_bn_eval='[backbone]'),
    'key with arguments': dict(efficient_conv_bn_eval=dict(modules='backbone', strict=False)),
    'base config': Config.fromfile(ROOT / 'configs/_base_/techniques/conv_bn_eval.py').to_dict(),
}


@pytest.fixture(scope='module')
def expected(tmp_path_factory):
    return train(tmp_path_factory.mktemp('plain'))


@pytest.mark.parametrize('way', WAYS)
def test_same_training_in_fewer_bytes(way, expected, tmp_path):
    settings = dict(WAYS[way])
    parameters, kept = train(tmp_path, *settings.pop('hooks', ()), **settings)
    assert_same_step(parameters, expected[0], 1e-4)  # in fp32, over six steps of AdamW
    assert len(kept) == 6 and max(kept) < 0.6 * max(expected[1])
    log = next(tmp_path.glob('*/*.log')).read_text()
    assert '2 of 2 Conv-BN pairs' in log and 'backbone.0 → backbone.1' in log


def test_plain_runner_of_mmengine_takes_the_hook(tmp_path):
    run = PlainRunner(
        FrozenBN(),
        str(tmp_path),
        train_dataloader=loader(Images()),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01)),
        custom_hooks=[EfficientConvBNEvalHook('backbone')],
        experiment_name='conv_bn_plain',
    )
    run.train()
    log = next(tmp_path.glob('*/*.log')).read_text()
    assert 'backbone.0 → backbone.1, backbone.3 → backbone.4' in log
    assert not run.model.backbone[0]._forward_hooks  # as it was


def test_training_twice_begins_twice(tmp_path):
    run = image_runner(tmp_path, EfficientConvBNEvalHook(), model=FrozenBN(), epochs=1)
    for epochs in (1, 2):
        run.train_loop._max_epochs = epochs
        run.train()
    assert next(tmp_path.glob('*/*.log')).read_text().count('2 of 2 Conv-BN pairs') == 2


def test_nothing_to_do_is_an_error(tmp_path):
    with pytest.raises(ValueError, match='none of the 2 Conv-BN pairs .* in training mode'):
        train(tmp_path / 'a', norm_eval=False, efficient_conv_bn_eval=['backbone'])
    with pytest.raises(ValueError, match="has no module 'backbon'; did you mean 'backbone'"):
        train(tmp_path / 'b', efficient_conv_bn_eval=['backbon'])
    train(tmp_path / 'c', EfficientConvBNEvalHook(strict=False), norm_eval=False)
    assert 'does nothing' in next((tmp_path / 'c').glob('*/*.log')).read_text()


class Bypassing(FrozenBN):
    """Its step does not call the model, as some do."""

    def train_step(self, data, optim_wrapper):
        data = self.data_preprocessor(data, True)
        losses = self.forward(**data, mode='loss')
        optim_wrapper.update_params(losses['loss'])
        return losses


@pytest.mark.parametrize('norm_eval', [True, False])
def test_a_step_that_does_not_call_the_model_is_looked_at_too(norm_eval):
    model, hook = Bypassing(norm_eval), EfficientConvBNEvalHook()
    said = []
    log = type('Log', (), dict(info=said.append))
    runner = type('Runner', (), dict(model=model, logger=log, hooks=[hook]))
    hook.before_train(runner)
    images = Images()
    data = dict(inputs=images.images[:8], data_samples=dict(label=images.labels[:8]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train().train_step(data, OptimWrapper(optimizer))
    if norm_eval:
        hook.after_train_iter(runner, 0)
        assert '2 of 2' in said[0]
    else:
        with pytest.raises(ValueError, match='training mode'):
            hook.after_train_iter(runner, 0)
