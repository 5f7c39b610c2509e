"""The steps of BatchNorm in eval mode that do not keep what it reads.

Behind a convolution only the convolution's input is kept; with a weight that takes no gradient
nothing is, whatever is in front.

Shapes: N samples, C channels in, K channels out, G groups, ... the spatial axes, R the kernel's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


def _per_axis(value: int | Sequence[int], axes: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * axes if len(values) == 1 else values


class Geometry(NamedTuple):
    """All of a convolution but its tensors, in the order of ``aten::convolution``."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int

    @classmethod
    def of(cls, arguments: Mapping[str, Any], transposed: bool) -> Geometry:
        """From the arguments of ``F.conv2d``, ``F.conv_transpose2d`` or one of their kin."""
        axes = arguments['weight'].dim() - 2
        return cls(
            _per_axis(arguments.get('stride', 1), axes),
            _per_axis(arguments.get('padding', 0), axes),
            _per_axis(arguments.get('dilation', 1), axes),
            transposed,
            _per_axis(arguments.get('output_padding', 0), axes),
            arguments.get('groups', 1),
        )

    def scaled_weight(self, weight: Tensor, scale: Tensor) -> Tensor:
        """``weight``, [K, C/G, R] or transposed [C, K/G, R], times ``scale`` [K]."""
        kernel = [1] * (weight.dim() - 2)
        if not self.transposed:
            return weight * scale.view(-1, 1, *kernel)
        grouped = weight.unflatten(0, (self.groups, -1))  # [G, C/G, K/G, R]
        return (grouped * scale.view(self.groups, 1, -1, *kernel)).flatten(0, 1)

    def channel_products(self, one: Tensor, other: Tensor) -> Tensor:
        """Scalar products of the output channels of two tensors like the weight, [K]."""
        if not self.transposed:
            return torch.linalg.vecdot(one.flatten(1), other.flatten(1))
        grouped = (one * other).unflatten(0, (self.groups, -1))  # [G, C/G, K/G, R]
        return grouped.flatten(3).sum((1, 3)).flatten()


class ConvOutput(NamedTuple):
    """How a convolution's output came about.

    Attributes:
        name: The convolution's.
        x: [N, C, ...], in the type that it is convolved in; None where no gradient goes to it.
        weight: [K, C/G, R], transposed [C, K/G, R]; of any type.
        bias: [K].
        geometry: The convolution's.
        activation: If given, ``x`` is ``activation(preactivation)``.
        preactivation: Is kept in place of ``x``, as it is kept anyway.
        versions: Of the output and these tensors: were any changed since?
        begun_in: The pass of a checkpointed module that it came about in, if it did.
    """

    name: str
    x: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    geometry: Geometry | None = None
    activation: Callable[[Tensor], Tensor] | None = None
    preactivation: Tensor | None = None
    versions: tuple[int, ...] = ()
    begun_in: weakref.ref[Any] | None = None


class _LeanConvolution(torch.autograd.Function):
    """A convolution that keeps an activation's input in place of its own, or none."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        preactivation: Tensor | None,
        activation: Callable[[Tensor], Tensor] | None,
        geometry: Geometry,
        convolve: Callable[[], Tensor],
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        kept = x if preactivation is None else preactivation
        ctx.save_for_backward(kept if ctx.needs_input_grad[1] else None, weight)
        ctx.geometry, ctx.activation = geometry, activation
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        return convolve()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        if grad is None:  # BatchNorm's went past it
            return (None,) * 7
        kept, weight = ctx.saved_tensors
        grad = grad.to(ctx.x_dtype)
        if kept is None:
            x = grad.new_empty(1).expand(ctx.x_shape)
        else:
            x = kept if ctx.activation is None else ctx.activation(kept)
        sizes = None if not ctx.needs_input_grad[2] else [grad.shape[1]]
        needs = list(ctx.needs_input_grad[:3])
        found = torch.ops.aten.convolution_backward(
            grad, x, weight.to(x.dtype), sizes, *ctx.geometry, needs
        )
        return (*found, None, None, None, None)


def lean_convolution(source: ConvOutput, convolve: Callable[[], Tensor]) -> Tensor:
    """What ``convolve()`` gives; kept is what ``source`` says, no input of a frozen weight."""
    _, x, weight, bias, geometry, activation, preactivation, *_ = source
    assert x is not None and weight is not None and geometry is not None
    output: Tensor = _LeanConvolution.apply(
        x, weight, bias, preactivation, activation, geometry, convolve
    )
    return output


class _ConvBNEval(torch.autograd.Function):
    """BatchNorm of a convolution's output, whose gradient goes past that output.

    Unless somebody looks at the output's gradient: then it goes there, and on from there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        preactivation: Tensor,
        mean: Tensor,
        var: Tensor,
        output: Tensor,
        eps: float,
        geometry: Geometry,
        activation: Callable[[Tensor], Tensor] | None,
        is_looked_at: Callable[[], bool],
    ) -> Tensor:
        needs_x = ctx.needs_input_grad[1] or ctx.needs_input_grad[3]
        ctx.save_for_backward(preactivation if needs_x else None, weight, bias, gamma, mean, var)
        ctx.eps, ctx.geometry, ctx.activation = eps, geometry, activation
        ctx.x_shape, ctx.x_dtype, ctx.is_looked_at = x.shape, x.dtype, is_looked_at
        return F.batch_norm(output, mean, var, gamma, beta, eps=eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        preactivation, weight, bias, gamma, mean, var = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_gamma, needs_beta = ctx.needs_input_grad[:5]
        is_looked_at = ctx.is_looked_at()
        if is_looked_at:
            needs_x = needs_weight = needs_bias = False
        geometry, grad = ctx.geometry, grads[0].to(ctx.x_dtype)
        if preactivation is None:
            x = grad.new_empty(1).expand(ctx.x_shape)  # backward of the input asks for its shape
        else:
            x = preactivation if ctx.activation is None else ctx.activation(preactivation)
        inv_std = torch.rsqrt(var + ctx.eps)  # [K]
        scale = inv_std if gamma is None else inv_std * gamma
        # The fused weight is made anew: kept, it would cost more than it saves on small inputs.
        fused = geometry.scaled_weight(weight, scale).to(x.dtype) if needs_x else weight.to(x.dtype)
        grad_x, grad_fused, _ = torch.ops.aten.convolution_backward(
            grad, x, fused, None, *geometry, [needs_x, needs_weight or needs_gamma, False]
        )
        grad_weight = grad_bias = grad_gamma = grad_output = None
        axes = [axis for axis in range(grad.dim()) if axis != 1]
        total = grad.sum(axes, dtype=torch.promote_types(grad.dtype, torch.float32))  # [K]
        if needs_bias:
            grad_bias = scale * total
        if needs_gamma:
            offset = -mean if bias is None else bias - mean
            along = geometry.channel_products(grad_fused.to(weight.dtype), weight)
            grad_gamma = inv_std * (along + offset * total)
        if needs_weight:
            grad_weight = geometry.scaled_weight(grad_fused.to(weight.dtype), scale)
        if is_looked_at:
            grad_output = grad * scale.to(grad.dtype).view(-1, *[1] * (grad.dim() - 2))
        grad_beta = total if needs_beta else None
        parameters = (grad_x, grad_weight, grad_bias, grad_gamma, grad_beta)
        return *parameters, None, None, None, grad_output, *[None] * 4


def conv_bn_eval(
    source: ConvOutput,
    output: Tensor,
    statistics: tuple[Tensor, Tensor],
    affine: tuple[Tensor | None, Tensor | None],
    eps: float,
    is_looked_at: Callable[[], bool],
) -> Tensor:
    """BatchNorm in eval mode of a convolution's output.

    Args:
        source: Where the output is from; a gradient goes there.
        output: [N, K, ...]; it is not kept.
        statistics: Running mean and variance, [K].
        affine: BatchNorm's weight and bias, [K].
        eps: BatchNorm's.
        is_looked_at: Asked in backward whether somebody looks at the output's gradient, which is
            computed then, and goes on from there.

    Returns:
        [N, K, ...], what ``F.batch_norm`` gives.

    Cost: forward is the plain one. Kept are parameters and ``x``, or nothing where neither
    ``weight`` nor BatchNorm's weight needs a gradient. Backward passes over the weight a few times
    more and over tensors of the output's size less often; where ``weight`` is frozen and
    BatchNorm's is not, it computes the former's gradient for the latter's.
    """
    _, x, weight, bias, geometry, activation, preactivation, *_ = source
    kept = x if preactivation is None else preactivation
    return _ConvBNEval.apply(
        *(x, weight, bias, *affine, kept, *statistics, output),
        *(eps, geometry, activation, is_looked_at),
    )


class _FrozenBN(torch.autograd.Function):
    """BatchNorm in eval mode whose weight takes no gradient: a scale and a shift."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        weight: Tensor | None,
        mean: Tensor,
        var: Tensor,
        eps: float,
    ) -> Tensor:
        ctx.save_for_backward(weight, var)
        ctx.eps, ctx.x_dtype, ctx.bias_dtype = eps, x.dtype, None if bias is None else bias.dtype
        return F.batch_norm(x, mean, var, weight, bias, eps=eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, var = ctx.saved_tensors
        (grad,) = grads
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            scale = torch.rsqrt(var + ctx.eps)  # [K]
            scale = scale if weight is None else scale * weight
            grad_x = (grad * scale.view(-1, *[1] * (grad.dim() - 2))).to(ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            axes = [axis for axis in range(grad.dim()) if axis != 1]
            grad_bias = grad.sum(axes, dtype=torch.promote_types(grad.dtype, torch.float32))
            grad_bias = grad_bias.to(ctx.bias_dtype)
        return grad_x, grad_bias, *[None] * 4


def frozen_bn(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """``F.batch_norm`` of ``x`` [N, K, ...] in eval mode.

    Only where ``weight`` [K] takes no gradient: then nothing but parameters is kept. ``bias`` [K]
    may take one. ``training`` and ``momentum`` are not used.
    """
    assert not training and not (weight is not None and weight.requires_grad)
    output: Tensor = _FrozenBN.apply(x, bias, weight, mean, var, eps)
    return output
