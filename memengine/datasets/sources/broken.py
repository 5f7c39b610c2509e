"""Samples that cannot be read: the end of the run, or left out and counted."""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch
from mmengine.logging import print_log

from memengine.datasets.build import one_line

OnError = Literal['stop', 'raise', 'skip']


class BrokenSamples:
    """Raises for a sample that cannot be read, or counts it.

    Args:
        on_error: ``'stop'`` (or ``'raise'``), or ``'skip'``: say each once, and count it.
        max_skipped: The share of the samples that may be skipped, in [0, 1].
        samples: How many samples there are.
        flags: In how many places, of a byte, samples are told apart; by default one for each.

    Raises:
        ValueError: When a setting is wrong.
    """

    def __init__(
        self, on_error: OnError, max_skipped: float, samples: int, flags: int | None = None
    ) -> None:
        if on_error not in ('stop', 'raise', 'skip'):
            raise ValueError(f"on_error must be 'stop' or 'skip', got {on_error!r}")
        if isinstance(max_skipped, bool) or not 0 <= max_skipped <= 1:
            raise ValueError(f'max_skipped must be a share between 0 and 1, got {max_skipped!r}')
        self._max_skipped, self._samples = max_skipped, samples
        # In memory that the workers share: what they skip is counted here too.
        size = samples if flags is None else flags
        skips = on_error == 'skip'
        self._flags = torch.zeros(size, dtype=torch.uint8).share_memory_() if skips else None

    @property
    def count(self) -> int:
        """How many different samples could not be read so far, in this process and its workers."""
        return 0 if self._flags is None else int(self._flags.sum())

    def __deepcopy__(self, memo: dict[int, Any]) -> BrokenSamples:
        return self  # a copy of the flags would not be in shared memory

    def note(self, flag: int, name: str, error: OSError) -> None:
        """Take note of a sample that cannot be read.

        Raises:
            ValueError: When it is not to be skipped, or too many were.
        """
        problem = f'cannot read {name}: {one_line(error)}'
        if self._flags is None:
            raise ValueError(
                f"{problem}; mend or remove it, or set the dataset's on_error='skip'"
            ) from error
        if not self._flags[flag]:
            self._flags[flag] = 1
            if self.count > self._max_skipped * self._samples:
                raise ValueError(
                    f'{problem}; that makes {self.count} of {self._samples} samples, more than '
                    f'max_skipped={self._max_skipped} allows'
                ) from error
            print_log(f'{problem}; skipped', logger='current', level=logging.WARNING)
