"""What the contrastive losses share: the type in which they multiply, their tiles, their ranks.

Results are summed in fp32 or wider.

Shapes: N contrasts of which the first M are anchors, D features; b rows of this rank. Of a product
M rows against N columns, K summed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from memengine._torch_private.matrix_products import default_fp32_products, fp32_products, half_mm
from memengine.losses.disco import sum_over_ranks
from memengine.losses.gather import Gather, by_rank, compare_ranks, needs_grad, rows_per_rank
from memengine.losses.logsumexp import others_logsumexp
from memengine.losses.tiles import check_tile_size
from memengine.suggest import did_you_mean

__all__ = [
    'BatchLoss',
    'Precision',
    'Products',
    'at_least_fp32',
    'l2_normalize',
    'log_partition',
    'mean_over_ranks',
    'own_rows',
    'ranks_of',
    'scaled_product',
]

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

    def scalar(self, value: Tensor | float, device: torch.device) -> Tensor:
        """A scale or bias in the type of sums, with its gradient; the host waits for no copy."""
        if isinstance(value, Tensor):
            return value.to(device, self.sums).reshape(())
        return torch.full((), value, dtype=self.sums, device=device)

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
    return _ScaledProduct.apply(left, right, products.scalar(scale, left.device), products)


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


class BatchLoss(nn.Module):
    """What the contrastive losses share.

    Args:
        tile_size: How many rows and columns of the similarities are held at a time. None: all of
            them, kept for backward, as is fastest for small batches. ``'auto'``: as many as suit
            the device (:func:`~memengine.losses.tiles.choose_tile_size`).
        precision: The type in which embeddings are multiplied; results are summed in fp32 or wider.
            ``'auto'``: half-precision embeddings as they are, all others in fp32 or wider, as torch
            is set. ``'bf16'`` or ``'fp16'``: rounded to it, as suits embeddings that autocast's
            normalisation returned in fp32. ``'fp32'``: in fp32 or wider, on GPUs without TF32.
            ``'tf32'``: fp32 ones in TF32 on GPUs.

    Attributes:
        process_group: The ranks whose rows are one batch, see
            :mod:`~memengine.losses.disco`; None for this process.
    """

    def __init__(self, tile_size: int | str | None = None, precision: Precision = 'auto') -> None:
        super().__init__()
        check_tile_size(tile_size)
        check_precision(precision)
        self.tile_size = tile_size
        self.precision = precision
        self.process_group: dist.ProcessGroup | None = None

    @contextmanager
    def checked_by_all(self, embeddings: Tensor, *others: Any, **settings: Any) -> Iterator[None]:
        """Within, a rank checks what it was given; if one raises ValueError, all ranks do.

        Otherwise the others would wait for it in the first exchange.

        Args:
            embeddings: This rank's.
            *others: What else the loss is of. Each needs a gradient on all ranks or on none.
            **settings: What else has to be the same on all ranks.

        Raises:
            ValueError: On every rank, when a check failed on one, or when ranks differ.

        On the wire are two numbers of each rank.
        """
        group = ranks_of(self.process_group)
        if group is None:
            yield
            return
        problem: ValueError | None = None
        try:
            yield
        except ValueError as error:
            problem = error
        learned = [isinstance(x, Tensor) and needs_grad(x) for x in (embeddings, *others)]
        settings |= {'tiled': self.tile_size is not None, 'precision': self.precision}
        settings |= {'require gradients': learned}
        said = ', '.join(f'{name}: {value}' for name, value in settings.items())
        kind = str(problem) if problem else said
        refused, differing = compare_ranks(bool(problem), kind, kind, embeddings.device, group)
        if any(refused) and differing:
            raise ValueError(f'refused on all ranks: {by_rank(differing, refused)}') from problem
        if differing:
            raise ValueError(
                f'{type(self).__name__}: the ranks must call it alike, got {by_rank(differing)}'
            )
        if problem is not None:
            raise problem


def at_least_fp32(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in one common type, which is fp32 or wider.

    Returns:
        The same tensors when nothing is to be cast; gradients come back in the original types.
    """
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)


def l2_normalize(embeddings: Tensor) -> Tensor:
    """Rows of length 1, [..., D], in fp32 or wider."""
    return F.normalize(at_least_fp32(embeddings)[0], dim=-1)


def ranks_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group, or None where it is one process."""
    if group is None or dist.get_world_size(group) == 1:
        return None
    return group


def own_rows(tensor: Tensor, group: dist.ProcessGroup | None) -> slice:
    """Where this rank's rows stand among those of all."""
    if group is None:
        return slice(0, len(tensor))
    start = sum(rows_per_rank(tensor, group)[: dist.get_rank(group)])
    return slice(start, start + len(tensor))


def mean_over_ranks(losses: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The mean of the rows [b] of all ranks. Scalar."""
    if group is None:
        return losses.mean()
    count = sum_over_ranks(losses.new_full((), float(len(losses))), group)
    return sum_over_ranks(losses.sum(), group) / count


def log_partition(
    contrasts: Tensor,
    anchors: int,
    temperature: Tensor | float,
    products: Products,
    tile_size: int | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """``log sum_{n != m} exp(c_m . c_n / temperature)``: each anchor against all but itself.

    Args:
        contrasts: [N, D], beginning with the anchors.
        anchors: Their number M.
        temperature: Positive; gets its gradient.
        products: How the similarities are computed, and their gradients.
        tile_size: None for the reference, else see
            :func:`~memengine.losses.logsumexp.others_logsumexp`.
        group: Ranks whose contrasts are all met.

    Returns:
        [M]; very negative, but finite and without gradient, for an anchor with no contrast.
    """
    if tile_size is not None:
        return others_logsumexp(contrasts, anchors, 1 / temperature, tile_size, products, group)
    first = own_rows(contrasts, group).start
    everything = contrasts if group is None else Gather(contrasts, group)
    if products.is_plain:
        scaled = (contrasts[:anchors] / temperature).to(contrasts.dtype)  # it may be [1], and wider
        logits = scaled @ everything.T  # [M, N]
    else:
        logits = scaled_product(contrasts[:anchors], everything.T, 1 / temperature, products)
    logits.diagonal(first).fill_(torch.finfo(logits.dtype).min)
    return logits.logsumexp(dim=1)
