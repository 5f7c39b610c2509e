"""Every config passes the checker, builds, and trains a shrunken step."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from memengine.engine import Runner
from memengine.engine.config.check import check_config
from memengine.engine.config.file import load_config
from memengine.registry import MODELS
from tests import recipes

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / 'configs').rglob('*.py')
    if '_base_' not in path.parts
)

FIGURES = {
    'AccuracyMetric': 'top1',
    'CocoMetric': 'box_ap',
    'KNNMetric': 'knn_top1',
    'PerplexityMetric': 'perplexity',
    'RetrievalMetric': 'image_to_text_r1',
    'ZeroShotMetric': 'zero_shot_top1',
}


def make_imagenet(root):
    """Two classes of three images each, in ImageNet's layout."""
    generator = np.random.default_rng(0)
    for split in ('train', 'val'):
        for name in ('n01440764', 'n01443537'):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(3):
                pixels = generator.integers(0, 255, (64, 80, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f'{index}.jpg')


def metrics_of(cfg):
    return cfg.val_evaluator if isinstance(cfg.val_evaluator, list) else [cfg.val_evaluator]


def shrink(cfg):
    """The same run in small: few samples, few prototypes, no workers, this machine's precision."""
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        loader.update(batch_size=2, num_workers=0, persistent_workers=False)
    cfg.train_dataloader.dataset.indices = 5
    validation = cfg.val_dataloader.dataset
    if validation.type == 'BankAndQueries':
        validation.bank.indices, validation.queries.indices = 4, 2
    else:
        validation.indices = 4
    for metric in metrics_of(cfg):
        if metric.type == 'KNNMetric':
            metric.k = 2
    if cfg.model.get('head', {}).get('out_dim', 0) > 512:
        cfg.model.head.out_dim = 512
    cfg.optim_wrapper.precision = 'fp32'
    cfg.train_cfg.max_epochs = 1
    return cfg


def pretrain(cfg):
    """Write the run that `load_from` names, before its first step: the part that is loaded."""
    run = load_config(ROOT / f'configs/{Path(cfg.load_from.path).name}.py')
    check_config(run)
    state = MODELS.build(run.model).state_dict()
    Path(cfg.load_from.path).mkdir(parents=True)
    whole = dict(state_dict=state, optimizer={}, meta=dict(iter=1))
    torch.save(whole, f'{cfg.load_from.path}/epoch_1.pth')
    part = cfg.load_from.part + '.'
    return {k.removeprefix(part): value for k, value in state.items() if k.startswith(part)}


def narrow_head(in_channels, out_channels):
    """In place of the detectors' head of boxes, which holds half of a small one's parameters."""
    hidden, out = nn.Linear(in_channels, 8), nn.Linear(8, out_channels)
    return nn.Sequential(nn.Flatten(), hidden, nn.GELU(), out, nn.GELU())


@pytest.mark.parametrize('name', CONFIGS)
def test_config_is_checked_builds_and_steps(name, tmp_path, monkeypatch, undrawn):
    monkeypatch.chdir(tmp_path)
    cfg = load_config(ROOT / name)
    check_config(cfg)
    if name in recipes.RECIPES:
        recipes.provide(name, monkeypatch)
        recipes.shrink_model(name, cfg)
        monkeypatch.setattr('torchvision.models.detection.faster_rcnn.TwoMLPHead', narrow_head)
    else:
        make_imagenet(tmp_path / 'data' / 'imagenet')
        if 'vit' in cfg.model.get('backbone', {}).get('model_name', ''):
            cfg.model.backbone.depth = 2
    cfg = shrink(cfg)
    check_config(cfg)
    cfg.work_dir = str(tmp_path / 'run')
    cfg.experiment_name = name.replace('/', '_')
    pretrained = pretrain(cfg) if cfg.get('load_from') else {}
    runner = Runner.from_cfg(cfg)
    before = {key: value.clone() for key, value in runner.model.named_parameters()}
    runner.train()
    trained = [key for key, p in runner.model.named_parameters() if p.requires_grad]
    moved = [
        key for key in trained if not torch.equal(before[key], runner.model.get_parameter(key))
    ]
    frozen = (
        [key for key in trained if 'last_layer' in key]
        if cfg.model.get('freeze_last_layer')
        else []
    )
    assert set(moved) >= set(trained) - set(frozen), (
        'a parameter that is to be trained did not move'
    )
    for key, value in pretrained.items():  # one step of AdamW, at most, away from it
        at = f'{cfg.load_from.into}.{key}'
        torch.testing.assert_close(runner.model.get_parameter(at), value, rtol=0, atol=1e-3)
    for metric in metrics_of(cfg):
        assert f'val/{FIGURES[metric.type]}' in runner.message_hub.log_scalars
    written = list((tmp_path / 'run').rglob('*.py'))
    assert len(written) == 2, 'in the work dir and beside its curves'
    for path in written:
        check_config(again := load_config(path))
        assert again.to_dict() == {**cfg.to_dict(), 'default_scope': 'memengine'}


def losses_of(name, work_dir, options):
    """The loss of each iteration of the shrunken run."""
    cfg = load_config(ROOT / name)
    cfg.merge_from_dict(options)
    cfg = shrink(cfg)
    cfg.train_dataloader.batch_size = 4
    cfg.train_dataloader.dataset.indices = 12
    del cfg.default_hooks.report
    check_config(cfg)
    cfg.work_dir, cfg.experiment_name = str(work_dir), f'{work_dir.name}_{Path(name).stem}'
    runner = Runner.from_cfg(cfg)
    seen = []
    run_step = runner.model.train_step
    runner.model.train_step = lambda *args, **kwargs: (
        seen.append(run_step(*args, **kwargs)) or seen[-1]
    )
    runner.train()
    return [log['loss'].item() for log in seen]


GRAD_CACHE = {'type': 'GradCacheOptimWrapper', 'chunk_size': 3}
ACCUMULATION = {'type': 'AccumulationOptimWrapper', 'micro_batch_size': 2}


@pytest.mark.parametrize(
    ('name', 'wrapper'),
    [
        ('simclr_vit', GRAD_CACHE),
        ('supcon_vit', GRAD_CACHE),
        ('selfcon_resnet', {**GRAD_CACHE, 'chunk_size': 8}),  # BatchNorm: the whole batch
        ('clip_vit', GRAD_CACHE),
        ('coca_vit', GRAD_CACHE),
        ('siglip_vit', GRAD_CACHE),
        ('dino_vit', ACCUMULATION),  # without BatchNorm, too
        ('classify_vit', ACCUMULATION),
    ],
)
def test_slices_are_an_option_of_every_quick_start(name, wrapper, tmp_path):
    """Two options on the command line, and the run is the same."""
    options = {f'optim_wrapper.{key}': value for key, value in wrapper.items()}
    others = {'model.head.use_bn': False} if name == 'dino_vit' else {}
    plain = losses_of(f'configs/{name}.py', tmp_path / 'plain', others)
    sliced = losses_of(f'configs/{name}.py', tmp_path / 'sliced', {**options, **others})
    assert len(plain) == 3
    assert sliced == pytest.approx(plain, rel=1e-4)
    assert plain[0] != plain[-1]


@pytest.mark.parametrize('technique', ['grad_cache', 'accumulation'])
@pytest.mark.parametrize(
    'name',
    [name for name in CONFIGS if name.count('/') == 1 and name != 'configs/finetune_vit.py'],
)
def test_slices_are_one_line_of_base(name, technique, tmp_path):
    """The technique's file in the place of the schedule's changes the wrapper and nothing else."""
    source = (ROOT / name).read_text()
    base = (ROOT / 'configs/_base_').as_posix()
    line = "'_base_/schedules/adamw_cosine.py'"
    assert source.count(line) == 1
    changed = source.replace(line, f"'{base}/techniques/{technique}.py'")
    (tmp_path / 'mine.py').write_text(changed.replace("'_base_/", f"'{base}/"))
    plain, mine = load_config(ROOT / name), load_config(tmp_path / 'mine.py')
    check_config(mine)
    assert mine.optim_wrapper.type in ('GradCacheOptimWrapper', 'AccumulationOptimWrapper')
    for key in ('chunk_size', 'micro_batch_size'):
        mine.optim_wrapper.pop(key, None)
    mine.optim_wrapper.type = plain.optim_wrapper.type
    assert mine.to_dict() == plain.to_dict()


def test_there_are_configs():
    assert {'configs/dino_vit.py', *recipes.RECIPES} <= {*CONFIGS}
