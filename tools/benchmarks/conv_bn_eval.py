"""Bytes that frozen-BatchNorm training keeps: plain, with memengine and with MMEngine.

Pairs, bytes and FLOPs are counted on the meta device, so any machine gives the same figures, in
minutes, without computing anything. Written are a file of results, a plot and the page's table.

    python tools/benchmarks/conv_bn_eval.py --out docs/benchmarks
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import measuring
import timm
import torch
from mmengine.model.efficient_conv_bn_eval import (
    efficient_conv_bn_eval_control,
    turn_on_efficient_conv_bn_eval_for_single_model,
)
from torch import nn
from torch.fx.proxy import TraceError
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models.detection import maskrcnn_resnet50_fpn

from memengine.memory import saved_bytes
from memengine.techniques import efficient_conv_bn_eval
from memengine.techniques.sharding.materializing import on_meta

MODELS = [
    'resnet18',
    'resnet50',
    'efficientnet_b0',
    'regnety_002',
    'darknet53',
    'mobilenetv3_small_100',
    'dla34',
    'res2net50_26w_4s',
    'densenet121',
    'mask_rcnn',
    'densenet121, weights frozen',
]
SIZES = ((32, 224), (8, 128))  # images in a batch, pixels of a side


def make(name: str) -> nn.Module:
    """A model in training mode whose BatchNorm layers are in eval mode, or frozen altogether."""
    name, _, is_frozen = name.partition(', ')
    with on_meta():
        if name == 'mask_rcnn':
            model = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None).backbone
        else:
            model = timm.create_model(name)
    for layer in model.train().modules():
        if isinstance(layer, _BatchNorm):
            layer.eval().requires_grad_(not is_frozen)
    return model


def ours(model: nn.Module) -> Callable[[], int]:
    """Apply memengine's; returns what counts the fused pairs."""
    found = efficient_conv_bn_eval(model, report=lambda line: None)
    return lambda: len(found.fused)


def mmengines(model: nn.Module) -> Callable[[], int]:
    """Apply MMEngine's; returns what counts the fused pairs."""
    turn_on_efficient_conv_bn_eval_for_single_model(model)
    graph: Any = model.forward.__self__.graph  # type: ignore[attr-defined]
    return lambda: sum(node.target is efficient_conv_bn_eval_control for node in graph.nodes)


WAYS = {'plain': lambda model: lambda: 0, 'memengine': ours, 'MMEngine': mmengines}


def pairs_that_exist(model: nn.Module) -> tuple[int, float]:
    """BatchNorm layers that read, as autograd knows, a convolution's output; and MiB of these."""
    found = []

    def look(layer: nn.Module, args: tuple[torch.Tensor]) -> None:
        if type(args[0].grad_fn).__name__.startswith('Conv'):
            found.append(args[0].nbytes)

    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            layer.register_forward_pre_hook(look)
    batch, side = SIZES[0]
    model(torch.empty(batch, 3, side, side, device='meta'))
    return len(found), sum(found) / measuring.MIB


def count(name: str) -> dict[str, Any]:
    """Pairs and bytes of one model, by way and size."""
    facts: dict[str, Any] = {'pairs': {}, 'mib': {}, 'flops': {}}
    facts['pairs']['exist'], facts['between_mib'] = pairs_that_exist(make(name))
    for way, turn_on in WAYS.items():
        model = make(name)
        try:
            fused = turn_on(model)
        except TraceError:
            continue
        facts['mib'][way] = [
            saved_bytes(lambda m=model, x=images: m(x), model) / measuring.MIB
            for images in (torch.empty(n, 3, side, side, device='meta') for n, side in SIZES)
        ]
        facts['pairs'][way] = fused()
        facts['flops'][way] = flops_of(model)
    weights = [m.weight for m in make(name).modules() if isinstance(m, _ConvNd)]
    facts['largest_weight_mib'] = max(weight.nbytes for weight in weights) / measuring.MIB
    return facts


def flops_of(model: nn.Module) -> int:
    """FLOPs of convolutions and matrix products in a step."""
    batch, side = SIZES[0]
    with FlopCounterMode(display=False) as counter:
        out = model(torch.empty(batch, 3, side, side, device='meta'))
        outs = out.values() if isinstance(out, dict) else [out]
        sum(tensor.sum() for tensor in outs).backward()
    return counter.get_total_flops()


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """The page's table, and where it comes from."""
    sizes = [f'{batch}×{side}²' for batch, side in SIZES]
    heads = ['', 'pairs', 'fused', 'by MMEngine', f'bytes between the two, of plain at {sizes[0]}']
    for size in sizes:
        heads += [f'plain, MiB at {size}', 'memengine', 'MMEngine']
    cells = [[*heads, 'largest weight made in backward, MiB']]
    for name, facts in results['models'].items():
        pairs, mib = facts['pairs'], facts['mib']
        row = [name, *(str(pairs.get(way, '–')) for way in ('exist', 'memengine', 'MMEngine'))]
        row.append(f'{facts["between_mib"] / mib["plain"][0]:.0%}')
        for index in range(len(SIZES)):
            row.append(f'{mib["plain"][index]:.0f}')
            for way in ('memengine', 'MMEngine'):
                row.append(
                    f'{mib[way][index] / mib["plain"][index] - 1:+.0%}' if way in mib else '–'
                )
        cells.append([*row, f'{facts["largest_weight_mib"]:.1f}'])
    return {'conv_bn_eval': f'{measuring.table(cells)}\n\n{measuring.origin(results)}'}


def plot(results: Mapping[str, Any], folder: Path) -> None:
    """Bytes of every model beside those of the plain step, at both sizes."""
    names = list(results['models'])
    colours = {'memengine': '#0b6bcb', 'MMEngine': '#d1495b'}
    with measuring.figure(folder / 'conv_bn_eval.png', 9, 4.2) as figure:
        for index, axes in enumerate(figure.subplots(1, len(SIZES), sharey=True)):
            for shift, (way, colour) in zip((-0.2, 0.2), colours.items(), strict=True):
                parts = [results['models'][name]['mib'] for name in names]
                shares = [part[way][index] / part['plain'][index] for part in parts]
                places = [place + shift for place in range(len(names))]
                axes.barh(places, shares, 0.38, label=way, color=colour)
            axes.axvline(1, color='#4d4d4d', linewidth=1, label='plain')
            axes.set(
                title='{} images of {}²'.format(*SIZES[index]),
                xlabel='saved for backward, plain = 1',
                yticks=range(len(names)),
                yticklabels=names,
            )
        axes.invert_yaxis()
        figure.legend(
            *axes.get_legend_handles_labels(), fontsize=9, loc='outside upper center', ncols=3
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, required=True, help='folder for JSON and plot')
    parser.add_argument('--page', type=Path, help='page whose table is to be filled in')
    parser.add_argument('--quick', action='store_true', help='the first model only')
    args = parser.parse_args()
    names = MODELS[:1] if args.quick else MODELS
    results = {
        'run': measuring.where(torch.device('cpu'), ('torchvision', 'mmengine')),
        'models': {name: count(name) for name in names},
    }
    measuring.publish(results, 'conv_bn_eval', tables, args.out, args.page)
    plot(results, args.out)


if __name__ == '__main__':
    main()
