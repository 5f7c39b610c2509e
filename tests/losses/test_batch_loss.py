"""The type of the operands: what the losses multiply in, what they lose by it, and what not."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memengine.losses import ClipLoss, ConLoss, NTXentLoss, SigLipLoss, SupConLoss
from memengine.losses.batch_loss import Products, scaled_product
from memengine.testing import assert_same_step, relative_error

from .cases import CASES, step

MATMUL = torch.backends.cuda.matmul
PRODUCTS = ('mm', 'addmm', 'bmm')
BASIC = ('clip', 'siglip', 'ntxent', 'supcon with labels', 'selfcon')
SHARP = ('scale 3000', 'temperature 0.01')  # where the rounding of an embedding moves the softmax


def fp32_setting():
    return MATMUL.fp32_precision if hasattr(MATMUL, 'fp32_precision') else MATMUL.allow_tf32


class ProductsSeen(TorchDispatchMode):
    """Types of what is multiplied, and how a GPU would multiply fp32."""

    def __init__(self):
        super().__init__()
        self.types, self.settings = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in PRODUCTS:
            self.types |= {x.dtype for x in args if isinstance(x, torch.Tensor)}
            self.settings.add(fp32_setting())
        return func(*args, **(kwargs or {}))


def low_precision(name, dtype):
    """A case, and its tensors with embeddings in a type."""
    torch.manual_seed(0)
    case = CASES[name]
    return case, {
        key: x.to(dtype) if x.is_floating_point() and x.dim() else x
        for key, x in case.tensors(12).items()
    }


def run(case, tensors, tile_size, precision='auto'):
    loss = case.make(tile_size)
    loss.precision = precision
    return step(lambda t: case.call(loss, t), tensors)


@pytest.mark.parametrize('tile_size', [None, 5])
@pytest.mark.parametrize('name', BASIC)
def test_which_products_there_are(name, tile_size):
    before = fp32_setting()
    tf32, ieee = ('tf32', 'ieee') if isinstance(before, str) else (True, False)
    expected = {
        (torch.float32, 'auto'): (torch.float32, before),
        (torch.float64, 'auto'): (torch.float64, before),
        (torch.float32, 'fp32'): (torch.float32, ieee),
        (torch.bfloat16, 'fp32'): (torch.float32, ieee),
        (torch.bfloat16, 'tf32'): (torch.float32, tf32),
    }
    for (dtype, precision), (operands, setting) in expected.items():
        with ProductsSeen() as products:
            run(*low_precision(name, dtype), tile_size, precision)
        assert (products.types, products.settings) == ({operands}, {setting})
    assert fp32_setting() == before


@pytest.mark.parametrize('name', [*BASIC, 'clip, scale 3000', 'ntxent, temperature 0.01'])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision(name, dtype):
    """To its own rounding, and whatever the tile."""
    case, low = low_precision(name, dtype)
    whole = run(case, low, None)
    assert whole['loss'].dtype == torch.float32
    exact = {k: x.double() if x.is_floating_point() else x for k, x in low.items()}
    steep = 30 if name.endswith(SHARP) else 1
    eps = steep * torch.finfo(dtype).eps
    for key, value in step(case.formula, exact).items():
        assert relative_error(whole[key], value, 1e-3) < 4 * eps, key
    for tile_size in (3, 'auto'):
        assert_same_step(run(case, low, tile_size), whole, 2 * eps)


@pytest.mark.parametrize('name', BASIC)
@pytest.mark.parametrize('tile_size', [None, 5])
def test_small_gradients_do_not_vanish_in_fp16(name, tile_size):
    """The mean over a large batch makes those of logits smaller than any number of fp16."""
    case, tensors = low_precision(name, torch.float32)
    loss = case.make(tile_size)
    loss.precision = 'fp16'
    plain = step(lambda t: case.call(loss, t), tensors)
    small = step(lambda t: 1e-9 * case.call(loss, t), tensors)
    actual = {key: 1e9 * value for key, value in small.items()}
    assert_same_step(actual, plain, 0.01)


def test_second_derivative_of_the_untiled_form():
    torch.manual_seed(0)
    left, right, scale = torch.randn(4, 3), torch.randn(3, 5), torch.tensor(2.0)

    def second(product, *leaves):
        leaves = [x.requires_grad_() for x in leaves]
        first = torch.autograd.grad(product(*leaves).exp().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    leaves = left.bfloat16(), right.bfloat16(), scale
    half = Products.of('auto', *leaves[:2])
    actual = second(lambda a, b, s: scaled_product(a, b, s, half), *leaves)
    expected = second(lambda a, b, s: s * a @ b, *(x.detach().double() for x in leaves))
    for some, other in zip(actual, expected, strict=True):
        assert relative_error(some, other) < 0.05


@pytest.mark.parametrize('loss', [ClipLoss, SigLipLoss, NTXentLoss, SupConLoss, ConLoss])
def test_precision(loss):
    with pytest.raises(
        ValueError, match="precision must be one of .*got 'bf61': did you mean 'bf16'"
    ):
        loss(precision='bf61')
