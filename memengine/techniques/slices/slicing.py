"""Slices of a batch: cut, taken and joined again.

Shapes: B samples, V views of each; rows are those of ``torch.cat(views)``, [V * B, ...].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from memengine._torch_private.ops import pytree

if TYPE_CHECKING:
    from memengine.techniques.slices.multi_crop import CropSlice


def split_batch(batch: Any, size: int) -> list[Any]:
    """Cut a batch into consecutive slices of ``size`` samples, the last one smaller.

    Args:
        batch: A tensor, or dicts, lists and tuples of tensors (any Mapping at the top), each
            with the samples in dimension 0. None and booleans go with every slice.
        size: Samples per slice.

    Returns:
        Slices of the batch's structure, which hold views of its tensors.

    Raises:
        ValueError: For a size below 1, tensors of different length, or none at all.
        TypeError: For anything that is neither a tensor nor None nor a boolean.
    """
    if size < 1:
        raise ValueError(f'the size of a slice must be at least 1 sample, got {size}')
    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        batch = dict(batch)
    leaves, structure = pytree.tree_flatten(batch)
    for leaf in leaves:
        if not (leaf is None or isinstance(leaf, (Tensor, bool))):
            raise TypeError(
                f'a {type(leaf).__name__} in the batch cannot be cut into slices; pass tensors '
                'with the samples in dimension 0, or cut the batch yourself (split_input_fn)'
            )
    shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
    lengths = {shape[:1] for shape in shapes}
    if not shapes:
        raise ValueError('the batch holds no tensor')
    if len(lengths) > 1 or () in lengths:
        raise ValueError(f'all tensors need the same samples in dimension 0, got shapes {shapes}')
    samples = shapes[0][0]
    return [
        pytree.tree_unflatten(
            [
                _rows(leaf, start, start + size) if isinstance(leaf, Tensor) else leaf
                for leaf in leaves
            ],
            structure,
        )
        for start in range(0, samples, size)
    ]


def _rows(sequence: Any, start: int, stop: int) -> Any:
    """Some rows of a tensor, in the same memory, or entries of a list.

    What writes a slice's graph into it would give that graph to all other views of the batch.
    """
    rows = sequence[start:stop]
    return rows.detach() if isinstance(rows, Tensor) and not rows.requires_grad else rows


def join_slices(slices: Sequence[Any]) -> Any:
    """Put slices of one structure together again; the reverse of :func:`split_batch`.

    Raises:
        TypeError: For anything that is neither a tensor nor None nor a boolean.
    """
    if len(slices) == 1:
        return slices[0]
    columns, structures = zip(*map(pytree.tree_flatten, slices), strict=True)
    return pytree.tree_unflatten(
        [_join_leaves(leaves) for leaves in zip(*columns, strict=True)], structures[0]
    )


def _join_leaves(leaves: tuple[Any, ...]) -> Any:
    if isinstance(leaves[0], Tensor):
        return torch.cat(leaves)
    if leaves[0] is None or isinstance(leaves[0], bool):
        return leaves[0]
    raise TypeError(f'slices with a {type(leaves[0]).__name__} in them cannot be joined')


class Slice(NamedTuple):
    """A part of a batch that goes through the network by itself.

    A tuple, so that its tensors are found as those of any batch are.

    Args:
        inputs: What ``forward`` takes as inputs.
        data_samples: What ``forward`` takes as data samples.
        rows: Which rows of the batch these are; for crops of several sizes, which crops of which
            samples.
        total: Rows of the whole batch (of this tower).
        tower: Which encoder the slice is for, in models that have several.
        coupled: Whether the model's coupled loss, if it has one, reads this slice's embeddings.
    """

    inputs: Any
    data_samples: Any
    rows: range | CropSlice
    total: int
    tower: str | None = None
    coupled: bool = True

    def merged(self, following: Sequence[Slice]) -> Slice:
        """This slice and those that follow it as one.

        Raises:
            ValueError: For slices of crops, which may differ in size.
        """
        if not following:
            return self
        every = [self, *following]
        first, last = self.rows, every[-1].rows
        if not isinstance(first, range) or not isinstance(last, range):
            raise ValueError('slices of crops cannot be merged; leave out forward_chunk_size')
        return Slice(
            _join_samples([piece.inputs for piece in every]),
            _join_samples([piece.data_samples for piece in every]),
            range(first.start, last.stop),
            self.total,
            self.tower,
            self.coupled,
        )


def even_parts(whole: range, parts: int) -> list[range]:
    """Cut a range into parts whose lengths differ by one at most."""
    bounds = [whole.start + len(whole) * part // parts for part in range(parts + 1)]
    return [range(*ends) for ends in zip(bounds, bounds[1:], strict=False)]


def cut_evenly(rows: int, size: Any) -> list[range]:
    """The fewest even ranges of at most ``size`` rows.

    Raises:
        ValueError: For a size that is not a whole number of at least 1, or no rows.
    """
    if rows < 1:
        raise ValueError('the batch is empty')
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(
            'the size of a slice (chunk_size, micro_batch_size) must be a whole number of at least '
            f'1 row, got {size!r}'
        )
    return even_parts(range(rows), -(-rows // size))


def take(tree: Any, rows: range) -> Any:
    """Samples ``rows`` of nested dicts of tensors and lists that hold one entry a sample."""
    if isinstance(tree, Mapping):
        return {key: take(value, rows) for key, value in tree.items()}
    return None if tree is None else _rows(tree, rows.start, rows.stop)


def _join_samples(parts: Sequence[Any]) -> Any:
    """Put together what :func:`take` took, tensors along dimension 0 and lists end to end."""
    first = parts[0]
    if len(parts) == 1 or first is None:
        return first
    if isinstance(first, Mapping):
        return {key: _join_samples([part[key] for part in parts]) for key in first}
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    return [entry for part in parts for entry in part]


def slice_views(inputs: Any, data_samples: Any, size: Any) -> list[Slice]:
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
        pieces = [_rows(view, some.start, some.stop) for view, some in parts]
        samples = _join_samples([take(data_samples, some) for _, some in parts])
        slices.append(Slice(pieces if several else pieces[0], samples, rows, total))
    return slices
