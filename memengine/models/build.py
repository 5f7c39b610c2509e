"""Losses and heads from their configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from memengine import losses
from memengine.registry import MODELS

# The losses are plain torch; here they get names in configs.
for _name in ('ClipLoss', 'ConLoss', 'KoLeoLoss', 'NTXentLoss', 'SigLipLoss', 'SupConLoss'):
    MODELS.register_module(name=_name, module=getattr(losses, _name))


def build_loss(loss: Mapping[str, Any] | str | nn.Module) -> nn.Module:
    """A loss from its config, from the name of its class, or as it is."""
    if isinstance(loss, nn.Module):
        return loss
    return MODELS.build({'type': loss} if isinstance(loss, str) else dict(loss))


def build_head(head: Mapping[str, Any], in_dim: int) -> nn.Module:
    """A head from its config, on features of width ``in_dim``."""
    return MODELS.build({'in_dim': in_dim, **head})
