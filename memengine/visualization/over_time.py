"""Where the same samples lie at moments of a training, all in one plane.

Shapes: N samples, D width of their features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from memengine.visualization.features import principal_components, scatter
from memengine.visualization.figures import evenly_chosen, figure_of, save_figure

_DRAWN, _COLUMNS = 6, 3


class Moment(NamedTuple):
    """What is known of the samples after so many iterations."""

    iteration: int
    features: Tensor  # [N, D], of length 1
    labels: Tensor  # Long[N], -1 of a sample without
    places: Tensor  # Long[N], in their data set


class Moments:
    """Features of a few held-out samples, taken from evaluations as they pass: a file for each.

    In files they outlive a run that is broken off, and no checkpoint grows by them.

    Args:
        folder: Where the files lie.
        step: Every so many of the data set's samples one is taken.

    Cost: 2 * N * D bytes in each file. Where evaluations are many, every other file goes.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._folder, self._step = folder, step
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def clear(self) -> None:
        """Forget what another training has left."""
        for path in self._files():
            path.unlink()

    def add(self, batch: Any, outputs: Sequence[Any]) -> None:
        """Take samples from an evaluation's batch; none where there is no feature or place."""
        samples = batch.get('data_samples') if isinstance(batch, Mapping) else None
        if not (isinstance(samples, Mapping) and 'index' in samples and _has_feature(outputs)):
            return
        index = torch.as_tensor(samples['index']).cpu()
        labels = torch.as_tensor(samples.get('label', torch.full_like(index, -1))).cpu()
        wanted = index % self._step == 0
        if 'bank' in samples:
            wanted &= ~torch.as_tensor(samples['bank']).cpu().bool()
        rows = wanted.nonzero()[:, 0].tolist()
        if rows and labels.shape == index.shape:
            features = torch.stack([outputs[row]['feature'].detach().flatten() for row in rows])
            self._parts.append((features.float().cpu(), labels[rows], index[rows]))

    def save(self, iteration: int) -> None:
        """Write what was taken since the last call."""
        parts, self._parts = self._parts, []
        if not parts:
            return
        features, labels, index = map(torch.cat, zip(*parts, strict=True))
        finite = features.isfinite().all(1)
        directions = F.normalize(features[finite], dim=1).half()
        self._folder.mkdir(parents=True, exist_ok=True)
        np.savez(
            self._folder / f'{iteration:09d}.npz',
            features=directions.numpy(),
            labels=labels[finite].numpy(),
            index=index[finite].numpy(),
        )
        files = self._files()
        if len(files) > 3 * _DRAWN:
            for path in files[1:-1:2]:
                path.unlink()

    def read(self) -> list[Moment]:
        """A few of what was saved: the first, the last, and some evenly between them."""
        files = self._files()
        return [_read(files[place]) for place in evenly_chosen(len(files), _DRAWN)]

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob('*.npz'))


def _has_feature(outputs: Sequence[Any]) -> bool:
    first = outputs[0] if len(outputs) else None
    return isinstance(first, Mapping) and isinstance(first.get('feature'), Tensor)


def _read(path: Path) -> Moment:
    with np.load(path) as held:  # which runs no code
        tensors = [torch.from_numpy(held[name]) for name in ('features', 'labels', 'index')]
    return Moment(int(path.stem), tensors[0].float(), tensors[1], tensors[2])


def save_maps(moments: Sequence[Moment], path: str | Path, names: Sequence[str] = ()) -> None:
    """Draw moments side by side, in the one plane in which the features of all vary most.

    Each moment is moved to its mean first: else the way that the mean goes would be all there is.

    Args:
        moments: Of one width D.
        path: Where the PNG goes.
        names: Of the classes; samples of one have one colour.

    Cost: D x D in float64.
    """
    centred = [one.features - one.features.mean(0) for one in moments]
    points, shares = principal_components(torch.cat(centred), 2)
    rows = -(-len(moments) // _COLUMNS)
    columns = min(len(moments), _COLUMNS)
    figure, axes = figure_of(
        rows, columns, width=3 * columns + 1, height=3 * rows, sharex=True, sharey=True
    )
    flat_axes = [axis for row in axes for axis in row]
    for axis in flat_axes[len(moments) :]:
        axis.set_visible(False)
    for axis, one, at in zip(
        flat_axes, moments, points.split(list(map(len, centred))), strict=False
    ):
        labels = None if (one.labels < 0).all() else one.labels
        scatter(axis, at, labels, names, legend=axis is flat_axes[columns - 1])
        axis.set_title(f'iteration {one.iteration}', fontsize=9)
    told = f'{100 * shares[0]:.0f} % and {100 * shares[1]:.0f} % of the variance of all'
    figure.suptitle(f'PCA: {told}', fontsize=9)
    save_figure(figure, path)
