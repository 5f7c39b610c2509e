"""What makes no figure: samples without labels, outputs that are no numbers."""

from __future__ import annotations

from torch import Tensor


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
