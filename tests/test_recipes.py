"""The recipes on small data that is made here: with their own data layouts, weights by path,
augmentations, schedules, metrics and DropIT they run from end to end, and learn.
"""

import pytest
import torch
from mmengine.config import Config

from memengine.engine import Runner
from memengine.engine.config.check import check_config
from tests import recipes
from tests.test_configs import ROOT

pytestmark = pytest.mark.usefixtures('undrawn')


def run(name, monkeypatch, folder, settings):
    """A recipe in small, with some settings; every figure of its validations by name."""
    monkeypatch.chdir(folder)
    recipes.provide(name, monkeypatch)
    cfg = Config.fromfile(ROOT / name)
    recipes.shrink_model(name, cfg)
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        loader.update(num_workers=0, persistent_workers=False)
    cfg.merge_from_dict(settings)
    check_config(cfg)
    cfg.work_dir, cfg.experiment_name = 'run', f'learn_{folder.name}'
    runner = Runner.from_cfg(cfg)
    runner.train()
    scalars = runner.message_hub.log_scalars
    return {
        name.removeprefix('val/'): buffer.data[0].tolist()
        for name, buffer in scalars.items()
        if name.startswith('val/')
    }


def test_deit_from_scratch(tmp_path, monkeypatch):
    settings = {
        'train_dataloader.batch_size': 16,
        'auto_scale_lr.base_batch_size': 16,
        'optim_wrapper.optimizer.lr': 3e-3,
        'train_cfg.max_epochs': 6,
    }
    top1 = run(recipes.DEIT_TINY, monkeypatch, tmp_path, settings)['top1']
    assert top1[0] < 30  # untrained; guessing one of the four classes is 25 %
    assert top1[-1] > 80


@pytest.mark.slow
@pytest.mark.parametrize('name', recipes.CIFAR, ids=['small', 'base', 'gact', 'mesa'])
def test_deit_fine_tuning(name, tmp_path, monkeypatch):
    settings = {
        'train_dataloader.batch_size': 20,
        'optim_wrapper.optimizer.lr': 0.1,
        'train_cfg.max_epochs': 30,
    }
    top1 = run(name, monkeypatch, tmp_path, settings)['top1']
    assert top1[0] < 25  # guessing one of the ten classes is 10 %
    assert top1[-1] > 60


def test_deit_starts_from_the_weights_at_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipes.provide(recipes.CIFAR[0], monkeypatch)
    cfg = Config.fromfile(ROOT / recipes.CIFAR[0])
    recipes.shrink_model(recipes.CIFAR[0], cfg)
    cfg.work_dir, cfg.experiment_name = 'run', 'weights'
    given = Runner.from_cfg(cfg).model.backbone.model.state_dict()
    expected = torch.load(cfg.model.backbone.checkpoint_path)['model']
    assert given.keys() == {name for name in expected if not name.startswith('head.')}
    assert all(torch.equal(given[name], expected[name]) for name in given)


@pytest.mark.slow
@pytest.mark.parametrize('name', [recipes.FASTER_RCNN, recipes.MASK_RCNN], ids=['boxes', 'masks'])
def test_detection(name, tmp_path, monkeypatch):
    settings = {
        'auto_scale_lr.base_batch_size': 2,
        'optim_wrapper.optimizer.lr': 2e-3,
        'param_scheduler.0.end': 16,
        'param_scheduler.1.milestones': [5],  # without, the last steps decide the figure
        'train_cfg.max_epochs': 8,
        'train_cfg.val_interval': 8,
        'custom_hooks': [dict(type='EvaluateFirstHook')],
    }
    figures = run(name, monkeypatch, tmp_path, settings)
    for kind in ('box', 'mask') if name == recipes.MASK_RCNN else ('box',):
        untrained, trained = figures[f'{kind}_ap50']
        assert untrained < 5
        assert trained > 25


def test_language_model(tmp_path, monkeypatch):
    settings = {
        'train_dataloader.batch_size': 16,
        'optim_wrapper.optimizer.lr': 6e-3,
        'param_scheduler.0.end': 10,
        'train_cfg.max_epochs': 3,
        'train_cfg.val_interval': 3,
    }
    untrained, trained = run(recipes.GPT2, monkeypatch, tmp_path, settings)['perplexity']
    assert untrained > 200  # of 280 tokens
    assert trained < 10
