"""Activation offload on a CPU: bytes that stay, against how far it looks ahead and what it moves.

Files stand for host memory: what is in them is not in the allocator, as on an accelerator what is
in pinned memory is not on the device. Bytes are counted; times are CPU seconds, in turn.

    python tools/benchmarks/activation_offload.py --out docs/benchmarks
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import measuring
import timm
import torch
from measuring import MIB
from torch import nn

from memengine.memory import SavedBytes
from memengine.memory.allocated import allocated_peak_bytes
from memengine.techniques import offload_activations

AHEAD = (0, 1, 2, 4, 8, 16, 32)
SIZES = (2**10, 2**18, 2**20, 2**21, 2**22, 2**23)
WAYS: dict[str, dict[str, Any]] = {
    **{f'look-ahead {n}': dict(store='disk', look_ahead=n) for n in AHEAD},
    **{f'from {n // 1024} KiB on': dict(store='disk', min_bytes=n) for n in SIZES},
    'in memory': dict(store='host'),
}
CPU = torch.device('cpu')


def make(arch: str, options: Mapping[str, Any] | None) -> nn.Module:
    """The same model each time, offloaded or plain, with gradients that are there already."""
    torch.manual_seed(0)
    model = timm.create_model(arch)
    if options is not None:
        offload_activations(model, **options)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def step(model: nn.Module, images: torch.Tensor) -> None:
    """Forward and backward."""
    model(images).logsumexp(1).sum().backward()


def count(model: nn.Module, images: torch.Tensor) -> dict[str, float]:
    """MiB of a step: kept by autograd, moved, and the most that is allocated at once."""
    run: Callable[[], None] = partial(step, model, images)
    with SavedBytes(model, images) as saved:
        run()
    facts = {'kept_mib': saved.peak_bytes / MIB, 'allocated_mib': allocated_peak_bytes(run) / MIB}
    handle = vars(model).get('forward')
    facts['moved_mib'] = handle.peak_stored_bytes / MIB if handle else 0.0
    return facts


def run(arch: str, batch_size: int, repeats: int) -> dict[str, dict[str, float]]:
    """All ways of one model."""
    images = torch.randn(batch_size, *timm.create_model(arch).default_cfg['input_size'])
    models = {'plain': make(arch, None)}
    models |= {name: make(arch, options) for name, options in WAYS.items()}
    facts = {name: count(model, images) for name, model in models.items()}
    steps = {name: (model, partial(step, model, images)) for name, model in models.items()}
    seconds = measuring.time_in_turn(steps, repeats, CPU)
    for name, figures in facts.items():
        figures['time'] = measuring.ratio(seconds[name], seconds['plain'])
    return facts


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """The page's table, and where it comes from."""
    rows = [['way', 'MiB moved', 'MiB kept', 'MiB allocated at most', 'CPU time']]
    for name, f in results['ways'].items():
        counted = [f'{f[key]:.0f}' for key in ('moved_mib', 'kept_mib', 'allocated_mib')]
        rows.append([name, *counted, f'{f["time"]:.2f}'])
    head = f'`{results["arch"]}`, batch {results["batch_size"]}, fp32:'
    text = f'{head}\n\n{measuring.table(rows)}\n\n{measuring.origin(results)}'
    return {'activation_offload': text}


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Bytes against the look-ahead and against the smallest storage that moves."""
    ways = results['ways']
    looks = {
        'allocated_mib': dict(color='#0b6bcb', marker='o', label='allocated at most'),
        'kept_mib': dict(color='#2a9d8f', marker='D', label='kept by autograd'),
    }
    panels: list[tuple[str, list[float], list[dict[str, float]]]] = [
        ('storages looked ahead', list(AHEAD), [ways[f'look-ahead {n}'] for n in AHEAD]),
        (
            'smallest storage that moves, MiB',
            [n / MIB for n in SIZES],
            [ways[f'from {n // 1024} KiB on'] for n in SIZES],
        ),
    ]
    with measuring.figure(path, 10.4, 4.2) as drawn:
        for axes, (label, places, points) in zip(
            drawn.subplots(1, 2, sharey=True), panels, strict=True
        ):
            for key, look in looks.items():
                axes.plot(places, [point[key] for point in points], **look)
                axes.axhline(ways['plain'][key], color=look['color'], linestyle=':', linewidth=1)
            axes.set(xlabel=label, ylabel='MiB (dotted: plain)', ylim=(0, None))
            axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--model', default='vit_tiny_patch16_224')
    parser.add_argument('--batch-size', type=int, default=8)
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument('--quick', action='store_true', help='a small model, one round')
    parser.add_argument('--out', type=Path, required=True, help='folder for figures and plot')
    parser.add_argument('--page', type=Path, help='page whose table is filled')
    args = parser.parse_args()
    if args.quick:
        args.model, args.repeats = 'test_vit', 1
    torch.set_num_threads(1)
    results = {
        'run': measuring.where(CPU),
        'arch': args.model,
        'batch_size': args.batch_size,
        'ways': run(args.model, args.batch_size, args.repeats),
    }
    measuring.publish(results, 'activation_offload', tables, args.out, args.page)
    plot(results, args.out / 'activation_offload.png')


if __name__ == '__main__':
    main()
