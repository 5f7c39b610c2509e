"""A data set of tiny images with a bank and queries, and a model that learns to tell them apart."""

import itertools

import torch
from mmengine.config import Config
from mmengine.model import BaseModel
from torch import nn
from torch.utils.data import Dataset

from memengine.engine import Runner

_COUNT = itertools.count()
BANK, QUERIES = 48, 24


class Images(Dataset):
    """Noisy images of three patterns; the last ``QUERIES`` are queries."""

    def __init__(self, size=BANK + QUERIES, side=8):
        generator = torch.Generator().manual_seed(0)
        patterns = torch.randn(3, 1, side, side, generator=generator)
        self.labels = torch.arange(size) % 3
        noise = 2.5 * torch.randn(size, 1, side, side, generator=generator)
        self.images = patterns[self.labels] + noise

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        samples = dict(label=int(self.labels[index]), index=index, bank=index < BANK)
        return {'inputs': self.images[index], 'data_samples': samples}


class Classifier(BaseModel):
    """A linear backbone with dropout; logs the signs that collapse is known by."""

    def __init__(self, side=8):
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(side * side, 6), nn.GELU())
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(6, 3)

    def forward(self, inputs, data_samples=None, mode='tensor'):
        features = self.backbone(inputs)
        if mode == 'predict':
            return [{'feature': feature} for feature in features]
        loss = nn.functional.cross_entropy(self.head(self.dropout(features)), data_samples['label'])
        return {'loss': loss}


def loader(dataset, batch_size=8, shuffle=False):
    return dict(
        dataset=dataset,
        sampler=dict(type='DefaultSampler', shuffle=shuffle),
        batch_size=batch_size,
        num_workers=0,
        collate_fn=dict(type='default_collate'),
    )


def image_runner(work_dir, *hooks, model=None, epochs=2, runner=Runner, **kwargs):
    """A runner of ``epochs`` epochs of six iterations, validated after each by k-NN."""
    torch.manual_seed(0)
    options = dict(
        model=model or Classifier(),
        work_dir=str(work_dir),
        train_dataloader=loader(Images(BANK), shuffle=True),
        train_cfg=dict(by_epoch=True, max_epochs=epochs),
        val_dataloader=loader(Images()),
        val_cfg=dict(),
        val_evaluator=dict(type='KNNMetric', k=5),
        optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.01)),
        custom_hooks=list(hooks),
        randomness=dict(seed=3),
        default_scope='memengine',
        experiment_name=f'images{next(_COUNT)}',
        cfg=Config({}),
    )
    return runner(**{**options, **kwargs})
