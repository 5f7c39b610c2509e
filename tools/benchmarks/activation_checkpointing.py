"""Activation checkpointing: bytes saved for backward against FLOPs computed again.

Bytes and FLOPs are counted, not timed, on fake tensors: no load of the machine matters, and any
size runs anywhere. MMEngine's own function and torch's budget, which acts on graphs that are
compiled, are measured on a real image; they scale with the batch.

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
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from matplotlib.axes import Axes
from measuring import MIB
from mmengine.runner.activation_checkpointing import turn_on_activation_checkpointing
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from memengine.memory import SavedBytes
from memengine.techniques import checkpoint_activations

Prepare = Callable[[nn.Module], object]
TENTHS = [tenth / 10 for tenth in range(11)]
OURS: dict[str, dict[str, Any]] = {
    'every block': dict(),
    'every 2nd block': dict(every=2),
    "keep 'matmuls', 'attention'": dict(keep=['matmuls', 'attention']),
    "keep 'attention'": dict(keep='attention'),
    **{f'budget {share:g}': dict(budget=share) for share in sorted([*TENTHS, 0.505, 0.525])},
}
TORCHS = (0, 0.1, 0.3, 0.5, 0.7, 1)  # budgets


def step(model: nn.Module, images: torch.Tensor) -> None:
    """Forward and backward."""
    model(images).logsumexp(1).sum().backward()


def count(model: nn.Module, images: torch.Tensor) -> dict[str, float]:
    """Bytes and FLOPs of a step, by the image; what is kept is settled before."""
    step(model, images)
    kept, peak = saved(model, images)
    with FlopCounterMode(display=False) as flops:
        step(model, images)
    return {
        'kept_mib': kept / len(images),
        'mib': peak / len(images),
        'gflop': flops.get_total_flops() / 1e9 / len(images),
    }


def saved(model: nn.Module, images: torch.Tensor) -> tuple[float, float]:
    """MiB that are kept from forward to backward, and at the peak of a step."""
    with SavedBytes(model, images) as meter:
        out = model(images)
        kept = meter.live_bytes
        out.logsumexp(1).sum().backward()
    return kept / MIB, meter.peak_bytes / MIB


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


def torchs(arch: str, budget: float) -> dict[str, float]:
    """Torch's own budget, of one image: FLOPs by the graphs of forward and backward.

    What backward computes again is in its graph, where saved bytes do not show; so no peak.
    """
    gflop = []

    def compiler(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with FlopCounterMode(display=False) as flops:
            graph(*inputs)
        gflop.append(flops.get_total_flops() / 1e9)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition
    )
    torch._dynamo.reset()
    model = timm.create_model(arch)
    images = torch.randn(1, *model.default_cfg['input_size'])
    with functorch.patch(activation_memory_budget=budget):
        compiled = torch.compile(model, backend=backend)
        step(compiled, images)
    kept, _ = saved(compiled, images)
    return {'kept_mib': kept, 'gflop': sum(gflop)}


def run(arch: str, batch_size: int) -> dict[str, Any]:
    """All ways of one model."""
    results = {'plain': measure(arch, batch_size, lambda model: None)}
    for name, options in OURS.items():
        results[name] = measure(
            arch, batch_size, lambda model, o=options: checkpoint_activations(model, **o)
        )
    if arch.startswith('vit'):
        results['MMEngine, every block'] = measure(arch, 1, as_mmengine, fake=False)
    for budget in TORCHS:
        results[f'torch, compiled, budget {budget:g}'] = torchs(arch, budget)
    plain = results['plain']
    for figures in results.values():
        figures['kept_share'] = figures['kept_mib'] / plain['kept_mib']
        if 'mib' in figures:
            figures['share'] = figures['mib'] / plain['mib']
        figures['extra'] = figures['gflop'] / plain['gflop'] - 1
    return {'arch': arch, 'batch_size': batch_size, 'ways': results}


def tables(results: dict[str, Any]) -> dict[str, str]:
    """The page's table of ways, with where it comes from."""
    parts = []
    for result in results['models']:
        batch_size = result['batch_size']
        heads = ['way', 'MiB at the peak', 'of plain', 'MiB kept until backward', 'of plain']
        rows = [[*heads, 'FLOPs computed again, of a step']]
        for name, f in result['ways'].items():
            rows.append([name, '–', '–'])
            if 'mib' in f:
                rows[-1][1:] = [f'{f["mib"] * batch_size:.0f}', f'{f["share"]:.3f}']
            rows[-1] += [f'{f["kept_mib"] * batch_size:.0f}', f'{f["kept_share"]:.3f}']
            rows[-1].append(f'{100 * f["extra"]:.1f} %')
        parts.append(f'`{result["arch"]}`, batch {batch_size}, fp32:\n\n{measuring.table(rows)}')
    return {'checkpointing': '\n\n'.join([*parts, measuring.origin(results)])}


LOOKS = {
    'budget': dict(color='#0b6bcb', marker='o', label='memengine, budget 0 to 1'),
    'every': dict(color='#4d4d4d', marker='s', linestyle=':', label='every k-th block'),
    'keep': dict(color='#2a9d8f', marker='D', linestyle='', label='memengine, keep'),
    'MMEngine': dict(color='#d1495b', marker='^', linestyle='', label='MMEngine, every block'),
    'torch': dict(color='#e09f3e', marker='v', linestyle='--', label='torch, budget, compiled'),
}
PANELS = {'share': 'saved at the peak', 'kept_share': 'kept until backward'}


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """The curve of budgets with what else there is beside it: a row for each model."""
    with measuring.figure(path, 10.4, 4.2 * len(results)) as drawn:
        all_axes = drawn.subplots(len(results), len(PANELS), squeeze=False)
        for row, result in zip(all_axes, results, strict=True):
            for axes, (key, title) in zip(row, PANELS.items(), strict=True):
                draw(axes, result['ways'], key)
                axes.set(
                    title=f'{result["arch"]}: {title}',
                    xlabel='FLOPs computed again, % of a step',
                    ylabel='bytes, of the plain step',
                    ylim=(0, 1.05),
                )
                axes.legend()


def draw(axes: Axes, ways: dict[str, dict[str, float]], key: str) -> None:
    """One panel: the ways that have the figure."""
    for start, look in LOOKS.items():
        points = [f for name, f in ways.items() if name.startswith(start) and key in f]
        points += [ways['plain']] if start == 'every' else []
        points.sort(key=lambda f: (f['extra'], -f[key]))
        if points:
            axes.plot([100 * f['extra'] for f in points], [f[key] for f in points], **look)


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
