"""What the losses compute of a tile of similarities, in the kernel of its product.

The eager forms are in ``losses/logsumexp.py`` and ``losses/siglip.py``. There a tile is written by
the product and read some ten times; here it stays where the product has it, and a number for each
row and column of a block of it leaves, or in backward its gradient, as operand of the next product.

Shapes: M rows against N columns, D features; b blocks. ``column == row + shift`` is the diagonal.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_SIDE = 128  # of a block
_PANEL_BYTES = 128  # of a row's features that are multiplied at once


def softmax_sums(
    left: Tensor, right: Tensor, scale: Tensor, shift: int, without_diagonal: bool, columns: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Log-sum-exp of the parts of each row, and of each column, of ``scale * left @ right.T``.

    Args:
        left: [M, D], of bfloat16 or float16, or of float32, which is multiplied in TF32.
        right: [N, D], in the same type.
        scale: Scalar in fp32.
        shift: Of the diagonal.
        without_diagonal: Leave it out of the sums, as ``finfo.min``.
        columns: Whether columns are summed over, too.

    Returns:
        [b, M] by row, [b, N] by column or None, in fp32, whose log-sum-exp over dimension 0 is
        that of the tile, and the logits on the diagonal, [M], undefined for rows that have none.
    """
    blocks = _blocks(left, right)
    by_row = scale.new_empty(blocks[1], len(left))
    by_column = scale.new_empty(blocks[0], len(right)) if columns else by_row
    on_diagonal = scale.new_empty(len(left))
    with torch.cuda.device_of(left):
        _sums[blocks](
            *_operands(left, right, scale, scale, shift),
            by_row,
            by_column,
            on_diagonal,
            sigmoid=False,
            without_diagonal=without_diagonal,
            columns=columns,
            **_settings(left),
        )
    return by_row, by_column if columns else None, on_diagonal


def sigmoid_sums(left: Tensor, right: Tensor, scale: Tensor, bias: Tensor, shift: int) -> Tensor:
    """``log(1 + exp(z * (scale * left @ right.T + bias)))``, summed over parts of rows, [b, M].

    z is -1 on the diagonal, elsewhere 1.
    """
    blocks = _blocks(left, right)
    by_row = scale.new_empty(blocks[1], len(left))
    with torch.cuda.device_of(left):
        _sums[blocks](
            *_operands(left, right, scale, bias, shift),
            by_row,
            by_row,
            by_row,
            sigmoid=True,
            without_diagonal=False,
            columns=False,
            **_settings(left),
        )
    return by_row


def softmax_slope(
    left: Tensor,
    right: Tensor,
    scale: Tensor,
    shift: int,
    of_rows: tuple[Tensor, Tensor],
    of_columns: tuple[Tensor, Tensor] | None,
    on_diagonal: Tensor | None,
) -> Tensor:
    """The gradient of log-sum-exps with respect to the logits, [M, N] in the type of operands.

    Args:
        left: As in :func:`softmax_sums`, with what follows.
        right: [N, D].
        scale: Scalar in fp32.
        shift: Of the diagonal.
        of_rows: Log-sum-exp of the rows and its gradient, [M] in fp32 each.
        of_columns: The same of columns, [N] each; None leaves them out.
        on_diagonal: What is subtracted there, [M] by row; None makes it zero there.
    """
    slope = torch.empty(len(left), len(right), dtype=left.dtype, device=left.device)
    rows = [each.contiguous() for each in of_rows]
    columns = rows if of_columns is None else [each.contiguous() for each in of_columns]
    with torch.cuda.device_of(left):
        _slope[_blocks(left, right)](
            *_operands(left, right, scale, scale, shift),
            *rows,
            *columns,
            rows[1] if on_diagonal is None else on_diagonal.contiguous(),
            slope,
            scale,
            sigmoid=False,
            without_diagonal=on_diagonal is None,
            columns=of_columns is not None,
            **_settings(left),
        )
    return slope


def sigmoid_slope(
    left: Tensor, right: Tensor, scale: Tensor, bias: Tensor, shift: int, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of :func:`sigmoid_sums` with respect to the logits, and its sum in fp32.

    Args:
        left: As in :func:`softmax_sums`, with what follows.
        right: [N, D].
        scale: Scalar in fp32.
        bias: Scalar in fp32.
        shift: Of the diagonal.
        grad: Of each row's sum, [M] in fp32.
    """
    slope = torch.empty(len(left), len(right), dtype=left.dtype, device=left.device)
    blocks, grad = _blocks(left, right), grad.contiguous()
    totals = scale.new_empty(blocks)
    with torch.cuda.device_of(left):
        _slope[blocks](
            *_operands(left, right, scale, bias, shift),
            *[grad] * 5,
            slope,
            totals,
            sigmoid=True,
            without_diagonal=False,
            columns=False,
            **_settings(left),
        )
    return slope, totals.sum()


def compare_with_eager(like: Tensor) -> None:
    """Compare with the same computed in float64, where `like` lies and for operands of its dtype.

    Raises:
        ArithmeticError: When a kernel gives what it should not.
    """
    rows, columns, shift = _SIDE + 5, 2 * _SIDE + 3, 7
    steps = torch.arange((rows + columns) * 83, device=like.device).view(-1, 83)
    vectors = ((steps * steps) % 7 - 3).div(16).to(like.dtype)  # whose products TF32 has exactly
    left, right = vectors[:rows], vectors[rows:]
    scale, bias = (torch.full((), value, device=like.device) for value in (30.0, -2.0))
    logits = scale.double() * left.double() @ right.double().T
    own, places = torch.arange(rows, device=like.device), slice(shift, shift + rows)
    is_own = torch.zeros_like(logits, dtype=torch.bool)
    is_own[own, own + shift] = True
    others = logits.masked_fill(is_own, -torch.inf)

    def check(found: Tensor, right: Tensor, what: str, eps: float = 1e-5) -> None:
        error = (found.double() - right).abs()
        if not bool((error <= eps * (1 + right.abs())).all()):
            raise ArithmeticError(f'{what} in tiles of {like.dtype} is not what it was to be')

    by_row, by_column, diagonal = softmax_sums(left, right, scale, shift, False, True)
    check(by_row.logsumexp(0), logits.logsumexp(1), 'log-sum-exp')
    assert by_column is not None
    check(by_column.logsumexp(0), logits.logsumexp(0), 'log-sum-exp')
    check(diagonal, logits[is_own], 'the diagonal')
    by_row, _, _ = softmax_sums(left, right, scale, shift, True, False)
    row_lse, column_lse = by_row.logsumexp(0), others.logsumexp(0)
    check(row_lse, others.logsumexp(1), 'log-sum-exp of others')
    half = torch.finfo(like.dtype).eps if like.dtype != torch.float32 else 0
    grad, of_column = 0.5 + own.float() / rows, 1 + torch.arange(columns, device=like.device) / 9
    of_rows, of_columns = (row_lse, grad), (column_lse.float(), of_column)
    expected = (others - row_lse.double()[:, None]).exp() * grad.double()[:, None]
    slope = softmax_slope(left, right, scale, shift, of_rows, None, None)
    check(slope, expected, 'a gradient', 1e-5 + half)
    expected += (others - column_lse).exp() * of_column
    expected += ((logits - row_lse[:, None]).exp() * grad[:, None]).where(is_own, 0)
    expected += ((logits - column_lse).exp() * of_column).where(is_own, 0)
    expected[:, places].diagonal().sub_(grad)
    slope = softmax_slope(left, right, scale, shift, of_rows, of_columns, grad)
    check(slope, expected, 'a gradient of both', 1e-4 + half)
    wrong = (logits + bias) * torch.where(is_own, -1, 1)
    sums = sigmoid_sums(left, right, scale, bias, shift).sum(0)
    check(sums, torch.nn.functional.softplus(wrong).sum(1), 'a sum of losses')
    expected = wrong.sigmoid() * grad.double()[:, None] * torch.where(is_own, -1, 1)
    slope, total = sigmoid_slope(left, right, scale, bias, shift, grad)
    check(slope, expected, 'a gradient of pairs', 1e-5 + half)
    check(total, expected.sum(), 'the gradient of the bias')


def _blocks(left: Tensor, right: Tensor) -> tuple[int, int]:
    return triton.cdiv(len(left), _SIDE), triton.cdiv(len(right), _SIDE)


def _operands(
    left: Tensor, right: Tensor, scale: Tensor, bias: Tensor, shift: int
) -> tuple[Any, ...]:
    sizes = len(left), len(right), left.shape[1], shift
    return left.contiguous(), right.contiguous(), scale, bias, *sizes


def _settings(left: Tensor) -> dict[str, int]:
    return dict(side=_SIDE, panel=_PANEL_BYTES // left.element_size(), num_warps=8, num_stages=3)


@triton.jit
def _block(
    left: tl.tensor,
    right: tl.tensor,
    scale: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    features: tl.tensor,
    shift: tl.tensor,
    side: tl.constexpr,
    panel: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Of the program's block: its rows and columns, [side] each; its logits, [side, side] in fp32;
    which of these there are, and which are on the diagonal."""
    row = tl.program_id(0) * side + tl.arange(0, side)
    column = tl.program_id(1) * side + tl.arange(0, side)
    is_row, is_column = (row < height)[:, None], (column < width)[None, :]
    total = tl.zeros((side, side), tl.float32)
    from_left = left + row.to(tl.int64)[:, None] * features
    from_right = right + column.to(tl.int64)[None, :] * features
    for start in range(0, features, panel):
        feature = start + tl.arange(0, panel)
        is_feature = feature < features
        a = tl.load(from_left + feature[None, :], mask=is_row & is_feature[None, :], other=0)
        b = tl.load(from_right + feature[:, None], mask=is_column & is_feature[:, None], other=0)
        total = tl.dot(a, b, total, input_precision='tf32')
    logits = total * tl.load(scale)
    return row, column, logits, is_row & is_column, column[None, :] == row[:, None] + shift


@triton.jit
def _softplus(value: tl.tensor) -> tl.tensor:
    """``log(1 + exp(value))``, exact for what is small: log(1 + e) loses e's bits, which we give
    back."""
    e = tl.exp(-tl.abs(value))
    rounded = 1 + e
    rest = rounded - 1
    grown = tl.where(rest == 0, e, tl.log(rounded) * (e / tl.where(rest == 0, 1.0, rest)))
    return tl.maximum(value, 0) + grown


@triton.jit
def _logsumexp(values: tl.tensor, axis: tl.constexpr) -> tl.tensor:
    largest = tl.max(values, axis=axis)
    largest = tl.where(largest == float('-inf'), -3.4028234663852886e38, largest)  # beyond the end
    return largest + tl.log(tl.sum(tl.exp(values - tl.expand_dims(largest, axis)), axis=axis))


@triton.jit(do_not_specialize=['height', 'width', 'shift'])
def _sums(
    left: tl.tensor,
    right: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    features: tl.tensor,
    shift: tl.tensor,
    by_row: tl.tensor,
    by_column: tl.tensor,
    on_diagonal: tl.tensor,
    sigmoid: tl.constexpr,
    without_diagonal: tl.constexpr,
    columns: tl.constexpr,
    side: tl.constexpr,
    panel: tl.constexpr,
) -> None:
    i, j = tl.program_id(0), tl.program_id(1)
    row, column, logits, is_pair, is_diagonal = _block(
        left, right, scale, height, width, features, shift, side, panel
    )
    is_row, is_column = row < height, column < width
    if sigmoid:
        wrong = logits + tl.load(bias)
        losses = _softplus(tl.where(is_diagonal, -wrong, wrong))
        sums = tl.sum(tl.where(is_pair, losses, 0.0), axis=1)
        tl.store(by_row + j.to(tl.int64) * height + row, sums, mask=is_row)
    else:
        if without_diagonal:
            logits = tl.where(is_diagonal, -3.4028234663852886e38, logits)
        else:
            place = on_diagonal + row[:, None] + tl.zeros_like(column)[None, :]
            tl.store(place, logits, mask=is_diagonal & is_pair)
        logits = tl.where(is_pair, logits, float('-inf'))
        tl.store(by_row + j.to(tl.int64) * height + row, _logsumexp(logits, 1), mask=is_row)
        if columns:
            sums = _logsumexp(logits, 0)
            tl.store(by_column + i.to(tl.int64) * width + column, sums, mask=is_column)


@triton.jit(do_not_specialize=['height', 'width', 'shift'])
def _slope(
    left: tl.tensor,
    right: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    features: tl.tensor,
    shift: tl.tensor,
    row_lse: tl.tensor,
    row_grad: tl.tensor,
    column_lse: tl.tensor,
    column_grad: tl.tensor,
    on_diagonal: tl.tensor,
    slope: tl.tensor,
    totals: tl.tensor,
    sigmoid: tl.constexpr,
    without_diagonal: tl.constexpr,
    columns: tl.constexpr,
    side: tl.constexpr,
    panel: tl.constexpr,
) -> None:
    i, j = tl.program_id(0), tl.program_id(1)
    row, column, logits, is_pair, is_diagonal = _block(
        left, right, scale, height, width, features, shift, side, panel
    )
    is_row, is_column = row < height, column < width
    grad = tl.load(row_grad + row, mask=is_row, other=0)[:, None]
    if sigmoid:
        wrong = logits + tl.load(bias)
        wrong = tl.where(is_diagonal, -wrong, wrong)
        slopes = grad / (1 + tl.exp(-wrong))
        slopes = tl.where(is_diagonal, -slopes, slopes)
        total = tl.sum(tl.sum(tl.where(is_pair, slopes, 0.0), axis=1), axis=0)
        tl.store(totals + i * tl.num_programs(1) + j, total)
    else:
        lse = tl.load(row_lse + row, mask=is_row, other=0)[:, None]
        slopes = tl.exp(logits - lse) * grad
        if columns:
            lse = tl.load(column_lse + column, mask=is_column, other=0)[None, :]
            of_column = tl.load(column_grad + column, mask=is_column, other=0)[None, :]
            slopes += tl.exp(logits - lse) * of_column
        if without_diagonal:
            slopes = tl.where(is_diagonal, 0.0, slopes)
        else:
            less = tl.load(on_diagonal + row, mask=is_row, other=0)[:, None]
            slopes = tl.where(is_diagonal, slopes - less, slopes)
    place = slope + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(place, slopes.to(slope.dtype.element_ty), mask=is_pair)
