"""What torch keeps private of its gradient scaler: that it makes its state one tensor at a time."""

from __future__ import annotations

import torch


def forget_half_made_state(scaler: torch.amp.GradScaler) -> None:
    """Have a scaler make its state anew where memory sufficed for one of its two tensors only.

    It looks for the first alone, and would never make the second.
    """
    if scaler._growth_tracker is None:
        scaler._scale = None
