"""The projection head of DINO."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from memengine.registry import MODELS
from memengine.techniques.layers.weight_norm import WeightNormLinear


@MODELS.register_module()
class DINOHead(nn.Module):
    """MLP, l2-normalised bottleneck and a weight-normed layer of K prototypes.

    Args:
        in_dim: Width of the backbone's features.
        out_dim: Number of prototypes K.
        use_bn: BatchNorm after each hidden layer (``use_bn_in_head`` of the original script).
            Its statistics are the batch's, so use ``sync_bn='torch'`` on several ranks.
        norm_last_layer: Fix the prototypes' length at 1; otherwise it is learned.
        nlayers: Layers of the MLP, at least 1.
        hidden_dim: Width of the hidden layers.
        bottleneck_dim: Width of the bottleneck.

    Source: Caron et al. (2021), appendix C.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        use_bn: bool = False,
        norm_last_layer: bool = True,
        nlayers: int = 3,
        hidden_dim: int = 2048,
        bottleneck_dim: int = 256,
    ) -> None:
        super().__init__()
        if nlayers < 1:
            raise ValueError(f'DINOHead: nlayers must be at least 1, got {nlayers}')
        widths = [in_dim] + [hidden_dim] * (nlayers - 1) + [bottleneck_dim]
        layers: list[nn.Module] = []
        for index, (fan_in, fan_out) in enumerate(zip(widths, widths[1:], strict=False)):
            layers.append(nn.Linear(fan_in, fan_out))
            if index < nlayers - 1:
                layers += [nn.BatchNorm1d(fan_out), nn.GELU()] if use_bn else [nn.GELU()]
        self.mlp = nn.Sequential(*layers)
        self._reset_mlp()
        self.last_layer = WeightNormLinear(bottleneck_dim, out_dim)
        nn.init.ones_(self.last_layer.weight_g)
        self.last_layer.weight_g.requires_grad_(not norm_last_layer)

    def reset_parameters(self) -> None:
        """Give linear layers and the prototypes' lengths the values that they start from."""
        self._reset_mlp()
        nn.init.ones_(self.last_layer.weight_g)

    def _reset_mlp(self) -> None:
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Features [N, D] to logits [N, K]."""
        bottleneck = F.normalize(self.mlp(features), dim=-1)  # [N, bottleneck_dim]
        return self.last_layer(bottleneck)
