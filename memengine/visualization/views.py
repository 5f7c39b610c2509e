"""What a model is trained on: the views of samples, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from memengine.visualization.figures import figure_of, for_imshow, save_figure

_ROWS, _COLUMNS = 8, 12


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


def save_views(samples: Sequence[Sequence[Tensor]], path: str | Path) -> None:
    """Draw the views of each sample in a row, each stretched to its own range of brightness."""
    columns = max(map(len, samples))
    figure, axes = figure_of(len(samples), columns, 1.2 * columns, 1.2 * len(samples))
    for row, views in zip(axes, samples, strict=True):
        for place in row:
            place.set_axis_off()
        for place, view in zip(row, views, strict=False):
            place.imshow(for_imshow(view), cmap='gray', vmin=0, vmax=1)
    save_figure(figure, path)
