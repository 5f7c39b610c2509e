"""Slices of a batch: what a model is given of it at a time, and where that lies in the batch.

Shapes: B samples, V views of each; rows are those of ``torch.cat(views)``, [V * B, ...].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memengine.techniques.slices.multi_crop import CropSlice

__all__ = ['Slice', 'check_size', 'cut_evenly', 'slice_views', 'take']


@dataclass(frozen=True)
class Slice:
    """A part of a batch that goes through the network by itself.

    Args:
        inputs: What ``forward`` takes as inputs.
        data_samples: What ``forward`` takes as data samples.
        rows: Which rows of the batch these are; for crops of several sizes, which crops of which
            samples.
        total: Rows of the whole batch (of this tower).
        tower: Which encoder the slice is for, in models that have several.
    """

    inputs: Any
    data_samples: Any
    rows: range | CropSlice
    total: int
    tower: str | None = None

    def merged(self, following: Sequence[Slice]) -> Slice:
        """This slice and those that follow it as one."""
        if not following:
            return self
        every = [self, *following]
        first, last = self.rows, every[-1].rows
        assert isinstance(first, range) and isinstance(last, range)
        return Slice(
            _join([piece.inputs for piece in every]),
            _join([piece.data_samples for piece in every]),
            range(first.start, last.stop),
            self.total,
            self.tower,
        )


def check_size(size: Any) -> int:
    """The size of a slice, which must be a whole number of at least 1."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(
            f'the size of a slice must be a whole number of at least 1 row, got {size!r}'
        )
    return size


def cut_evenly(rows: int, size: int) -> list[range]:
    """The fewest ranges of at most ``size`` rows; their lengths differ by one at most.

    Raises:
        ValueError: For a size below 1, or no rows.
    """
    if rows < 1:
        raise ValueError('the batch is empty')
    parts = -(-rows // check_size(size))
    bounds = [rows * part // parts for part in range(parts + 1)]
    return [range(*ends) for ends in zip(bounds, bounds[1:], strict=False)]


def take(tree: Any, rows: range) -> Any:
    """Samples ``rows`` of nested dicts of tensors and lists that hold one entry a sample."""
    if isinstance(tree, Mapping):
        return {key: take(value, rows) for key, value in tree.items()}
    return None if tree is None else tree[rows.start : rows.stop]


def slice_views(inputs: Any, data_samples: Any, size: int) -> list[Slice]:
    """Cut one view [B, ...] by sample, or V views of one size by the rows of their concatenation.

    A slice of several views holds them as a list, as the batch does; its tensors are views of the
    batch's, so that nothing is copied.

    Args:
        inputs: A tensor [B, ...], or a list of V such tensors of one shape.
        data_samples: Dict of tensors and lists by sample, a list by sample, or None.
        size: Most rows in a slice.

    Raises:
        TypeError: For other inputs.
        ValueError: For views of several shapes, or a size below 1.
    """
    several = isinstance(inputs, (list, tuple))
    views: Sequence[Any] = inputs if several else [inputs]
    if not views or not all(isinstance(view, Tensor) for view in views):
        raise TypeError(
            'inputs must be a tensor [B, ...] or a list of views of that shape to be cut into '
            f'slices, got {type(inputs).__name__}; define slices() in the model for others'
        )
    shapes = {tuple(view.shape) for view in views}
    if len(shapes) > 1:
        raise ValueError(
            f'views of several sizes have no common rows to be cut by, got {sorted(shapes)}; '
            'use one size, or define slices() in the model'
        )
    batch_size = len(views[0])
    total = len(views) * batch_size
    slices = []
    for rows in cut_evenly(total, size):
        parts = [
            (view, range(max(rows.start - start, 0), min(rows.stop - start, batch_size)))
            for view, start in zip(views, range(0, total, batch_size), strict=True)
            if start < rows.stop and rows.start < start + batch_size
        ]
        pieces = [view[some.start : some.stop] for view, some in parts]
        samples = _join([take(data_samples, some) for _, some in parts])
        slices.append(Slice(pieces if several else pieces[0], samples, rows, total))
    return slices


def _join(parts: Sequence[Any]) -> Any:
    """Put together what :func:`take` took, tensors along dimension 0 and lists end to end."""
    first = parts[0]
    if len(parts) == 1 or first is None:
        return first
    if isinstance(first, Mapping):
        return {key: _join([part[key] for part in parts]) for key in first}
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    return [entry for part in parts for entry in part]
