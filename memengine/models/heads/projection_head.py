"""The projection head of contrastive learning."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from memengine.registry import MODELS


@MODELS.register_module()
class ProjectionHead(nn.Sequential):
    """MLP from features [N, in_dim] to embeddings [N, out_dim], not normalised here.

    Args:
        in_dim: Width of the features.
        out_dim: Width of the embeddings.
        hidden_dim: Width of the hidden layers; None for ``in_dim``.
        nlayers: Linear layers, at least 1.
        use_bn: BatchNorm after each hidden layer, and after the last one without scale and shift.
            Its statistics are the batch's: those of each chunk in a gradient cache.

    Source: Chen et al., A Simple Framework for Contrastive Learning (2020), section 4.2.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int = 128,
        hidden_dim: int | None = None,
        nlayers: int = 2,
        use_bn: bool = False,
    ) -> None:
        if nlayers < 1:
            raise ValueError(f'ProjectionHead: nlayers must be at least 1, got {nlayers}')
        widths = [in_dim] + [hidden_dim or in_dim] * (nlayers - 1)
        layers: list[nn.Module] = []
        for fan_in, fan_out in zip(widths, widths[1:], strict=False):
            layers.append(nn.Linear(fan_in, fan_out, bias=not use_bn))
            layers += [nn.BatchNorm1d(fan_out), nn.ReLU()] if use_bn else [nn.ReLU()]
        layers.append(nn.Linear(widths[-1], out_dim, bias=not use_bn))
        if use_bn:
            layers.append(nn.BatchNorm1d(out_dim, affine=False))
        super().__init__(OrderedDict(mlp=nn.Sequential(*layers)))
