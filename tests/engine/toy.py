"""A toy data set and model that use every source of randomness, for tests of the engine."""

import itertools
import random

import numpy as np
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from torch import nn
from torch.utils.data import Dataset

from memengine.engine import Runner, run_step

_COUNT = itertools.count()


class ToyData(Dataset):
    """Noise from all three generators on top of the index."""

    metainfo = {'classes': ('a', 'b')}

    def __init__(self, size=22):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        noise = random.random() + np.random.rand() + torch.rand(())
        x = torch.tensor([float(index), 1.0]) / self.size + 0.1 * noise
        return {'x': x, 'y': torch.tensor([index % 2], dtype=torch.float32)}


class ToyModel(BaseModel):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
        )

    def train_step(self, data, optim_wrapper):
        return run_step(self, data, optim_wrapper)

    def forward(self, x, y, mode='loss'):
        out = self.net(x)
        return {'loss': (out - y).square().mean()} if mode == 'loss' else list(out)


class Losses(Hook):
    """Keeps (iteration, loss) of every iteration."""

    priority = 'LOWEST'

    def __init__(self):
        self.seen = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.seen.append((runner.iter, outputs['loss'].item()))


def toy_runner(work_dir, losses=None, train_cfg=None, loader=None, cfg=None, **kwargs):
    """A runner of three epochs of five iterations."""
    train_dataloader = dict(
        dataset=ToyData(),
        sampler=dict(type='DefaultSampler', shuffle=True),
        batch_size=4,
        num_workers=0,
        drop_last=True,
        collate_fn=dict(type='default_collate'),
    )
    train_dataloader.update(loader or {})
    torch.manual_seed(0)
    options = dict(
        model=ToyModel(),
        work_dir=str(work_dir),
        train_dataloader=train_dataloader,
        train_cfg=train_cfg or dict(by_epoch=True, max_epochs=3),
        optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.05), clip_grad=dict(max_norm=0.5)),
        param_scheduler=[dict(type='CosineAnnealingLR', convert_to_iter_based=True)],
        custom_hooks=[losses] if losses else None,
        randomness=dict(seed=3),
        default_scope='memengine',
        log_level='WARNING',
        experiment_name=f'toy{next(_COUNT)}',
        cfg=cfg if isinstance(cfg, Config) else Config(cfg or {}),
    )
    return Runner(**{**options, **kwargs})


def params(runner):
    return {name: p.detach().clone() for name, p in runner.model.state_dict().items()}
