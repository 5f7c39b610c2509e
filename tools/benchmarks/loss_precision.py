"""What half precision costs the contrastive losses: errors against float64, beside eager's.

    python tools/benchmarks/loss_precision.py --out docs/benchmarks --page docs/techniques/disco.md

The embeddings are in half precision in all forms, and the reference is float64 of these. *Eager* is
the loss as it is written down: products and logits in half precision, softmax in fp32. Errors are
arithmetic, so that a CPU shows what a GPU gives, up to the order of sums.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import measuring
import torch
from torch import Tensor
from torch.nn import functional as F

from memengine.losses import ClipLoss, NTXentLoss, SigLipLoss, SupConLoss

DEVICE = torch.device('cpu')
TEMPERATURE = 0.1
CLASSES = 32
GRAD_SCALE = 2.0**16  # of fp16, as a GradScaler begins
TYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16}
LOSSES = {'CLIP': ClipLoss, 'SigLIP': SigLipLoss, 'NT-Xent': NTXentLoss, 'SupCon': SupConLoss}


# ------------------------------------------------------------------ the losses as written down


def wide(logits: Tensor) -> Tensor:
    """For softmax."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def clip(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    logits, targets = wide((scale * images) @ texts.T), torch.arange(len(images))
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def siglip(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    logits = wide((scale * images) @ texts.T + bias)
    return -F.logsigmoid(logits * (2 * torch.eye(len(images)) - 1)).sum() / len(images)


def supcon(views: Tensor, labels: Tensor) -> Tensor:
    z = views.transpose(0, 1).flatten(0, 1)
    logits, samples = wide(z @ z.T / TEMPERATURE), labels.repeat(views.shape[1])
    itself = torch.eye(len(z), dtype=torch.bool)
    positives = (samples[:, None] == samples) & ~itself
    log_shares = logits - logits.masked_fill(itself, -torch.inf).logsumexp(1, keepdim=True)
    return -((log_shares * positives).sum(1) / positives.sum(1)).mean()


def ntxent(view1: Tensor, view2: Tensor) -> Tensor:
    views = torch.stack([F.normalize(view, dim=1) for view in (view1, view2)], dim=1)
    return supcon(views, torch.arange(len(view1)))


WRITTEN: dict[str, Callable[..., Tensor]] = {
    'CLIP': clip,
    'SigLIP': siglip,
    'NT-Xent': ntxent,
    'SupCon': supcon,
}


def forms(loss: str) -> dict[str, Callable[..., Tensor]]:
    """Who is compared."""
    options: dict[str, Any] = {}
    if loss in ('NT-Xent', 'SupCon'):
        options['temperature'] = TEMPERATURE
    if loss == 'SupCon':
        options['base_temperature'] = TEMPERATURE
    kind: Callable[..., Callable[..., Tensor]] = LOSSES[loss]
    return {
        'eager': WRITTEN[loss],
        'memengine': kind(**options),
        'memengine, in tiles': kind(**options, tile_size='auto'),
        "memengine, precision='fp32'": kind(**options, tile_size='auto', precision='fp32'),
    }


# ------------------------------------------------------------------ measuring


def inputs(loss: str, rows: int, width: int) -> list[Tensor]:
    """As in the middle of training: pairs are found, but not surely."""
    torch.manual_seed(0)
    first, noise = (F.normalize(torch.randn(rows, width), dim=1) for _ in range(2))
    second = F.normalize(0.15 * first + noise, dim=1)
    if loss == 'CLIP':
        return [first, second, torch.tensor(50.0)]
    if loss == 'SigLIP':
        return [first, second, torch.tensor(50.0), torch.tensor(-10.0)]
    if loss == 'NT-Xent':
        return [3 * first, 3 * second]
    return [torch.stack([first, second], dim=1), torch.arange(rows) % CLASSES]


def step(form: Callable[..., Tensor], given: Sequence[Tensor], scaled: float) -> list[Tensor]:
    """The loss and the gradients, in float64."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in given]
    loss = form(*leaves)
    (loss * scaled).backward()
    return [loss.detach().double()] + [
        x.grad.double() / scaled for x in leaves if x.grad is not None
    ]


def errors(actual: Sequence[Tensor], expected: Sequence[Tensor], towers: int) -> dict[str, float]:
    """Norm of the difference by norm: of the loss, the embeddings' gradients, the scalars'."""
    parts = {'loss': slice(0, 1), 'embeddings': slice(1, towers + 1)}
    if len(expected) > towers + 1:
        parts['scalars'] = slice(towers + 1, None)
    return {
        name: measuring.relative_error(actual[part], expected[part]) for name, part in parts.items()
    }


def measure(loss: str, kind: str, rows: int, width: int) -> dict[str, dict[str, float]]:
    """Errors of each form."""
    given, dtype = inputs(loss, rows, width), TYPES[kind]
    towers = sum(x.dim() > 1 for x in given)
    low = [x.to(dtype) if x.dim() > 1 else x for x in given]
    exact = [x.double() if x.is_floating_point() else x for x in low]
    expected = step(WRITTEN[loss], exact, 1)
    scaled = GRAD_SCALE if kind == 'fp16' else 1
    return {
        name: errors(step(form, low, scaled), expected, towers)
        for name, form in forms(loss).items()
    }


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Of the page."""
    heads = ['loss', 'embeddings', 'form', 'error of the loss', 'of their gradient', 'of scalars']
    rows = [
        [loss, kind, name, *(f'{found[key]:.1e}' if key in found else '' for key in KEYS)]
        for loss, kinds in results['errors'].items()
        for kind, found_by_form in kinds.items()
        for name, found in found_by_form.items()
    ]
    return {'loss_precision': f'{measuring.table([heads, *rows])}\n\n{measuring.origin(results)}'}


KEYS = ('loss', 'embeddings', 'scalars')


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--out', type=Path, required=True, help='folder for the results')
    parser.add_argument('--page', type=Path, help='page whose table is filled in')
    parser.add_argument('--rows', type=int, default=512)
    parser.add_argument('--width', type=int, default=512)
    args = parser.parse_args()
    found = {
        loss: {kind: measure(loss, kind, args.rows, args.width) for kind in TYPES}
        for loss in LOSSES
    }
    results = {'run': measuring.where(DEVICE), 'errors': found}
    measuring.publish(results, 'loss_precision', tables, args.out, args.page)


if __name__ == '__main__':
    main()
