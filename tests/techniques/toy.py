"""Small encoders with all that makes a step hard to repeat, and the steps to compare."""

from __future__ import annotations

from types import SimpleNamespace

import timm
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from memengine.losses import ClipLoss, ConLoss, NTXentLoss, SigLipLoss, SupConLoss
from memengine.techniques.slices.grad_cache import Tower, cached_step
from memengine.techniques.slices.out_of_memory import run_until_it_fits
from memengine.techniques.slices.sliced_step import total_loss
from memengine.techniques.slices.slicing import split_batch

BATCH, CHUNK, LABELS = 10, 4, torch.tensor([0, 1, 0, 2, 1, 1, 3, 0, 2, 4])


class Encoder(nn.Module):
    """[N, 12] to normalised [N, 6], with dropout and, if wanted, BatchNorm."""

    def __init__(self, dropout: float = 0.0, norm: nn.Module | None = None) -> None:
        super().__init__()
        self._forwards = SimpleNamespace(number=0)  # a plain attribute is counted once in a step
        self.layers = nn.Sequential(
            nn.Linear(12, 16), norm or nn.Identity(), nn.GELU(), nn.Dropout(dropout)
        )
        self.head = nn.Linear(16, 6)

    @property
    def calls(self):
        """Forwards so far, those that were repeated twice."""
        return self._forwards.number

    def forward(self, x):
        self._forwards.number += 1
        return F.normalize(self.head(self.layers(x)), dim=-1)


class SelfConEncoder(Encoder):
    """Returns (list of sub-network features, features)."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.exits = nn.ModuleList(nn.Linear(12, 6) for _ in range(2))

    def forward(self, x):
        return [F.normalize(exit(x), dim=-1) for exit in self.exits], super().forward(x)


def vit(dropout: float = 0.0) -> nn.Module:
    """A timm ViT at 32 px with dropout and drop-path."""
    return timm.create_model(
        'vit_tiny_patch16_224',
        img_size=32,
        patch_size=16,
        embed_dim=24,
        depth=3,
        num_heads=3,
        num_classes=6,
        drop_path_rate=dropout,
        proj_drop_rate=dropout,
        attn_drop_rate=dropout,
    )


class TwoTowers(nn.Module):
    """Encoders and the learnable scale and bias of their loss, in one optimiser."""

    def __init__(self, *encoders: nn.Module) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(encoders)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.logit_bias = nn.Parameter(torch.tensor(-5.0))


class Case:
    """An algorithm: encoders, their inputs for one batch, and the loss on the embeddings."""

    def __init__(self, name: str, dropout: float = 0.0, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.name = name
        width = (3, 32, 32) if name == 'vit' else (12,)
        rows = {'selfcon': BATCH, 'clip': BATCH, 'siglip': BATCH}.get(name, 2 * BATCH)
        towers = 2 if name in ('clip', 'siglip') else 1
        make = {'selfcon': SelfConEncoder, 'vit': vit}.get(name, Encoder)
        self.model = TwoTowers(*(make(dropout) for _ in range(towers))).double()
        self.batches = [
            [torch.randn(rows, *width, dtype=torch.float64) for _ in range(towers)]
            for _ in range(5)
        ]

    def loss(self, *embeddings):
        """Loss on the embeddings of the whole batch."""
        if self.name in ('simclr', 'vit'):
            return NTXentLoss(0.1)(*embeddings[0].chunk(2))
        if self.name == 'supcon':
            features = torch.stack(embeddings[0].chunk(2), dim=1)
            return {'loss_supcon': SupConLoss()(features, LABELS), 'loss_size': features.sum() ** 2}
        if self.name == 'selfcon':
            exits, own = embeddings[0]
            return ConLoss()(torch.stack([*exits, own], dim=1), LABELS)
        scale = self.model.logit_scale.exp()
        if self.name == 'clip':
            return ClipLoss()(*embeddings, scale)
        return SigLipLoss()(*embeddings, scale, self.model.logit_bias)


CASES = ('simclr', 'supcon', 'selfcon', 'clip', 'siglip', 'vit')


def train(case: Case, step, seed: int = 1) -> dict[str, torch.Tensor | None]:
    """Five optimiser steps; all losses, and parameters, buffers and gradients at the end.

    ``step(encoders, inputs, loss)`` adds gradients and returns the loss.
    """
    torch.manual_seed(seed)
    model = case.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    result: dict[str, torch.Tensor | None] = {}
    for index, inputs in enumerate(case.batches):
        optimizer.zero_grad()
        losses = step(list(model.encoders), inputs, case.loss)
        for name, value in losses.items() if isinstance(losses, dict) else [('loss', losses)]:
            result[f'{name} {index}'] = value
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    result |= {f'gradient of {name}': p.grad for name, p in model.named_parameters()}
    result |= model.state_dict()
    result['next random number'] = torch.rand(1)
    return result


def cut(inputs, chunk=CHUNK):
    return [split_batch(x, chunk) for x in inputs]


def plain(encoders, inputs, loss_fn, chunk=CHUNK, context=None):
    """The plain step: all graphs at once, one backward.

    With dropout two plain steps are the same only if they draw alike, so this one runs its
    encoders chunk by chunk as the cache does; ``chunk=None`` takes the batch in one piece.
    """
    embeddings = []
    for encoder, x in zip(encoders, inputs, strict=True):
        parts = [encoder(piece) for piece in (x.split(chunk) if chunk else [x])]
        columns, specs = zip(*map(pytree.tree_flatten, parts), strict=True)
        whole = [torch.cat(column) for column in zip(*columns, strict=True)]
        embeddings.append(pytree.tree_unflatten(whole, specs[0]))
    losses = loss_fn(*embeddings)
    total_loss(losses).backward()
    return losses


def cached(encoders, inputs, loss_fn, **options):
    towers = [Tower(encoder, slices) for encoder, slices in zip(encoders, cut(inputs), strict=True)]
    return cached_step(towers, loss_fn, **options)


def gradients(*modules):
    return {
        f'{index}.{name}': parameter.grad
        for index, module in enumerate(modules)
        for name, parameter in module.named_parameters()
    }


def try_slices(model, images, *sizes):
    """An additive step in slices of the last size; with others, memory ends in their second one."""
    tries = list(sizes)

    def step():
        for number, images_of_slice in enumerate(images.split(tries[0])):
            model(images_of_slice).square().sum().backward()
            if number and tries[1:]:
                raise torch.OutOfMemoryError('CUDA out of memory.')

    run_until_it_fits(step, lambda: bool(tries.pop(0)), model)
