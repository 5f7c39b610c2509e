"""Bytes and time of steps whose norms' and activations' results are computed again.

Beside the plain step, activation checkpointing that keeps the products, and of whole blocks; and
together with quantised activations. Written are a file of results, a plot and the page's table.

    python tools/benchmarks/recomputed_activations.py \
        --out docs/benchmarks --page docs/techniques/recomputed_activations.md
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import measuring
import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from memengine.techniques import checkpoint_activations, quantize_activations, recompute_activations

MODELS = (
    'vit_small_patch16_224',
    'swin_tiny_patch4_window7_224',
    'convnext_nano',
    'efficientnet_b0',
    'mobilenetv3_small_100',
    'densenet121',
    'resnet50',
)
TRANSFORMER = 'vit_small_patch16_224'


def eight_bits(model: nn.Module) -> None:
    """Quantise."""
    quantize_activations(model, bits=8)


def both(model: nn.Module) -> None:
    """Quantise what is not computed again."""
    recompute_activations(model)
    quantize_activations(model, bits=8)


WAYS: dict[str, Callable[[nn.Module], object]] = {
    'plain': lambda model: None,
    'recomputed': recompute_activations,
    'checkpointed but products': lambda model: checkpoint_activations(
        model, keep=['matmuls', 'attention']
    ),
    'checkpointed': checkpoint_activations,
    '8 bits': eight_bits,
    'recomputed, 8 bits': both,
}


def ways_of(name: str) -> list[str]:
    """Checkpointing's blocks are a transformer's matter here."""
    return [way for way in WAYS if name == TRANSFORMER or 'checkpointed' not in way]


def measure(name: str, batch: int, repeats: int) -> dict[str, Any]:
    """All ways of one model."""
    device = torch.device('cpu')
    torch.manual_seed(0)
    images = torch.randn(batch, 3, 224, 224)
    labels = torch.randint(1000, (batch,))
    steps: dict[str, tuple[nn.Module, measuring.Step]] = {}
    facts: dict[str, Any] = {}
    reference: list[torch.Tensor] = []
    for way in ways_of(name):
        torch.manual_seed(0)
        model = timm.create_model(name).train()
        WAYS[way](model)

        def step(model: nn.Module = model) -> None:
            nn.functional.cross_entropy(model(images), labels).backward()

        step()  # the first one measures, or compares
        model.zero_grad()
        with FlopCounterMode(display=False) as counter:
            step()
        found = measuring.step_facts(step, model, [images], device)
        gradient = found.pop('gradient')
        reference = reference or gradient
        facts[way] = {
            'saved_mib': found['saved_mib'],
            'flops': counter.get_total_flops(),
            'error': measuring.relative_error(gradient, reference),
        }
        steps[way] = model, step
    for way, seconds in measuring.time_in_turn(steps, repeats, device).items():
        facts[way]['seconds'] = seconds
    return facts


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """The page's table, and where it comes from."""
    cells = [['model', '', 'saved, MiB', 'of plain', 'products', 'time', 'error of the gradient']]
    for name, ways in results['models'].items():
        plain = ways['plain']
        for way, facts in ways.items():
            cells.append(
                [
                    name,
                    way,
                    f'{facts["saved_mib"]:.0f}',
                    f'{facts["saved_mib"] / plain["saved_mib"]:.2f}',
                    f'{facts["flops"] / plain["flops"] - 1:+.1%}',
                    f'{measuring.ratio(facts["seconds"], plain["seconds"]):.2f}',
                    f'{facts["error"]:.1g}',
                ]
            )
    return {'recomputed_activations': f'{measuring.table(cells)}\n\n{measuring.origin(results)}'}


def plot(results: Mapping[str, Any], folder: Path) -> None:
    """What is saved of plain, by model."""
    looks = {'recomputed': '#0b6bcb', '8 bits': '#9a9a9a', 'recomputed, 8 bits': '#2a9d8f'}
    names = list(results['models'])
    with measuring.figure(folder / 'recomputed_activations.png', 8, 3.6) as figure:
        axes = figure.subplots()
        for shift, (way, colour) in zip((-0.27, 0, 0.27), looks.items(), strict=True):
            models = results['models'].values()
            shares = [facts[way]['saved_mib'] / facts['plain']['saved_mib'] for facts in models]
            places = [place + shift for place in range(len(names))]
            axes.barh(places, shares, 0.25, color=colour, label=way)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.set_xlabel('bytes saved for backward, of the plain step')
        axes.legend()


def main() -> None:
    """Measure, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--out', type=Path, required=True, help='folder for results and plot')
    parser.add_argument('--page', type=Path, help='page whose table is filled in')
    parser.add_argument('--models', nargs='+', default=list(MODELS))
    parser.add_argument('--batch', type=int, default=8)
    parser.add_argument('--repeats', type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        'run': measuring.where(torch.device('cpu')),
        'models': {name: measure(name, args.batch, args.repeats) for name in args.models},
    }
    measuring.publish(results, 'recomputed_activations', tables, args.out, args.page)
    if set(args.models) == set(MODELS):
        plot(results, args.out)


if __name__ == '__main__':
    main()
