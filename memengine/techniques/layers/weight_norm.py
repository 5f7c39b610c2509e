"""A weight-normalised linear layer that never holds its normalised weight.

``torch.nn.utils.parametrizations.weight_norm`` computes the K x D weight anew in every forward,
keeps it for backward, and takes its gradient apart in every backward. With K = 65,536 prototypes
that is 64 MiB, three times over, for each slice of a batch. Here the rows' lengths scale the
logits instead, and slices add to one gradient, which is taken apart once.

Shapes: N rows, D inputs, K outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from memengine._torch_private.ops import do_not_compile


@dataclass
class _Shared:
    """What the forwards of one step share, which all see the same weight."""

    is_last: bool  # whether the next forward's backward hands the gradient over
    lengths: Tensor | None = None  # of the weight's rows, [K]
    weight: Tensor | None = None  # its directions in the type of the products, [K, D]
    gradient: Tensor | None = None  # of the normalised weight so far, [K, D]


class _WeightNormLinear(torch.autograd.Function):
    """Logits of x [N, D]; ``parameters`` are the weights themselves or, until the last slice, what
    stands in for them, so that their hooks fire and DDP reduces once."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_v: Tensor, weight_g: Tensor, step: _Shared, *parameters: Tensor
    ) -> Tensor:
        device_type, dtype = x.device.type, x.dtype
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        x = x.to(dtype)
        if step.lengths is None:
            step.lengths = torch.linalg.vector_norm(weight_v, dim=1)
        if step.weight is None or step.weight.dtype != dtype:
            step.weight = weight_v.detach().to(dtype)
        ctx.save_for_backward(x, weight_v, weight_g, step.lengths)
        ctx.step, ctx.hands_over = step, len(parameters) == 2
        return (x @ step.weight.T).mul_(weight_g[:, 0] / step.lengths)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logits: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_v, weight_g, lengths = ctx.saved_tensors
        step, scale = ctx.step, weight_g[:, 0] / lengths
        grad_x = grad_v = grad_g = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_logits * scale).to(x.dtype) @ step.weight.to(x.dtype)
        if any(ctx.needs_input_grad[4:]):
            columns, rows = grad_logits.to(weight_v.dtype).T, x.to(weight_v.dtype)
            if step.gradient is None:
                step.gradient = columns @ rows
            else:
                step.gradient.addmm_(columns, rows)
        if not ctx.hands_over:
            return grad_x, *[None] * (len(ctx.needs_input_grad) - 1)
        if step.gradient is not None:
            grad_v, step.gradient = step.gradient, None
            # From the normalised weight's gradient to those of the rows' directions and lengths.
            along = torch.linalg.vecdot(weight_v, grad_v) / lengths  # [K]
            grad_v.addcmul_(weight_v, (-along / lengths)[:, None]).mul_(scale[:, None])
            grad_g = along[:, None]
        return grad_x, None, None, None, grad_v, grad_g


class WeightNormLinear(nn.Module):
    """Linear layer without bias whose weight is ``weight_g * weight_v / |weight_v|``, row by row.

    Args:
        in_features: D.
        out_features: K.

    Attributes:
        weight_v: Directions of the rows, [K, D]; initialised as in ``nn.Linear``.
        weight_g: Lengths of the rows, [K, 1]; initially those of ``weight_v``.

    Cost: autograd keeps the input [N, D] and 4K bytes, where the parametrisation keeps the
    normalised weight of 4KD bytes as well; one pass over the weight less in forward, several less
    in backward. Under autocast products are in half precision, the weight's gradient is summed in
    its own type. No double backward. ``torch.compile`` breaks its graph here.

    Source: Salimans and Kingma, Weight Normalization (2016), equations 2 and 3.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight_v = nn.Parameter(torch.empty(out_features, in_features))
        self.weight_g = nn.Parameter(torch.empty(out_features, 1))
        self._step: _Shared | None = None  # in slices, while it is under way
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the rows as ``nn.Linear`` does; their lengths are what they are then."""
        nn.init.kaiming_uniform_(self.weight_v, a=math.sqrt(5))
        self.weight_g.copy_(self.weight_v.norm(dim=1, keepdim=True))

    @do_not_compile  # dynamo does not follow what slices share
    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., K]."""
        step = self._step or _Shared(is_last=True)
        weights = (self.weight_v, self.weight_g)
        receivers: tuple[Tensor, ...] = weights
        if not step.is_last:  # the parameters' hooks wait
            trained = any(weight.requires_grad for weight in weights)
            receivers = (x.new_empty(0).requires_grad_(),) * trained
        logits = _WeightNormLinear.apply(
            x.reshape(-1, x.shape[-1]), *(w.detach() for w in weights), step, *receivers
        )
        return logits if x.dim() == 2 else logits.reshape(*x.shape[:-1], -1)


@contextmanager
def shared_weights(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Let the slices of one step share the work on the weights of WeightNormLinear layers.

    Inside, the weights must not change. Backward passes add to one buffer in place; it reaches the
    parameters (and their hooks, and DDP) in the backward passes after the yielded function has been
    called, which is to be before the last slice.

    Yields:
        The function to call before the last slice.

    Raises:
        RuntimeError: When a layer's gradient has not been handed over at the end, because the
            layer took no part in the last slice.
    """
    layers = {
        layer
        for module in modules
        for layer in module.modules()
        if isinstance(layer, WeightNormLinear)
    }
    steps = {layer: _Shared(is_last=False) for layer in layers}
    for layer, step in steps.items():
        layer._step = step

    def before_the_last() -> None:
        for step in steps.values():
            step.is_last = True

    try:
        yield before_the_last
    finally:
        for layer in layers:
            layer._step = None
    if any(step.gradient is not None for step in steps.values()):
        raise RuntimeError(
            'a WeightNormLinear layer took part in some slices but not in the last one, so its '
            'gradient was not handed over; put a slice that uses it last'
        )
