"""What ``memengine embed`` and our data loaders cost beside the bare forward and torch's loader.

``embed`` on images that are in memory, from the loader to the file, against the forward passes
of batches that torch's ``DataLoader`` stacks; JPEG files through ``Runner.build_dataloader``
against torch's ``DataLoader`` on torchvision's own ``ImageFolder``. In turn, in one process and one
thread, in CPU time.

    python tools/benchmarks/throughput.py --out work_dirs/throughput
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import measuring
import numpy as np
import torch
import torchvision
from mmengine.config import ConfigDict
from mmengine.registry import DefaultScope
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from memengine.engine import Runner
from memengine.evaluation.after_training.embed import EmbedLoop
from memengine.registry import MODELS

VIT = dict(type='TimmBackbone', model_name='vit_tiny_patch16_224')


class InMemory(Dataset[dict[str, Any]]):
    """Images that need no reading: [N, 3, S, S]."""

    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {'inputs': self.images[index], 'data_samples': {'index': index}}


def embedding(folder: Path, batch: int, batches: int, repeats: int) -> float:
    """Throughput of ``embed`` as a share of the bare forward's."""
    backbone = {**VIT, 'img_size': 32} if batch < 16 else VIT
    model = MODELS.build(dict(type='Classifier', backbone=backbone, num_classes=10)).eval()
    size = 32 if batch < 16 else 224
    images = torch.randn(batch * batches, 3, size, size)
    data = InMemory(images)
    loader = dict(
        batch_size=batch,
        num_workers=0,
        dataset=dict(type=lambda: data),
        collate_fn=dict(type='default_collate'),
    )
    runner: Any = SimpleNamespace(
        model=model,
        cfg=ConfigDict(val_dataloader=loader, load_from='none'),
        build_dataloader=Runner.build_dataloader,
        work_dir=str(folder),
        seed=0,
        rank=0,
        world_size=1,
    )

    plain = DataLoader(data, batch_size=batch)

    def bare() -> None:
        with torch.inference_mode():
            for part in plain:
                model.features(part['inputs'])

    def embed() -> None:
        for file in folder.glob('features_*'):
            file.unlink()
        EmbedLoop(runner).run()

    bare()
    embed()
    seconds = measuring.time_in_turn(
        {'bare': (nn.Module(), bare), 'embed': (nn.Module(), embed)}, repeats, torch.device('cpu')
    )
    return measuring.ratio(seconds['bare'], seconds['embed'])


def loading(folder: Path, count: int, repeats: int) -> float:
    """Throughput of our loader as a share of torch's."""
    draw = np.random.default_rng(0)
    for number in range(count):
        file = folder / f'class_{number % 2}' / f'{number}.jpg'
        file.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(draw.integers(0, 255, (40, 50, 3), dtype=np.uint8))
        coarse.resize((500, 400)).save(file)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(224),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(mean, std),
        ]
    )
    plain = DataLoader(
        torchvision.datasets.ImageFolder(str(folder), transform), batch_size=32, shuffle=True
    )
    pipeline = [
        dict(type='torchvision/RandomResizedCrop', size=224),
        dict(type='torchvision/RandomHorizontalFlip'),
        dict(type='torchvision/PILToTensor'),
        dict(type='torchvision/ToDtype', dtype='float32', scale=True),
        dict(type='torchvision/Normalize', mean=mean, std=std),
        dict(type='PackInputs'),
    ]
    source = dict(type='ImageFolder', root=str(folder))
    ours = Runner.build_dataloader(
        dict(
            batch_size=32,
            num_workers=0,
            sampler=dict(type='DefaultSampler', shuffle=True),
            collate_fn=dict(type='stack_views'),
            dataset=dict(type='ImageDataset', source=source, pipeline=pipeline),
        ),
        seed=0,
    )
    steps = {
        'torch': (nn.Module(), lambda: sum(len(labels) for _, labels in plain)),
        'ours': (nn.Module(), lambda: sum(len(batch['inputs']) for batch in ours)),
    }
    for _, step in steps.values():
        assert step() == count
    seconds = measuring.time_in_turn(steps, repeats, torch.device('cpu'))
    return measuring.ratio(seconds['torch'], seconds['ours'])


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """The page's table, and where it comes from."""
    cells: list[Sequence[str]] = [
        ['', 'beside', 'throughput'],
        ['`memengine embed`', 'the bare forward', f'{results["embed"]:.3f} ×'],
        ['data loader', "torch's, on torchvision's `ImageFolder`", f'{results["loader"]:.3f} ×'],
    ]
    size = f'vit_tiny at 224×224, batches of {results["batch_size"]}; JPEGs of 500×400; CPU time.'
    return {'throughput': f'{measuring.table(cells)}\n\n{size} {measuring.origin(results)}'}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, required=True, help='folder for JSON')
    parser.add_argument('--page', type=Path, help='page whose table is to be filled in')
    parser.add_argument('--repeats', type=int, default=7)
    parser.add_argument('--quick', action='store_true', help='few small images, one repeat')
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch, count, repeats = (4, 4, 1) if args.quick else (32, 128, args.repeats)
    with (
        tempfile.TemporaryDirectory() as embedded,
        tempfile.TemporaryDirectory() as pictures,
        DefaultScope.overwrite_default_scope('memengine'),
    ):
        results = {
            'run': measuring.where(torch.device('cpu'), ('timm', 'torchvision')),
            'batch_size': batch,
            'embed': embedding(Path(embedded), batch, 2, repeats),
            'loader': loading(Path(pictures), count, repeats),
        }
    measuring.publish(results, 'throughput', tables, args.out, args.page)


if __name__ == '__main__':
    main()
