"""Dropped and quantised activations: bytes kept, time, and the error of the gradient.

On crops of photographs, one step after some steps of training, beside the plain step and
the published DropIT. Written are a file of results, a plot and the page's tables.

    python tools/benchmarks/compressed_activations.py --out docs/benchmarks
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import statistics
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import measuring
import timm
import torch
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.nn import functional as F

from memengine.memory import SavedBytes
from memengine.techniques.codecs.sparse import Cast
from memengine.techniques.compression.dropit import drop_activations
from memengine.techniques.compression.quantized_activations import quantize_activations

MODELS = ('deit_tiny_patch16_224', 'resnet18', 'resnet50')
FEWER_WAYS = 'resnet50'  # takes long: ends of the scales only
FULL, QUICK = (16, 224), (2, 64)  # images in a batch, pixels of a side
CLASSES = 10
GAMMAS = (0.3, 0.5, 0.7, 0.9)
BITS = (8, 4, 2)
WARM_UP = 5  # steps of training before anything is measured

Apply = Callable[[nn.Module], object]


def ways(peer: types.ModuleType | None) -> dict[str, Apply]:
    """What is compared, by name."""
    drop = partial(drop_activations, strategy='block_mink')
    found: dict[str, Apply] = {'plain': lambda model: None}
    for gamma in GAMMAS:
        found[f'DropIT {gamma:g}'] = partial(drop, gamma=gamma)
        found[f'DropIT {gamma:g}, whole tensor'] = partial(drop_activations, gamma=gamma)
        if peer is not None:
            found[f'published DropIT {gamma:g}'] = partial(published, peer, gamma)
    found['DropIT 0.9, 16-bit values'] = partial(drop, gamma=0.9, values=Cast(torch.bfloat16))
    for bits in BITS:
        found[f'{bits} bits'] = partial(quantize_activations, bits=bits)
    for bits in BITS[:2]:
        found[f'DropIT 0.9, rest {bits} bits'] = partial(together, drop, bits)
    return found


def together(drop: Apply, bits: int, model: nn.Module) -> None:
    """Layers' inputs dropped, the rest quantised."""
    drop(model, gamma=0.9)  # type: ignore[call-arg]
    quantize_activations(model, bits)


def published(peer: types.ModuleType, gamma: float, model: nn.Module) -> None:
    """The reference's own call; it cannot take the last layer's input, which is not contiguous."""
    model.get_classifier().no_dropit = True  # type: ignore[operator]
    with contextlib.redirect_stdout(io.StringIO()):
        peer.to_dropit(model, 'mink', gamma, False)


def make(name: str, images: Tensor, labels: Tensor) -> nn.Module:
    """A model after some steps."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=CLASSES).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for _ in range(WARM_UP):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model


def photographs(batch: int, side: int) -> tuple[Tensor, Tensor]:
    """Crops of scikit-learn's two photographs, [batch, 3, side, side], and made-up labels."""
    generator = torch.Generator().manual_seed(0)
    crops = []
    for index in range(batch):
        photograph = torch.tensor(load_sample_images().images[index % 2]).permute(2, 0, 1)
        room = [length - side for length in photograph.shape[1:]]
        top, left = (int(torch.randint(n, (), generator=generator)) for n in room)
        crops.append(photograph[:, top : top + side, left : left + side].float() / 128 - 1)
    return torch.stack(crops), torch.arange(batch) % CLASSES


def facts_of(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Any]:
    """Bytes and gradient of one step."""
    model.zero_grad()
    with SavedBytes(model, images, labels) as meter:
        loss = F.cross_entropy(model(images), labels)
        hidden = meter.hidden_bytes(loss)
        loss.backward()
    gradient = {name: p.grad.clone() for name, p in model.named_parameters()}
    mib = (meter.peak_bytes + hidden) / measuring.MIB
    return {'saved_mib': mib, 'loss': loss.item(), 'gradient': gradient}


def errors(gradient: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative norm and cosine of all parameters together, and of layers: median and worst."""
    names = [name for name in exact if exact[name].norm() > 0]
    relative = [float((gradient[n] - exact[n]).norm() / exact[n].norm()) for n in names]
    flat = [torch.cat([some[n].flatten() for n in names]) for some in (gradient, exact)]
    return {
        'relative': float((flat[0] - flat[1]).norm() / flat[1].norm()),
        'cosine': float(F.cosine_similarity(flat[0], flat[1], dim=0)),
        'median': statistics.median(relative),
        'worst': max(relative),
        'worst_layer': names[relative.index(max(relative))],
    }


def measure(
    name: str, compared: Mapping[str, Apply], repeats: int, size: tuple[int, int]
) -> dict[str, Any]:
    """All ways of one model."""
    images, labels = photographs(*size)
    trained = make(name, images, labels)
    rows: dict[str, Any] = {}
    steps: dict[str, tuple[nn.Module, measuring.Step]] = {}
    exact: dict[str, Any] = {}
    for way, apply in compared.items():
        if name == FEWER_WAYS and any(f'{some:g}' in way.split() for some in (*GAMMAS[:3], 2)):
            continue
        model = copy.deepcopy(trained)
        apply(model)
        facts = facts_of(model, images, labels)
        exact = exact or facts
        rows[way] = {
            'saved_mib': facts['saved_mib'],
            'same_loss': facts['loss'] == exact['loss'],
            **errors(facts['gradient'], exact['gradient']),
        }
        steps[way] = (model, partial(_step, model, images, labels))
    seconds = measuring.time_in_turn(steps, repeats, torch.device('cpu'))
    for way, row in rows.items():
        row['time'] = measuring.ratio(seconds[way], seconds['plain'])
    return rows


def _step(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    F.cross_entropy(model(images), labels).backward()


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """The page's table, and where it comes from."""
    heads = ['model', 'kept as', 'saved, MiB', 'of plain', 'time', 'gradient: relative error']
    cells = [[*heads, 'cosine', 'layers: median error', 'worst']]
    for name, rows in results['models'].items():
        for way, row in rows.items():
            cells.append(
                [
                    name,
                    way,
                    f'{row["saved_mib"]:.0f}',
                    f'{row["saved_mib"] / rows["plain"]["saved_mib"]:.2f}',
                    f'{row["time"]:.2f}',
                    f'{row["relative"]:.3f}',
                    f'{row["cosine"]:.2f}',
                    f'{row["median"]:.3f}',
                    f'{row["worst"]:.2f}',
                ]
            )
    return {'compressed_activations': f'{measuring.table(cells)}\n\n{measuring.origin(results)}'}


def plot(results: Mapping[str, Any], folder: Path) -> None:
    """Bytes, time and error of the gradient against gamma and bits, by model."""
    values = {'saved_mib': 'saved, plain = 1', 'time': 'time, plain = 1', 'relative': 'error'}
    colours = ('#0b6bcb', '#d1495b', '#e09f3e')
    path = folder / 'compressed_activations.png'
    with measuring.figure(path, 9, 6) as figure:
        grid = figure.subplots(2, len(values))
        for (name, rows), colour in zip(results['models'].items(), colours, strict=False):
            for column, (value, label) in enumerate(values.items()):
                unit = rows['plain'][value] or 1
                series = {
                    'DropIT {}': (0, GAMMAS, '-'),
                    'published DropIT {}': (0, GAMMAS, ':'),
                    '{} bits': (1, BITS, '-'),
                }
                for pattern, (line, settings, style) in series.items():
                    there = [s for s in settings if pattern.format(s) in rows]
                    heights = [rows[pattern.format(s)][value] / unit for s in there]
                    grid[line][column].plot(
                        [settings.index(s) for s in there], heights, style,
                        marker='o', color=colour, label=f'{name}, {pattern.format("").strip()}',
                    )  # fmt: skip
                    grid[line][column].set(xticks=range(len(settings)), ylabel=label)
                    grid[line][column].set_xticklabels([f'{s:g}' for s in settings])
        for axes, title in zip((grid[0][1], grid[1][1]), ('gamma', 'bits'), strict=True):
            axes.set_xlabel(title)
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, fontsize=8, loc='outside upper center', ncols=3)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, required=True, help='folder for JSON and plot')
    parser.add_argument('--page', type=Path, help='page whose table is to be filled in')
    parser.add_argument('--peers', nargs='*', default=[], help='folders that hold the published')
    parser.add_argument('--models', nargs='*', default=MODELS)
    parser.add_argument('--repeats', type=int, default=5, help='rounds of timing')
    parser.add_argument('--quick', action='store_true', help='small images')
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    peer = measuring.import_peer('dropit', args.peers) if args.peers else None
    compared = ways(peer)
    size = QUICK if args.quick else FULL
    results = {
        'run': measuring.where(torch.device('cpu')),
        'models': {name: measure(name, compared, args.repeats, size) for name in args.models},
    }
    measuring.publish(results, 'compressed_activations', tables, args.out, args.page)
    plot(results, args.out)


if __name__ == '__main__':
    main()
