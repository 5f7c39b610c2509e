"""What ranks do together: one fails, all of them know."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

__all__ = ['together']

T = TypeVar('T')


def together(act: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Act on every rank; all get what each returned, or all the error of the first that failed.

    Args:
        act: What this rank does. What it returns, or raises, is pickled.
        group: A gloo group of all ranks, in which all of them call this at the same place; None in
            one process.

    Returns:
        What the ranks returned, in their order.

    Raises:
        Exception: What was raised on the first rank on which something was.

    Cost: what is returned, on the wire; the ranks wait for each other.
    """
    if group is None:
        return [act()]
    outcome: tuple[T | None, Exception | None] = (None, None)
    try:
        outcome = (act(), None)
    except Exception as error:
        outcome = (None, error)
    outcomes = [outcome] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, outcome, group=group)
    failed = next((error for _, error in outcomes if error is not None), None)
    if failed is not None:
        raise failed from outcome[1]
    return [result for result, _ in outcomes]  # type: ignore[misc]  # none failed
