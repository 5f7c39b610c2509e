"""Curves and figures of a training, from what it has logged."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from memengine.visualization.figures import figure_of, save_figure
from memengine.visualization.scalars import Curve, History, read_history

_PANELS = (  # title, unit, names
    ('Learning rate', '', ('lr',)),
    ('Teacher temperature', '', ('teacher_temp',)),
    ('Teacher momentum', '', ('ema_momentum',)),
    ('Teacher entropy', 'nats', ('teacher_entropy', 'teacher_sample_entropy')),
    ('Feature spread', '', ('feature_std',)),
    ('Feature rank', 'dimensions', ('feature_rank',)),
    ('GPU memory, peak', 'MiB', ('memory_mib',)),
    ('Saved for backward, peak', 'MiB', ('saved_mib',)),
    ('Resident memory', 'MiB', ('rss_mib',)),
    ('Throughput', 'images/s', ('images_per_s',)),
)
_PEAKS = ('memory_mib', 'saved_mib', 'rss_mib')
_KNN = 'knn_top1'
_BASELINES = (('raw_pixels', 'raw pixels', ':'), ('untrained', 'untrained', '--'))


def write_report(work_dir: str | Path) -> Path:
    """Draw the curves of a training and sum it up.

    Reads ``WORK_DIR/*/vis_data/scalars.json`` of all runs, resumed ones joined, and writes
    ``curves.png`` (a panel for each quantity that was logged) and ``summary.json`` (final and
    best figures, peak memory, time) to ``WORK_DIR/report``.

    Raises:
        FileNotFoundError: When nothing was logged there.
        ValueError: For a damaged log.
    """
    history = read_history(work_dir)
    folder = Path(work_dir) / 'report'
    folder.mkdir(exist_ok=True)
    summary = json.dumps(_summary(history), indent=2, allow_nan=False)
    (folder / 'summary.json').write_text(summary + '\n')
    _draw(history, folder / 'curves.png')
    return folder


def _summary(history: History) -> dict[str, Any]:
    last = {name: _number(curve.values[-1]) for name, curve in history.train.items()}
    metrics = {name: curve for name, curve in history.val.items() if 'time' not in name}
    best = {
        name: dict(value=_number(max(curve.values)), iter=curve.iters[_argmax(curve.values)])
        for name, curve in metrics.items()
        if name.endswith(_KNN)
    }
    return dict(
        runs=history.runs,
        iterations=max(curve.iters[-1] for curve in history.train.values()),
        epochs=history.epochs,
        train_time_s=history.total_s('time'),
        final=last | {name: _number(curve.values[-1]) for name, curve in metrics.items()},
        best=best,
        peak={n: _number(max(history.train[n].values)) for n in _PEAKS if n in history.train},
    )


def _number(value: float) -> float | None:
    """JSON knows neither NaN nor infinity."""
    return value if math.isfinite(value) else None


def _argmax(values: list[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _draw(history: History, path: Path) -> None:
    panels: list[Callable[[Axes], None]] = []
    losses = tuple(name for name in history.train if 'loss' in name)
    for title, unit, names in (('Loss', '', losses), *_PANELS):
        curves = {name: history.train[name] for name in names if name in history.train}
        if curves:
            panels.append(partial(_plot_curves, title=title, unit=unit, curves=curves))
        if title == 'Loss':
            metrics = [name for name in history.val if name.endswith(_KNN)]
            panels += [partial(_plot_knn, val=history.val, name=name) for name in metrics]
    columns = math.ceil(math.sqrt(len(panels)))
    rows = math.ceil(len(panels) / columns)
    figure, axes = figure_of(rows, columns, width=4.2 * columns, height=2.8 * rows)
    flat_axes = [axis for row in axes for axis in row]
    for draw, axis in zip(panels, flat_axes, strict=False):
        draw(axis)
        axis.set_xlabel('iteration', fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
        axis.spines[['top', 'right']].set_visible(False)
    for axis in flat_axes[len(panels) :]:
        axis.set_visible(False)
    save_figure(figure, path)


def _plot_curves(axis: Axes, title: str, unit: str, curves: dict[str, Curve]) -> None:
    axis.set_title(f'{title} ({unit})' if unit else title, fontsize=10)
    for name, curve in curves.items():
        axis.plot(curve.iters, curve.values, linewidth=1.3, label=name)
    if unit in ('MiB', 'images/s'):  # amounts, of which half is half as high
        axis.set_ylim(bottom=0)
    if len(curves) > 1:
        axis.legend(fontsize=7, frameon=False)


def _plot_knn(axis: Axes, val: dict[str, Curve], name: str) -> None:
    curve = val[name]
    axis.set_title(f'k-NN top-1 (%): {curve.values[-1]:.1f}', fontsize=10)
    axis.plot(curve.iters, curve.values, marker='o', markersize=3, linewidth=1.3, label='trained')
    for suffix, label, style in _BASELINES:
        if f'{name}_{suffix}' in val:
            value = val[f'{name}_{suffix}'].values[-1]
            axis.axhline(
                value, color='0.4', linestyle=style, linewidth=1, label=f'{label} {value:.1f}'
            )
    axis.legend(fontsize=7, frameon=False)
