"""``memengine data``: what the model sees, and whether data or model is the bottleneck."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.logging import MMLogger
from torch import Tensor

from memengine.engine.config.training_step import loader_of, step_of
from memengine.visualization.figures import figure_of, for_imshow, save_figure

__all__ = ['bottleneck', 'examine_data', 'views_of']

_ROWS, _COLUMNS = 8, 12
_BATCHES, _STEPS = 5, 3


def examine_data(cfg: Config) -> str:
    """Draw the first samples, time loading and training, and say which of the two is slower."""
    MMLogger.get_current_instance().setLevel('WARNING')
    batches = iter(loader_of(cfg))
    batch = next(batches)  # the first one may open files that stay open
    size = cfg.train_dataloader.get('batch_size', 1)
    images = views_of(batch)
    if images:
        path = Path(cfg.work_dir) / 'data' / 'views.png'
        _draw(images, path)
        shapes = ', '.join('×'.join(map(str, view.shape)) for view in images[0])
        lines = [f'{path}: {len(images)} samples, their views side by side ({shapes})']
    else:
        lines = ['a batch holds no images [C, H, W], of which pictures could be drawn']
    loading = _median_seconds(lambda: next(batches), min(_BATCHES, len(loader_of(cfg)) - 1))
    step = step_of(cfg, batch)()
    step.run()  # which makes the optimiser's state
    training = _median_seconds(step.run, _STEPS)
    if loading is None or training is None:
        return '\n'.join([*lines, 'the data has one batch only, too few to be timed'])
    workers = cfg.train_dataloader.get('num_workers', 0)
    return '\n'.join([*lines, *bottleneck(size / loading, size / training, workers)])


def views_of(batch: Any) -> list[list[Tensor]]:
    """The views of each sample, [C, h, w] each; empty where a batch holds something else."""
    inputs = batch.get('inputs') if isinstance(batch, Mapping) else None
    if isinstance(inputs, Tensor):
        inputs = [inputs]
    if not isinstance(inputs, (list, tuple)) or not all(isinstance(x, Tensor) for x in inputs):
        return []
    if all(view.ndim == 4 for view in inputs):
        samples = [list(views) for views in zip(*inputs, strict=True)]
    elif all(image.ndim == 3 for image in inputs):  # of several sizes, as detectors take them
        samples = [[image] for image in inputs]
    else:
        return []
    drawable = all(view.shape[0] in (1, 3) for views in samples for view in views)
    return [views[:_COLUMNS] for views in samples[:_ROWS]] if drawable else []


def bottleneck(data: float, model: float, workers: int) -> list[str]:
    """Which of the two is slower, in words.

    Args:
        data: Images a second that one process loads.
        model: Images a second that the model is trained with.
        workers: Processes that load (``num_workers``); with 0 data and model take turns.
    """
    device = get_device()
    lines = [
        f'data: {data:.0f} images/s in one process',
        f'model: {model:.0f} images/s on {device}',
    ]
    needed = int(model / data) + 1
    if workers == 0:
        share = model / (data + model)
        lines.append(
            f'they take turns, as train_dataloader.num_workers=0: {share:.0%} of the time goes to '
            f'data; with num_workers={needed} it would be loaded meanwhile'
        )
    elif data * workers < model:
        lines.append(
            f'the data is the bottleneck: {workers} worker(s) load {data * workers / model:.2f} '
            f'times what the model takes; set train_dataloader.num_workers={needed} where there '
            'are as many cores, or a cheaper pipeline'
        )
    else:
        lines.append(
            f'the model is the bottleneck: {workers} worker(s) load {data * workers / model:.1f} '
            'times what it takes, if each has a core of its own'
        )
    return lines


def _median_seconds(carry_out: Callable[[], Any], times: int) -> float | None:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        carry_out()
        if get_device() == 'cuda':
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) if seconds else None


def _draw(samples: list[list[Tensor]], path: Path) -> None:
    columns = max(map(len, samples))
    figure, axes = figure_of(len(samples), columns, 1.2 * columns, 1.2 * len(samples))
    for row, views in zip(axes, samples, strict=True):
        for place in row:
            place.set_axis_off()
        for place, view in zip(row, views, strict=False):
            place.imshow(for_imshow(view), cmap='gray', vmin=0, vmax=1)
    save_figure(figure, path)
