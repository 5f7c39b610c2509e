"""What it costs to augment an image by itself, and in a batch.

The training data of some configs, sample by sample (``ImageDataset``) and by whole batches
(``BatchedImageDataset``), in turn, in one process and one thread: CPU time by image, from reading
to the stacked batch, which is what a worker of a data loader does.

    python tools/benchmarks/batched_augmentation.py --out docs/benchmarks --page docs/data.md
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import measuring
import torch
from torch import nn

from memengine.datasets import BatchedImageDataset, ImageDataset, stack_views
from memengine.engine.config.file import load_config
from memengine.engine.data_order import SeededDataset

CONFIGS = {
    'dino_vit': 'two views of 16×16, grey',
    'classify_vit': 'one view of 16×16, grey',
    'dino_vit_photographs': 'two views of 32×32, four of 16×16',
}


def milliseconds(name: str, batch_size: int, repeats: int) -> dict[str, Any]:
    """CPU milliseconds by image, in both ways, and the ratio."""
    config = load_config(measuring.ROOT / f'configs/{name}.py').train_dataloader.dataset
    settings = {key: value for key, value in config.items() if key != 'type'}
    steps = {}
    for kind in (ImageDataset, BatchedImageDataset):
        data = SeededDataset(kind(**settings), seed=0)

        def load(data: SeededDataset = data) -> object:
            return stack_views(data.__getitems__(range(batch_size)))

        load()
        steps[kind.__name__] = (nn.Module(), load)
    seconds = measuring.time_in_turn(steps, repeats, torch.device('cpu'))
    one, batch = seconds['ImageDataset'], seconds['BatchedImageDataset']
    by_image = [sorted(each)[len(each) // 2] / batch_size * 1e3 for each in (one, batch)]
    return {'ms': by_image, 'ratio': measuring.ratio(one, batch)}


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """The page's table, and where it comes from."""
    cells: list[Sequence[str]] = [['data of', 'an image', 'by itself', 'in a batch', 'ratio']]
    for name, row in results['rows'].items():
        one, batch = row['ms']
        times = f'{row["ratio"]:.1f}'
        cells.append([f'`{name}`', CONFIGS[name], f'{one:.2f} ms', f'{batch:.2f} ms', times])
    size = f'Batches of {results["batch_size"]}, CPU time of one thread.'
    text = f'{measuring.table(cells)}\n\n{size} {measuring.origin(results)}'
    return {'batched_augmentation': text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, required=True, help='folder for JSON')
    parser.add_argument('--page', type=Path, help='page whose table is to be filled in')
    parser.add_argument('--repeats', type=int, default=15)
    parser.add_argument('--quick', action='store_true', help='small batches, one repeat')
    args = parser.parse_args()
    torch.set_num_threads(1)
    size, repeats = (4, 1) if args.quick else (64, args.repeats)
    results = {
        'run': measuring.where(torch.device('cpu'), ('torchvision',)),
        'batch_size': size,
        'rows': {name: milliseconds(name, size, repeats) for name in CONFIGS},
    }
    measuring.publish(results, 'batched_augmentation', tables, args.out, args.page)


if __name__ == '__main__':
    main()
