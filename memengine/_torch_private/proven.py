"""Fast forms of a function, used on a device only after they have proved themselves there.

A kernel may fail to compile, or compute something else, on a device, driver or version of torch or
Triton that it was never tried on. Both are found out on a small case before anything relies on it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

__all__ = ['Proven']


class Proven:
    """Whether a fast form may be used on a device; found out when it is first asked there.

    Args:
        name: What it is, for the warning.
        check: Runs it on a device, on a small case that is the same each time (nothing is drawn
            from the global generators), and raises whatever comes if it fails or differs from
            its plain form.
    """

    def __init__(self, name: str, check: Callable[[torch.device], None]) -> None:
        self.name = name
        self._check = check
        self._holds: dict[torch.device, bool] = {}

    def on(self, device: torch.device) -> bool:
        """Whether it has proved itself on the device; if not, one warning has said why."""
        if device.type != 'cuda':
            return False
        if device not in self._holds:
            try:
                self._check(device)
            except Exception as error:  # compilers and drivers raise what they like
                lines = str(error).splitlines() or ['']
                warnings.warn(
                    f'{self.name} is not used on {device}, but its plain form, which is slower: '
                    f'tried on a small case it failed ({type(error).__name__}: {lines[0]})',
                    stacklevel=2,
                )
                self._holds[device] = False
            else:
                self._holds[device] = True
        return self._holds[device]
