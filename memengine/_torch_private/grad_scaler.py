"""What torch keeps private of its gradient scaler: how it makes its state, and how it unscales."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class GradScaler(torch.amp.GradScaler):
    """torch's, for gradients of which some are sharded and some are whole.

    It unscales all of one device and type in one list, and asks the first of the list how it is
    sharded. Under ``fully_shard`` a scalar (CLIP's temperature) is not, and where it comes first
    that is an error. So the sharded ones are unscaled by themselves here.
    """

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        parameters = [p for group in optimizer.param_groups for p in group['params']]
        found: dict[torch.device, Tensor] = {}
        for is_sharded in (True, False):
            chosen = [p for p in parameters if isinstance(p.grad, DTensor) is is_sharded]
            alike: Any = SimpleNamespace(param_groups=[dict(params=chosen)])
            of_these = super()._unscale_grads_(alike, inv_scale, found_inf, allow_fp16)
            for device, is_inf in of_these.items():
                found[device] = torch.maximum(found[device], is_inf) if device in found else is_inf
        return found


def forget_half_made_state(scaler: torch.amp.GradScaler) -> None:
    """Have a scaler make its state anew where memory sufficed for one of its two tensors only.

    It looks for the first alone, and would never make the second.
    """
    if scaler._growth_tracker is None:
        scaler._scale = None
