"""The README.md of an exported model: what was trained on what, how it did, how it is loaded."""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmengine.config import Config

from memengine.evaluation.after_training.backbones import Backbone
from memengine.evaluation.after_training.results import table

_PACKAGES = ('memengine', 'torch', 'torchvision', 'timm', 'transformers', 'mmengine')
# What was logged of how the run went, and not of what it has learned.
_OF_THE_RUN = re.compile(r'.*lr|(data_)?time|.*_mib|alloc_retries|images_per_s')
_MACHINE_KEYS = ('load_from', 'work_dir', 'launcher', 'resume')


def write_model_card(
    runner: Any, backbone: Backbone, codes: Mapping[str, str], folder: Path
) -> None:
    """Write ``README.md``."""
    kind = type(runner.model).__name__
    cfg = Config({key: value for key, value in runner.cfg.items() if key not in _MACHINE_KEYS})
    count = sum(parameter.numel() for parameter in backbone.module.parameters())
    network = type(backbone.network).__name__
    parts = [
        f'# {network} trained with {kind}',
        f'`{backbone.name}` of a {kind} run: {network} of {backbone.library}, '
        f'{count / 1e6:.2f} M parameters.',
        '## Loading',
        *(f'```python\n{code}\n```' for code in codes.values()),
        '## Training',
        table(('what', 'value'), _training(runner)),
        *_figures(folder.parent),
        '## Versions',
        table(('package', 'version'), _versions()),
        '## Config',
        f'```python\n{cfg.pretty_text.strip()}\n```',
    ]
    (folder / 'README.md').write_text('\n\n'.join(parts) + '\n')


def _training(runner: Any) -> Iterator[tuple[str, Any]]:
    cfg = runner.cfg
    yield 'checkpoint', Path(cfg.load_from).name
    for name, unit in (('epoch', 'epochs'), ('iter', 'iterations')):
        if name in runner.message_hub.runtime_info:
            yield unit, runner.message_hub.get_info(name)
    yield 'data', ', '.join(dict.fromkeys(_sources(cfg.get('train_dataloader') or {})))
    if normalised := normalisation_of(cfg):
        yield 'images', ', '.join(f'{key} {value}' for key, value in normalised.items())
    yield 'images in a step of a rank', (cfg.get('train_dataloader') or {}).get('batch_size')


def normalisation_of(cfg: Mapping[str, Any]) -> dict[str, list[float]]:
    """``mean`` and ``std`` by which evaluated images are normalised; empty where not just by one.

    Of a ``Normalize`` of torchvision's, or of the model's data preprocessor, as images of 0 to 1
    have them: divided by 255 where they are those of images of 0 to 255.
    """
    found: list[dict[str, list[float]]] = []
    preprocessor = (cfg.get('model') or {}).get('data_preprocessor') or {}
    for node in (*_steps(cfg, 'Normalize'), preprocessor):
        if node.get('mean') is not None and node.get('std') is not None:
            white = 255 if max(*node['mean'], *node['std']) > 1 else 1
            one = {key: [value / white for value in node[key]] for key in ('mean', 'std')}
            found += [one] if one not in found else []
    return found[0] if len(found) == 1 else {}


def resizing_of(cfg: Mapping[str, Any], size: int) -> dict[str, Any]:
    """How evaluated images come to their size, by timm's names; empty where it has none for it.

    Args:
        cfg: The run's.
        size: Height and width of an image as the model takes it.
    """
    found = _steps(cfg, 'Resize')
    if not found and not _steps(cfg, 'CenterCrop'):
        return dict(crop_pct=1.0)
    sides = [node['size'] for node in found if 'size' in node and node == found[0]]
    edges = {edge for side in sides for edge in (side if isinstance(side, Sequence) else [side])}
    if len(sides) != len(found) or len(edges) != 1:
        return {}
    squashed = isinstance(sides[0], Sequence) and len(sides[0]) == 2
    return dict(
        crop_mode='squash' if squashed else 'center',
        crop_pct=math.nextafter(size / edges.pop(), 0),  # timm divides, and rounds down
        interpolation=str(found[0].get('interpolation', 'bilinear')),
    )


def _steps(cfg: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A transform of torchvision's, as often as it stands in the pipelines of evaluated images."""
    loader = cfg.get('val_dataloader') or cfg.get('test_dataloader')
    return [node for node in _dicts(loader) if node.get('type') == f'torchvision/{name}']


def _sources(config: Any) -> Iterator[str]:
    """Types of the sources of images in a data loader's config, or of its data set."""
    found = [node['source'] for node in _dicts(config) if isinstance(node.get('source'), dict)]
    for node in found or [config.get('dataset') or {}]:
        where = next((node[key] for key in ('root', 'ann_file', 'path') if key in node), None)
        yield f'{node.get("type", "unknown")}{f" ({where})" if where else ""}'


def _dicts(config: Any) -> Iterator[dict[str, Any]]:
    if isinstance(config, dict):
        yield config
        for value in config.values():
            yield from _dicts(value)
    elif isinstance(config, (list, tuple)):
        for value in config:
            yield from _dicts(value)


def _figures(report: Path) -> Iterator[str]:
    """What training and other commands have measured."""
    rows: list[tuple[str, Any]] = []
    if (summary := report / 'summary.json').is_file():
        final = json.loads(summary.read_text())['final']
        rows += [
            (f'`{name}`, last', f'{value:.4g}')
            for name, value in final.items()
            if value is not None and not _OF_THE_RUN.fullmatch(name)
        ]
    tables = [path.read_text().strip() for path in sorted(report.glob('*/*.md'))]
    tables = [text for text in tables if text.startswith('| of ')]
    if rows or tables:
        yield '## Figures'
        yield from ([table(('figure', 'value'), rows)] if rows else [])
        yield from tables


def _versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
