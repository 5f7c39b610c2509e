"""The losses' kernels on CPU tensors in Triton's interpreter; `test_similarity_tiles.py` runs this.

Triton asks for ``TRITON_INTERPRET`` when it is imported, so this needs a process of its own.
"""

import warnings

import numpy as np
import pytest
import torch
import triton.language as tl
from torch.nn import functional as F
from triton.runtime import interpreter

from memengine._torch_private import compiled_kernels
from memengine._torch_private import matrix_products as torch_products
from memengine.losses.batch_loss import Products
from memengine.losses.kernels import similarity_tiles
from memengine.losses.logsumexp import RunningLogSumExp, add_tile, softmax_slope
from memengine.losses.siglip import sigmoid_slope, sigmoid_sums
from memengine.losses.tiles import grid, tiles
from memengine.testing import assert_same_step, relative_error
from tests.losses.cases import CASES, step

# What the interpreter says of infinity, where the kernels mean it.
pytestmark = pytest.mark.filterwarnings('ignore::RuntimeWarning')
DTYPES = {torch.float32: 'tf32', torch.bfloat16: 'auto', torch.float16: 'auto'}


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    """Losses use the kernels on CPU tensors, too, in blocks of which the cases have several."""
    monkeypatch.setattr(compiled_kernels, '_can_be_read', lambda *_: True)
    monkeypatch.setattr(torch_products, 'HAS_OUT_DTYPE', False)
    monkeypatch.setattr(similarity_tiles, '_SIDE', 16)
    dot = interpreter.InterpreterBuilder.create_dot

    def wide(handle):  # the interpreter has bf16 as integers, and would multiply these
        if handle.dtype != tl.bfloat16:
            return handle
        data = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    monkeypatch.setattr(
        interpreter.InterpreterBuilder,
        'create_dot',
        lambda builder, a, b, *rest: dot(builder, wide(a), wide(b), *rest),
    )


@pytest.mark.parametrize('dtype', DTYPES)
def test_they_agree_with_float64(dtype):
    similarity_tiles.compare_with_eager(torch.empty(0, dtype=dtype))


WRONG = {
    'softmax_sums': lambda rows, columns, true: (rows[:-1], columns, true),
    'softmax_slope': lambda slope: slope.roll(1, 1),
    'sigmoid_sums': lambda sums: sums * 1.001,
    'sigmoid_slope': lambda slope, total: (slope, 1.001 * total),
}


@pytest.mark.parametrize('form', WRONG)
def test_a_wrong_one_is_seen(monkeypatch, form):
    right = getattr(similarity_tiles, form)

    def wrong(*args):
        found = right(*args)
        return WRONG[form](*found) if isinstance(found, tuple) else WRONG[form](found)

    monkeypatch.setattr(similarity_tiles, form, wrong)
    with pytest.raises(ArithmeticError, match=r'in tiles of torch\.float16 is not'):
        similarity_tiles.compare_with_eager(torch.empty(0, dtype=torch.float16))


@pytest.mark.parametrize(
    'name',
    [
        'clip, scale 100',
        'siglip, scale 100',
        'ntxent, temperature 0.01',
        'supcon with a mask',
        'supcon one with labels',
        'supcon of one view',  # of which some have no positives
    ],
)
def test_a_step_agrees_with_the_eager_form_and_the_formula(name):
    torch.manual_seed(0)
    case = CASES[name]
    steep = 30 if name.endswith('temperature 0.01') else 1
    tensors = case.tensors(12)
    for dtype, precision in DTYPES.items():
        low = {
            key: value.to(dtype if value.dim() else torch.float32)
            if value.is_floating_point()
            else value
            for key, value in tensors.items()
        }
        exact = {key: x.double() if x.is_floating_point() else x for key, x in low.items()}
        eps = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
        loss = case.make(7)
        loss.precision = precision
        with warnings.catch_warnings():
            warnings.simplefilter('error', UserWarning)  # that none is used
            fused = step(lambda t, loss=loss: case.call(loss, t), low)
        with compiled_kernels.without_kernels():
            eager = step(lambda t, loss=loss: case.call(loss, t), low)
        assert_same_step(fused, eager, 2 * steep * eps)
        for key, value in step(case.formula, exact).items():
            assert relative_error(fused[key], value, 1e-3) < 4 * steep * eps, (key, dtype)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('offset', [0, 6, -9])
def test_tiles_of_two_sets_agree_wherever_the_diagonal_is(dtype, offset):
    torch.manual_seed(0)
    a, b = (F.normalize(torch.randn(n, 37)).to(dtype) for n in (21, 34))
    scale, bias, products = torch.tensor(3.0), torch.tensor(-4.0), Products.of(DTYPES[dtype], a, b)
    lse, grad = torch.rand(2, 34) + 3, torch.rand(2, 34)
    eps = 1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps

    def computed(make):
        found = {}
        for tile in tiles(a, b, scale, grid(21, 34, 18), 18, products):
            found[str(tile.rows) + str(tile.cols)] = make(tile).float().clone()
        return found

    def sums(tile, without_diagonal):
        rows, columns = (RunningLogSumExp(n, torch.float32, torch.device('cpu')) for n in (21, 34))
        true = add_tile(tile, rows, columns, offset, without_diagonal)
        kept = [] if without_diagonal else [true]
        return torch.cat([rows.result()[tile.rows], columns.result()[tile.cols], *kept])

    def slope(tile, of_columns, less):
        return softmax_slope(tile, (lse[0], grad[0]), of_columns, offset, less)

    def pair_slope(tile):
        slope, total = sigmoid_slope(tile, bias, offset, grad[0])
        return torch.cat([slope.float().flatten(), total[None]])

    for make in (
        lambda tile: sums(tile, False),
        lambda tile: sums(tile, True),
        lambda tile: slope(tile, (lse[1], grad[1]), grad[0]),
        lambda tile: slope(tile, None, None),
        lambda tile: sigmoid_sums(tile, bias, offset),
        pair_slope,
    ):
        fused = computed(make)
        with compiled_kernels.without_kernels():
            torch.testing.assert_close(fused, computed(make), rtol=10 * eps, atol=eps)


def test_fp32_that_is_to_be_exact_and_float64_go_without():
    for dtype, precision in [(torch.float32, 'fp32'), (torch.float64, 'auto')]:
        rows = torch.randn(4, 3, dtype=dtype)
        products = Products.of(precision, rows)
        (tile,) = tiles(rows, rows, 1.0, grid(4, 4, 4), 4, products)
        assert tile.kernels is None and tile.logits.dtype == dtype
