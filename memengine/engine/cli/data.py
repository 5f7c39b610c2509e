"""``memengine data``: what the model sees, and whether data or model is the bottleneck."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.logging import MMLogger

from memengine.engine.config.step_of_config import loader_of, step_of
from memengine.visualization.views import save_views, views_of

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
        save_views(images, path)
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
    trained = size * step.iterations / training
    return '\n'.join([*lines, *bottleneck(size / loading, trained, workers)])


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


def _median_seconds(do: Callable[[], Any], times: int) -> float | None:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        do()
        if get_device() == 'cuda':
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) if seconds else None
