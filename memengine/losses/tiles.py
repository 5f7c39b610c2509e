"""All pairs of rows, one tile at a time in the same memory: the loop under the tiled losses.

Everything here is in fp32 (fp64 for fp64 rows) but the operands of products, which may be in half
precision (:mod:`~memengine.losses.batch_loss.Products`).

Shapes: M rows against N rows, D features; t the tile size. A tile is [t, t].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from memengine._torch_private.autograd import is_under_functorch
from memengine._torch_private.compiled_kernels import proven_kernels
from memengine.technique import Settings, Technique, setting

if TYPE_CHECKING:
    from memengine.losses.batch_loss import Products

__all__ = [
    'Tile',
    'check_tile_size',
    'choose_tile_size',
    'first_derivative_only',
    'grid',
    'least_exponent',
    'tiles',
    'upper_tiles',
]

_KERNELS = 'memengine.losses.kernels.similarity_tiles'
AUTO_TILE_BYTES = {'cpu': 2**20}  # half of a core's second-level cache
AUTO_TILE_BYTES_ELSEWHERE = 2**26  # large enough to keep a GPU busy

Visits = Iterable[tuple[slice, list[slice]]]  # rows, and the columns that they meet


def check_tile_size(tile_size: int | str | None) -> None:
    """Raise ValueError unless it is None, ``'auto'`` or a whole number of at least 1."""
    whole = isinstance(tile_size, int) and not isinstance(tile_size, bool) and tile_size >= 1
    if tile_size not in (None, 'auto') and not whole:
        raise ValueError(
            f"tile_size must be None (no tiles), 'auto' or a number of rows, got {tile_size!r}"
        )


def choose_tile_size(
    tile_size: int | str, rows: int, device: torch.device, dtype: torch.dtype
) -> int:
    """The number that ``'auto'`` stands for: the largest square tile within a budget of bytes.

    The budget is 1 MiB on a CPU, where a tile then stays in a core's cache (512 rows in fp32),
    and 64 MiB elsewhere (4096 rows).

    Raises:
        NotImplementedError: Under a transform of ``torch.func``, as tiles have gradients of their
            own making.
    """
    if not torch.compiler.is_compiling() and is_under_functorch():
        raise NotImplementedError(
            f'tile_size={tile_size!r}: a loss in tiles has no gradient under torch.func (grad, '
            'vjp, vmap); set tile_size=None'
        )
    if tile_size != 'auto':
        return int(tile_size)
    budget = AUTO_TILE_BYTES.get(device.type, AUTO_TILE_BYTES_ELSEWHERE)
    side = math.isqrt(budget // dtype.itemsize)
    return min(rows, side)


def least_exponent(dtype: torch.dtype) -> float:
    """Exponents below it count as it: -57 in fp32, far under the rounding of any sum.

    CPUs take ten and more times as long for numbers near the smallest that there are.
    """
    return 0.65 * math.log(torch.finfo(dtype).tiny)


@dataclass
class Tile:
    """Some rows against some columns.

    Attributes:
        rows: Which of the rows.
        cols: Which of the columns.
        left: The rows as operand, [t, D]: times the scale, unless in half precision.
        right: The columns as operand, [t, D].
        scale: What their product is to be multiplied by, scalar.
        products: How it is computed.
        kernels: What computes of a tile without writing its logits, or None.
        room: Two tiles [t * t] that stay the same, or None with kernels.
    """

    rows: slice
    cols: slice
    left: Tensor
    right: Tensor
    scale: Tensor | float
    products: Products
    kernels: Any | None
    room: Tensor | None

    @cached_property
    def logits(self) -> Tensor:
        """[t, t], to be overwritten."""
        logits = self.products.mm(self.left, self.right.T, self._part_of_room(0))
        return logits.mul_(self.scale) if self.products.is_half else logits

    @property
    def spare(self) -> Tensor:
        """Room for another, [t, t]."""
        return self._part_of_room(1)

    def _part_of_room(self, number: int) -> Tensor:
        assert self.room is not None
        shape = len(self.left), len(self.right)
        return self.room[number][: shape[0] * shape[1]].view(shape)

    def shift(self, offset: int = 0) -> int:
        """How much further a column of the tile is than its row where all's is by `offset`."""
        return offset + self.rows.start - self.cols.start

    def rows_on_diagonal(self, offset: int = 0) -> slice:
        """Which rows meet in this tile the column that is `offset` further."""
        shift = self.shift(offset)
        count = min(len(self.left) - max(0, -shift), len(self.right) - max(0, shift))
        start = self.rows.start + max(0, -shift)
        return slice(start, start + max(0, count))


def even_slices(start: int, stop: int, tile_size: int) -> list[slice]:
    """A range in even parts of at most ``tile_size``."""
    count = max(1, -(-(stop - start) // tile_size))
    size = -(-(stop - start) // count)
    return [slice(i, min(i + size, stop)) for i in range(start, stop, max(size, 1))]


def grid(rows: int, cols: int, tile_size: int) -> Visits:
    """Every tile of ``rows x cols``."""
    columns = even_slices(0, cols, tile_size)
    return [(part, columns) for part in even_slices(0, rows, tile_size)]


def upper_tiles(anchors: int, rows: int, tile_size: int) -> Visits:
    """The tiles of ``anchors x rows`` on and right of the diagonal; each pair is met once."""
    parts = even_slices(0, anchors, tile_size)
    rest = even_slices(anchors, rows, tile_size) if rows > anchors else []
    return [(part, parts[number:] + rest) for number, part in enumerate(parts)]


def tiles(
    a: Tensor, b: Tensor, scale: Tensor | float, visits: Visits, size: int, products: Products
) -> Iterator[Tile]:
    """``scale * a @ b.T`` tile by tile, in the same two buffers, or by kernels, which need none.

    In half precision the logits are scaled, not the rows, which would be rounded once more.
    """
    dtype, is_half = products.sums, products.is_half
    kernels = (
        proven_kernels(_KERNELS, a.to(products.operands)[:0]) if products.on_tensor_cores else None
    )
    side = min(size, len(a)) * min(size, len(b))
    room = None if kernels else torch.empty(2, side, dtype=dtype, device=a.device)
    rest: Tensor | float = scale if is_half else 1.0
    if kernels and not isinstance(rest, Tensor):
        rest = torch.full((), rest, dtype=dtype, device=a.device)
    for rows, columns in visits:
        left = a[rows].to(products.operands)
        left = left if is_half else left * scale
        for cols in columns:
            right = b[cols].to(products.operands)
            yield Tile(rows, cols, left, right, rest, products, kernels, room)


class _FirstOnly(torch.autograd.Function):
    """A gradient, tied to what it was made from, so that whoever differentiates it is told."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            'a loss in tiles or over ranks has a first derivative only; for a second one use '
            'tile_size=None in one process'
        )


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Run a Function's backward without a graph, and refuse a derivative of what it returns.

    torch's ``once_differentiable`` raises only where a backward pass walks by: a derivative with
    respect to the inputs, or of a sum with other terms, would be without this part in silence.
    """

    @wraps(backward)
    def wrapped(ctx: Any, *grads: Tensor) -> Any:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():  # no create_graph=True
            return found
        sources = [t for t in (*grads, *ctx.saved_tensors) if t is not None and t.requires_grad]
        gradients = found if isinstance(found, tuple) else (found,)
        return tuple(None if g is None else _FirstOnly.apply(g, *sources) for g in gradients)

    return wrapped


@dataclass(frozen=True)
class TiledLossSettings(Settings):
    """Settings of losses in tiles, as ``model.loss`` takes them."""

    tile_size: int | Literal['auto'] | None = setting(
        None, help='rows and columns of the similarities that are there at a time', low=1
    )


TECHNIQUE = Technique(
    key='tiled_loss',
    title='contrastive losses in tiles',
    settings=TiledLossSettings,
    switch='model.loss.tile_size=auto',
    loss='coupled',
    use_when='the matrix of similarities is large (some thousands of samples)',
    saves='all of the matrix but two tiles',
    price='backward computes the similarities again',
    page='disco.md#tiles',
    example=TiledLossSettings(tile_size=3),
)
