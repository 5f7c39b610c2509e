"""What makes no figure: samples without labels or seen before, outputs that are no numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from torch import Tensor

Result = TypeVar('Result')


def each_once(results: Iterable[Result], indices: Iterable[int | None]) -> list[Result]:
    """The first result of each sample; those of samples without a number, None, are all there.

    What stands in for an image that cannot be read (``on_error='skip'``) is there itself, too.
    """
    seen: set[int | None] = set()
    kept = []
    for result, index in zip(results, indices, strict=True):
        if index is None or index not in seen:
            seen.add(index)
            kept.append(result)
    return kept


def check_labelled(labels: Tensor, who: str) -> None:
    """Raise ValueError for samples without a label, whose label is -1.

    To a metric they would be of one class, or of one that no model knows.

    Args:
        labels: Long[n].
        who: What needs them, for the error.
    """
    without = int((labels < 0).sum())
    if without:
        raise ValueError(
            f'{who}: {without} of {len(labels)} samples have no label (-1): give their source '
            "labels (ImageTable's label=, a folder for each class, .cls in shards), or take "
            f'{who} out'
        )


def check_numbers(outputs: Tensor, who: str) -> None:
    """Raise ValueError where outputs [n, ...] are NaN, among which some class would be largest."""
    bad = int(outputs.isnan().flatten(1).any(dim=1).sum())
    if bad:
        raise ValueError(
            f'{who}: the outputs of {bad} of {len(outputs)} samples are NaN; the model has '
            'diverged (lower the learning rate, clip gradients) or its precision is too narrow'
        )


def check_finite(features: Tensor, who: str) -> None:
    """Raise ValueError where features [n, D] are NaN or infinite, which are near to nothing."""
    bad = int((~features.isfinite()).any(dim=1).sum())
    if bad:
        raise ValueError(f'{who}: the features of {bad} of {len(features)} samples are not finite')
