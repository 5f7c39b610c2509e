"""Figures drawn without pyplot: no global backend, no window, no state left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor


def evenly_chosen(size: int, count: int) -> Tensor:
    """So many places of a row of that size, evenly, both ends among them: Long[count]."""
    return torch.linspace(0, size - 1, min(count, size)).round().long()


def figure_of(
    rows: int, columns: int, width: float, height: float, **options: Any
) -> tuple[Figure, list[list[Axes]]]:
    """A figure with a grid of axes."""
    figure = Figure(figsize=(width, height), layout='constrained')
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, [list(row) for row in axes]


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a PNG whole or not at all; folders are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f'.{path.name}.partial')
    try:
        figure.savefig(partial, dpi=150, format='png')
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def for_imshow(image: Tensor) -> Any:
    """An image [C, H, W] of any range as ``imshow`` takes it: [H, W, 3] or [H, W], 0 to 1."""
    image = image.detach().float().cpu()
    low, high = image.min(), image.max()
    stretched = (image - low) / (high - low).clamp_min(1e-12)
    return stretched.permute(1, 2, 0).squeeze(-1).numpy()
