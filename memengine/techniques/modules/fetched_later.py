"""Numbers that a device computes, and the host reads when the device has long been done."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class FetchedLater:
    """A copy of a small tensor, made without waiting for the device; to be read a step later."""

    def __init__(self, values: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if values.device.type == 'cuda':
            host = torch.empty(values.shape, dtype=values.dtype, device='cpu', pin_memory=True)
            self._host = host.copy_(values.detach(), non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(values.device))
        else:
            self._host = values.detach().to('cpu', copy=True)

    def tolist(self) -> Any:
        """The numbers; waits only for what was asked of the device before they were copied."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()
