"""What the meter of saved bytes costs in a step that it counts, and in one that it does not.

Forward and backward of one model in one process, in turn: without a meter, inside one, and without
again (``off``: after meters were entered and left). Medians of the ratios within a round, in time
of the CPU, which others on the machine disturb least.

    python tools/benchmarks/meter_cost.py --out docs/benchmarks --page docs/memory.md
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import measuring
import timm
import torch
from torch import Tensor, nn

from memengine.memory import SavedBytes

MODELS: list[tuple[str, int, dict[str, Any]]] = [  # of timm: name, batch, arguments
    (
        'vit_tiny_patch16_224',
        64,
        dict(img_size=16, patch_size=4, in_chans=1, embed_dim=128, depth=2, num_heads=4),
    ),
    ('deit_tiny_patch16_224', 2, {}),
]


def step(model: nn.Module, images: Tensor) -> None:
    """Forward and backward."""
    model(images).square().mean().backward()


def metered(model: nn.Module, images: Tensor) -> None:
    """The same inside a meter, as MemoryHook does it."""
    with SavedBytes(model):
        step(model, images)


def measure(
    name: str, batch: int, options: Mapping[str, Any], rounds: int, device: torch.device
) -> dict[str, Any]:
    """Ratios of one model."""
    torch.manual_seed(0)
    model = timm.create_model(name, **options).to(device)
    channels, size = options.get('in_chans', 3), options.get('img_size', 224)
    images = torch.randn(batch, channels, size, size, device=device)
    for warm in (step, metered):
        warm(model, images)
    calls = dict(plain=step, metered=metered, off=step)
    steps = {key: (model, partial(call, model, images)) for key, call in calls.items()}
    seconds = measuring.time_in_turn(steps, rounds, device)
    row = {'model': name, 'batch': batch, 'image': size, 'step_s': sorted(seconds['plain'])}
    row['step_s'] = row['step_s'][rounds // 2]
    return row | {
        key: measuring.ratio(seconds[key], seconds['plain']) for key in ('metered', 'off')
    }


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """The page's table, and where it comes from."""
    cells = [['model', 'images', 'step, CPU s', 'metered', 'not metered, again']]
    for row in results['rows']:
        images = f'{row["batch"]} of {row["image"]} × {row["image"]}'
        ratios = [f'{row[key] - 1:+.1%}' for key in ('metered', 'off')]
        cells.append([f'`{row["model"]}`', images, f'{row["step_s"]:.3f}', *ratios])
    return {'meter_cost': f'{measuring.table(cells)}\n\n{measuring.origin(results)}'}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, required=True, help='folder for JSON')
    parser.add_argument('--page', type=Path, help='page whose table is to be filled in')
    parser.add_argument('--rounds', type=int, default=60)
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--quick', action='store_true', help='the smallest model, twice')
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.set_num_threads(1)
    models, rounds = (MODELS[:1], 2) if args.quick else (MODELS, args.rounds)
    rows = [measure(*model, rounds, device) for model in models]
    results = {'run': measuring.where(device), 'rows': rows}
    measuring.publish(results, 'meter_cost', tables, args.out, args.page)


if __name__ == '__main__':
    main()
