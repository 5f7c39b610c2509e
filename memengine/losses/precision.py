"""In which type the contrastive losses multiply embeddings; sums are taken in fp32 or wider.

Shapes: M rows against N columns, K summed over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from memengine._torch_private.products import (
    default_fp32_products,
    fp32_products,
    half_mm,
)
from memengine.suggest import did_you_mean

__all__ = ['Precision', 'Products', 'check_precision', 'scaled_product']

Precision = Literal['auto', 'bf16', 'fp16', 'tf32', 'fp32']
HALF = {'bf16': torch.bfloat16, 'fp16': torch.float16}
LARGEST_FP16_GRADIENT = 2.0**13  # of logits, which are brought to it; fp16 ends at 2 ** 16


def check_precision(precision: str) -> None:
    """Raise ValueError unless it is one of :data:`Precision`."""
    names = get_args(Precision)
    if precision not in names:
        hint = did_you_mean(str(precision), names)
        raise ValueError(f'precision must be one of {names}, got {precision!r}{hint}')


@dataclass(frozen=True)
class Products:
    """How matrices are multiplied.

    Args:
        operands: Their type; both operands of a product are in it.
        fp32: How GPUs multiply fp32, ``'ieee'`` or ``'tf32'``; None leaves it as torch is set.
    """

    operands: torch.dtype
    fp32: Literal['ieee', 'tf32'] | None = None

    @classmethod
    def of(cls, precision: str, *embeddings: Tensor) -> Products:
        """What a setting means for embeddings of these types."""
        widest = embeddings[0].dtype
        for tensor in embeddings[1:]:
            widest = torch.promote_types(widest, tensor.dtype)
        if precision in HALF:
            return cls(HALF[precision])
        if precision == 'auto' and widest in HALF.values():
            return cls(widest)
        wide = torch.promote_types(widest, torch.float32)
        return cls(wide, {'tf32': 'tf32', 'fp32': 'ieee'}.get(precision))  # type: ignore[arg-type]

    @property
    def sums(self) -> torch.dtype:
        """The type of results."""
        return torch.promote_types(self.operands, torch.float32)

    @property
    def is_half(self) -> bool:
        """Whether operands are rounded further than sums are."""
        return self.operands != self.sums

    @property
    def is_plain(self) -> bool:
        """Whether they are torch's own products of embeddings in fp32 or wider."""
        return not self.is_half and self.fp32 is None

    @property
    def on_tensor_cores(self) -> bool:
        """Whether a GPU multiplies operands of at most 19 bits, so that kernels may do it, too."""
        if self.is_half:
            return True
        kind = default_fp32_products() if self.fp32 is None else self.fp32
        return self.operands == torch.float32 and kind == 'tf32'

    def rounded(self, rows: Tensor) -> Tensor:
        """The rows in the type of sums, with values that operands can have; the same gradient.

        What is computed of them beside the products, such as the similarities of positives, then
        agrees with the products.
        """
        wide = rows.to(self.sums)
        if rows.dtype == self.operands or not self.is_half:
            return wide
        exact = wide.detach()
        return wide + (exact.to(self.operands).to(self.sums) - exact)

    def narrowed(self, rows: Tensor) -> Tensor:
        """The rows as operands if these are in half precision, else as they are."""
        return rows.to(self.operands) if self.is_half else rows

    def mm(self, left: Tensor, right: Tensor, out: Tensor) -> Tensor:
        """``left @ right`` into ``out``, which is in the type of sums."""
        left, right = left.to(self.operands), right.to(self.operands)
        if self.is_half:
            return half_mm(left, right, out)
        if self.fp32 is None:
            return torch.mm(left, right, out=out)
        with fp32_products(self.fp32):
            return torch.mm(left, right, out=out)

    def add(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """``total += left @ right``, in place."""
        if self.is_half:
            total += self.mm(left, right, torch.empty_like(total))
        elif self.fp32 is None:
            torch.addmm(total, left, right, out=total)
        else:
            with fp32_products(self.fp32):
                torch.addmm(total, left, right, out=total)

    def unit(self, gradient: Tensor) -> Tensor:
        """A power of two by which gradients of logits are divided to be operands; scalar.

        fp16 ends at 6e-8, and they are 1 / B and less: unless brought into its range, they vanish.

        Args:
            gradient: The largest of them are at most twice the largest of these.
        """
        if self.operands != torch.float16:
            return gradient.new_ones(())
        largest = gradient.detach().abs().amax()
        exponent = torch.frexp(largest / LARGEST_FP16_GRADIENT).exponent
        return torch.ldexp(torch.ones_like(largest), exponent).where(largest > 0, 1)


def scaled_product(
    left: Tensor, right: Tensor, scale: Tensor | float, products: Products
) -> Tensor:
    """``scale * left @ right`` in the type of sums, [M, N]; not for plain products.

    Args:
        left: [M, K].
        right: [K, N].
        scale: Scalar; gets its gradient.
        products: How it is computed.

    Autograd keeps both factors. They are multiplied as they are, and the result is scaled: what is
    in half precision already is rounded no further. In backward the gradient of the result is an
    operand, too, and is rounded like them.
    """
    scale = torch.as_tensor(scale, dtype=products.sums, device=left.device).reshape(())
    return _ScaledProduct.apply(left, right, scale, products)


class _ScaledProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, scale: Tensor, products: Products) -> Tensor:
        ctx.save_for_backward(left, right, scale)
        ctx.products = products
        room = left.new_empty(len(left), right.shape[1], dtype=products.sums)
        return products.mm(left, right, room).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, right, scale = ctx.saved_tensors
        products: Products = ctx.products
        unit = products.unit(grad)
        in_range = grad / unit if products.operands == torch.float16 else grad
        slope = products.narrowed(in_range)  # [M, N]
        grads: list[Tensor | None] = [None] * 4
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
            unscaled = scaled_product(slope, right.T, unit, products)
            grads[0] = (unscaled * scale).to(left.dtype)
            grads[2] = (products.rounded(left) * unscaled).sum()
        if ctx.needs_input_grad[1]:
            grads[1] = scaled_product(left.T, slope, unit * scale, products).to(right.dtype)
        return tuple(grads)
