"""Whether a network learns as well with dropped activations: accuracy over seeds.

A small vision transformer on scikit-learn's digits, by gamma, with DropIT in all linear layers.

    python tools/benchmarks/dropit_learning.py --out docs/benchmarks
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import measuring
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn import functional as F

from memengine.techniques import drop_activations

WAYS: dict[str, dict[str, Any] | None] = {
    'plain': None,
    'gamma 0.5': dict(strategy='mink', gamma=0.5),
    'gamma 0.7': dict(strategy='mink', gamma=0.7),
    'gamma 0.9': dict(strategy='mink', gamma=0.9),
    'gamma 0.9, blocks': dict(strategy='block_mink', gamma=0.9),
}
BATCH = 64


def digits() -> tuple[Tensor, ...]:
    """Images [n, 1, 8, 8] and labels [n], of two thirds and of one third."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=1 / 3, random_state=0, stratify=labels)
    inputs = [torch.from_numpy(part).float().view(-1, 1, 8, 8) / 8 - 1 for part in parts[:2]]
    return (*inputs, *(torch.from_numpy(part).long() for part in parts[2:]))


def accuracy(settings: Mapping[str, Any] | None, seed: int, epochs: int) -> float:
    """Of a network trained from one seed: initial weights, order of the samples and dropout."""
    inputs, test_inputs, labels, test_labels = digits()
    torch.manual_seed(seed)
    model = VisionTransformer(
        img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=64, depth=4, num_heads=4,
        drop_rate=0.1,
    )  # fmt: skip
    if settings is not None:
        drop_activations(model, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.05)
    steps = epochs * (len(inputs) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(inputs)).split(BATCH):
            if len(rows) < BATCH:
                continue
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        right = model(test_inputs).argmax(1) == test_labels
    return 100 * float(right.float().mean())


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """The page's table, and where it comes from."""
    cells = [['', 'accuracy, mean', 'standard deviation', 'of each seed']]
    for way, found in results['ways'].items():
        each = ', '.join(f'{value:.1f}' for value in found)
        cells.append([way, f'{statistics.mean(found):.2f}', f'{statistics.stdev(found):.2f}', each])
    return {'dropit_learning': f'{measuring.table(cells)}\n\n{measuring.origin(results)}'}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, required=True, help='folder for JSON')
    parser.add_argument('--page', type=Path, help='page whose table is to be filled in')
    parser.add_argument('--seeds', type=int, default=5)
    parser.add_argument('--epochs', type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ways = {
        way: [accuracy(settings, seed, args.epochs) for seed in range(args.seeds)]
        for way, settings in WAYS.items()
    }
    results = {'run': measuring.where(torch.device('cpu')), 'ways': ways}
    measuring.publish(results, 'dropit_learning', tables, args.out, args.page)


if __name__ == '__main__':
    main()
