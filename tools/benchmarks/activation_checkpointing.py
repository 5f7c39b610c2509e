"""Activation checkpointing: bytes saved for backward against FLOPs computed again.

Bytes and FLOPs are counted, not timed, on fake tensors: no load of the machine matters, and any
size runs anywhere. MMEngine's own function is measured on a real image; it scales with the batch.

    python tools/benchmarks/activation_checkpointing.py --out docs/benchmarks
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measuring
import timm
import torch
from measuring import MIB
from mmengine.runner.activation_checkpointing import turn_on_activation_checkpointing
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from memengine.memory import SavedBytes
from memengine.techniques import checkpoint_activations

Prepare = Callable[[nn.Module], object]
OURS: dict[str, dict[str, Any]] = {
    'every block': dict(),
    'every 2nd block': dict(every=2),
    "keep 'matmuls', 'attention'": dict(keep=['matmuls', 'attention']),
    "keep 'attention'": dict(keep='attention'),
    **{f'budget {tenth / 10:g}': dict(budget=tenth / 10) for tenth in range(11)},
}


def step(model: nn.Module, images: torch.Tensor) -> None:
    """Forward and backward."""
    model(images).logsumexp(1).sum().backward()


def count(model: nn.Module, images: torch.Tensor) -> dict[str, float]:
    """Bytes at the peak and FLOPs of a step, by the image; what is kept is settled before."""
    step(model, images)
    with SavedBytes(model, images) as saved:
        step(model, images)
    with FlopCounterMode(display=False) as flops:
        step(model, images)
    return {
        'mib': saved.peak_bytes / MIB / len(images),
        'gflop': flops.get_total_flops() / 1e9 / len(images),
    }


def faked(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """The model with tensors that have everything but values."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(mode.from_tensor(parameter.detach()))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = mode.from_tensor(buffer)
    return model


def measure(arch: str, batch_size: int, prepare: Prepare, fake: bool = True) -> dict[str, float]:
    """The figures of a model in the way that ``prepare`` makes it run."""
    model, mode = timm.create_model(arch), FakeTensorMode()
    images = torch.randn(batch_size, *model.default_cfg['input_size'])
    if fake:
        model, images = faked(model, mode), mode.from_tensor(images)
    with mode if fake else contextlib.nullcontext():
        prepare(model)
        return count(model, images)


def as_mmengine(model: nn.Module) -> None:
    """Every block through MMEngine's own function."""
    turn_on_activation_checkpointing(model, [f'blocks.{i}' for i in range(len(model.blocks))])


def run(arch: str, batch_size: int) -> dict[str, Any]:
    """All ways of one model."""
    results = {'plain': measure(arch, batch_size, lambda model: None)}
    for name, options in OURS.items():
        results[name] = measure(
            arch, batch_size, lambda model, o=options: checkpoint_activations(model, **o)
        )
    if arch.startswith('vit'):
        results['MMEngine, every block'] = measure(arch, 1, as_mmengine, fake=False)
    plain = results['plain']
    for figures in results.values():
        figures['share'] = figures['mib'] / plain['mib']
        figures['extra'] = figures['gflop'] / plain['gflop'] - 1
    return {'arch': arch, 'batch_size': batch_size, 'ways': results}


def tables(results: dict[str, Any]) -> dict[str, str]:
    """The page's table of ways, with where it comes from."""
    parts = []
    for result in results['models']:
        batch_size = result['batch_size']
        rows = [['way', 'saved MiB', 'of plain', 'FLOPs computed again, of a step']]
        rows += [
            [name, f'{f["mib"] * batch_size:.0f}', f'{f["share"]:.3f}', f'{100 * f["extra"]:.1f} %']
            for name, f in result['ways'].items()
        ]
        parts.append(f'`{result["arch"]}`, batch {batch_size}, fp32:\n\n{measuring.table(rows)}')
    return {'checkpointing': '\n\n'.join([*parts, measuring.origin(results)])}


LOOKS = {
    'budget': dict(color='#0b6bcb', marker='o', label='memengine, budget 0 to 1'),
    'every': dict(color='#4d4d4d', marker='s', linestyle=':', label='every k-th block'),
    'keep': dict(color='#2a9d8f', marker='D', linestyle='', label='memengine, keep'),
    'MMEngine': dict(color='#d1495b', marker='^', linestyle='', label='MMEngine, every block'),
}


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """The curve of budgets, with what else there is beside it, one axis for each model."""
    with measuring.figure(path, 5.2 * len(results), 4.2) as drawn:
        all_axes = drawn.subplots(1, len(results), squeeze=False)[0]
        for axes, result in zip(all_axes, results, strict=True):
            for start, look in LOOKS.items():
                points = [f for name, f in result['ways'].items() if name.startswith(start)]
                points += [result['ways']['plain']] if start == 'every' else []
                points.sort(key=lambda f: (f['extra'], -f['share']))
                if points:
                    extra = [100 * f['extra'] for f in points]
                    axes.plot(extra, [f['share'] for f in points], **look)
            axes.set(
                title=f'{result["arch"]}, batch {result["batch_size"]}',
                xlabel='FLOPs computed again, % of a step',
                ylabel='saved bytes, of the plain step',
                ylim=(0, 1.05),
            )
            axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--models', nargs='+', default=['vit_small_patch16_224'])
    parser.add_argument('--batch-size', type=int, default=16)
    parser.add_argument('--out', type=Path, required=True, help='folder for figures and plot')
    parser.add_argument('--page', type=Path, help='page whose table is filled')
    args = parser.parse_args()
    torch.manual_seed(0)
    results = {
        'run': measuring.where(torch.device('cpu'), ['mmengine']),
        'models': [run(arch, args.batch_size) for arch in args.models],
    }
    measuring.publish(results, 'activation_checkpointing', tables, args.out, args.page)
    plot(results['models'], args.out / 'activation_checkpointing.png')


if __name__ == '__main__':
    main()
