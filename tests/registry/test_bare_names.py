"""Bare names in MMEngine's own Runner, beside a library that has a scope of its own."""

import os
import subprocess
import sys

import pytest

from tests.docs_pages import ROOT

REGISTRY = """
from mmengine.registry import HOOKS as ROOT_HOOKS, MODELS as ROOT
from mmengine.registry import Registry

MODELS = Registry('model', parent=ROOT, scope='birds')
"""
MODULES = """
from mmengine.model import BaseModule
from torch import nn

from birds.registry import MODELS, ROOT_HOOKS


@MODELS.register_module()
class Maps(BaseModule):  # as backbones are there: a tuple of feature maps
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, 2)

    def forward(self, images):
        return (self.stem(images),)


@MODELS.register_module()
class ProjectionHead(nn.Linear):  # of a name that is ours too
    def __init__(self, in_dim):
        super().__init__(in_dim, 4)


@ROOT_HOOKS.register_module()
class CollapseHook:  # the same, without a scope
    pass
"""
CONFIG = """
_base_ = '{root}/configs/_base_/datasets/digits_dino.py'

default_scope = 'birds'
custom_imports = dict(imports=['birds.modules', 'memengine.registry.bare_names'])
model = dict(
    type='SimCLR',
    backbone=dict(type='PooledBackbone', backbone=dict(type='birds.Maps'), num_features=8),
    head=dict(type='ProjectionHead'),
    loss=dict(type='NTXentLoss'),
)
train_dataloader = dict(batch_size=16, num_workers=0, persistent_workers=False)
val_dataloader = None
test_dataloader = None
train_cfg = dict(type='IterBasedTrainLoop', max_iters=2)
optim_wrapper = dict(
    type='GradCacheOptimWrapper', chunk_size=8, optimizer=dict(type='AdamWBf16', lr=0.1)
)
custom_hooks = [dict(type='FiniteLossHook')]
work_dir = 'run'
"""
TRAIN = """
import memengine  # before MMEngine, and to no effect on its registries
from mmengine import registry
from mmengine.config import Config
from mmengine.registry import Registry
from mmengine.runner import Runner

roots = {k: v for k, v in vars(registry).items() if isinstance(v, Registry)}
before = {k: dict(v.module_dict) for k, v in roots.items()}
cfg = Config.fromfile('config.py')
for name, types in before.items():
    assert types.items() <= roots[name].module_dict.items(), name
runner = Runner.from_cfg(cfg)
weight = runner.model.backbone.backbone.stem.weight
first = weight.detach().clone()
runner.train()
found = type(runner.model.head), registry.MODELS.get('ProjectionHead')
print(*[kind.__module__ for kind in (*found, registry.HOOKS.get('CollapseHook'))])
print(runner.iter, bool((weight != first).all()))
"""


@pytest.mark.slow
def test_bare_names_in_the_config_of_another_library(tmp_path):
    (tmp_path / 'birds').mkdir()
    (tmp_path / 'birds/registry.py').write_text(REGISTRY)
    (tmp_path / 'birds/modules.py').write_text(MODULES)
    (tmp_path / 'config.py').write_text(CONFIG.format(root=ROOT))
    (tmp_path / 'train.py').write_text(TRAIN)
    done = subprocess.run(
        [sys.executable, 'train.py'],
        cwd=tmp_path,
        env={**os.environ, 'PYTHONPATH': f'{ROOT}:.'},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names, steps = done.stdout.splitlines()[-2:]
    # The library's own, ours, and what was registered in MMEngine's before.
    assert names == 'birds.modules memengine.models.heads.projection_head birds.modules'
    assert steps == '2 True'
