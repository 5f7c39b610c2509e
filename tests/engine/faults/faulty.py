"""Models and data in which one sample, or one iteration, gives what is not finite."""

import itertools

import torch
from mmengine.config import Config
from torch import nn
from torch.utils.data import Dataset

from memengine.engine import Runner
from memengine.models import Classifier, SimCLR
from memengine.models.algorithms.by_sample import LossBySample
from memengine.registry import DATASETS, MODELS

BAD, SIZE, BATCH = 5, 16, 4
SEED = 5  # the bad sample comes in the third iteration
_COUNT = itertools.count()


class _BadGradient(torch.autograd.Function):
    """What comes in goes out; the gradient of marked rows is NaN."""

    @staticmethod
    def forward(ctx, x, marked):
        ctx.save_for_backward(marked)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (marked,) = ctx.saved_tensors
        return gradient.masked_fill(marked[:, None], torch.nan), None


class Fault(nn.Module):
    """Goes wrong for rows whose last channel is large.

    Args:
        where: ``'output'``, ``'gradient'``, ``'parameter'`` (the gradient of one only) or None.
    """

    def __init__(self, where):
        super().__init__()
        self.where = where
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        marked = x[:, -1].detach() > 50
        if self.where == 'output':
            return (x * self.weight).masked_fill(marked[:, None], torch.inf)
        if self.where == 'gradient':
            return _BadGradient.apply(x * self.weight, marked)
        if self.where == 'parameter' and marked.any():
            return x + (self.weight * 0).sqrt()  # 0 * inf in backward
        return x * self.weight


class Block(nn.Module):
    def __init__(self, fault=None):
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.fault = Fault(fault)

    def forward(self, x):
        return self.fault(x + self.two(nn.functional.gelu(self.one(self.norm(x)))))


@MODELS.register_module()
class FaultyBackbone(nn.Module):
    num_features = 16

    def __init__(self, fault=None, batch_norm=True):
        super().__init__()
        self.conv = nn.Conv2d(1, 15, 3, 2, bias=False)
        self.norm = nn.BatchNorm2d(15) if batch_norm else nn.Identity()
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.Sequential(Block(), Block(fault), Block())

    def forward(self, images):
        marked = images.detach().flatten(1)[:, 0] > 50
        x = self.drop(self.norm(self.conv(images.clamp_max(1)))).flatten(2).mean(-1)
        return self.blocks(torch.cat([x, 100.0 * marked[:, None].to(x.dtype)], 1))


class _FaultyLoss:
    """Its loss is NaN in the third iteration."""

    def set_progress(self, progress):
        self.iteration = progress.iter

    def embedding_loss(self, *args, **kwargs):
        losses = super().embedding_loss(*args, **kwargs)
        if self.iteration == 2:
            losses['loss'] = losses['loss'] * torch.nan
        return losses


@MODELS.register_module()
class FaultySimCLR(_FaultyLoss, SimCLR):
    pass


@MODELS.register_module()
class FaultyClassifier(_FaultyLoss, Classifier):
    pass


@MODELS.register_module()
class OneByOne(LossBySample):
    """Runs its network image by image, as detectors do."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = MODELS.build(backbone)

    def embed(self, inputs, data_samples=()):
        every = [self.backbone(image[None]).square().sum() for image in inputs]
        return {'loss': torch.stack(every)}


@DATASETS.register_module()
class MarkedImages(Dataset):
    """Noise; sample 5 is marked, or not finite itself.

    Args:
        views: Of each image; None for one that is no list.
        every: Whether all samples are marked.
        not_finite: Whether sample 5 is NaN.
    """

    metainfo = {'classes': ('a', 'b', 'c')}

    def __init__(self, views=None, every=False, not_finite=False):
        self.views, self.every, self.not_finite = views, every, not_finite

    def __len__(self):
        return SIZE

    def sample_name(self, index):
        return f'image_{index}.png'

    def __getitem__(self, index):
        views = [torch.randn(1, 8, 8) for _ in range(self.views or 1)]
        for view in views:
            if index == BAD or self.every:
                view[0, 0, 0] = torch.nan if self.not_finite else 100.0
        inputs = views if self.views else views[0]
        return {'inputs': inputs, 'data_samples': {'label': index % 3, 'index': index}}


HEADS = {
    'SimCLR': dict(head=dict(type='ProjectionHead', out_dim=8)),
    'Classifier': dict(num_classes=3),
    'OneByOne': dict(),
    'DINO': dict(
        head=dict(type='DINOHead', out_dim=8, hidden_dim=8, bottleneck_dim=4), local_crops=1
    ),
}
VIEWS = {'SimCLR': 2, 'Classifier': None, 'OneByOne': None, 'DINO': 3}


def config(work_dir, model='Classifier', fault=None, data=None, **cfg):
    """Of three epochs of four iterations."""
    kind = model.removeprefix('Faulty')
    backbone = dict(type='FaultyBackbone', fault=fault, batch_norm=cfg.pop('batch_norm', True))
    optim = dict(optimizer=dict(type='AdamW', lr=1e-3))
    defaults = dict(
        custom_imports=dict(imports=['tests.engine.faults.faulty']),
        model=dict(type=model, backbone=backbone, **HEADS[kind]),
        work_dir=str(work_dir),
        train_dataloader=dict(
            dataset=dict(type='MarkedImages', views=VIEWS[kind], **(data or {})),
            sampler=dict(type='DefaultSampler', shuffle=True),
            batch_size=BATCH,
            num_workers=0,
            collate_fn=dict(type='list_samples' if kind == 'OneByOne' else 'default_collate'),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=3),
        optim_wrapper={**optim, **cfg.pop('optim_wrapper', {})},
        randomness=dict(seed=SEED),
        default_scope='memengine',
        log_level='WARNING',
        experiment_name=f'faulty{next(_COUNT)}',
    )
    return Config({**defaults, **cfg})


def build(work_dir, **cfg):
    return Runner.from_cfg(config(work_dir, **cfg))
