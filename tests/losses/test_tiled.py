"""The losses in tiles: the formula's value and gradients, whatever the tile and the precision."""

import pytest
import torch

from memengine.losses import ClipLoss, NTXentLoss, SigLipLoss, SupConLoss
from memengine.losses.tiles import choose_tile_size
from memengine.testing import assert_same_step, relative_error

from .cases import CASES, learned, step, two_towers

TILES = [None, 1, 3, 4, 100, 'auto']  # 3 divides no batch of one view, 100 is larger than any


@pytest.mark.parametrize('size', [1, 8, 11])
@pytest.mark.parametrize('name', CASES)
def test_formula(name, size):
    torch.manual_seed(size)
    case = CASES[name]
    tensors = case.tensors(size)
    expected = step(case.formula, tensors)
    for tile_size in TILES:
        loss = case.make(tile_size)
        assert_same_step(step(lambda t, loss=loss: case.call(loss, t), tensors), expected, 1e-10)


@pytest.mark.parametrize('wrong', ['doubled', 'missing', 'zero'])
@pytest.mark.parametrize('name', CASES)
def test_a_wrong_gradient_is_seen(name, wrong):
    case = CASES[name]
    tensors = case.tensors(8)
    expected, loss = step(case.formula, tensors), case.make(3)
    for damaged in learned(tensors):
        actual = step(lambda t: case.call(loss, t), tensors)
        gradient = actual[damaged]
        actual[damaged] = {'doubled': 2 * gradient, 'missing': None, 'zero': 0 * gradient}[wrong]
        with pytest.raises(AssertionError, match=f'1 of .* differ: {damaged}'):
            assert_same_step(actual, expected, 1e-10)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize('name', CASES)
def test_low_precision_is_computed_with_in_fp32_where_that_is_said(name, dtype):
    torch.manual_seed(0)
    case = CASES[name]
    exact = {
        key: value.to(dtype).double() if value.is_floating_point() else value
        for key, value in case.tensors(12).items()
    }
    low = {
        key: value.to(dtype) if value.dtype.is_floating_point else value
        for key, value in exact.items()
    }
    for key in ('scale', 'bias', 'temperature'):
        low |= {key: exact[key].float()} if key in exact else {}
    expected, loss = step(case.formula, exact), case.make(5)
    loss.precision = 'fp32'

    def forward(tensors):
        with torch.autocast('cpu', dtype=torch.bfloat16):
            return case.call(loss, tensors)

    actual = step(forward, low)
    assert actual['loss'].dtype == torch.float32
    sharp = 3000 if '3000' in name else 100
    for key, value in expected.items():
        assert key == 'loss' or actual[key].dtype == low[key].dtype
        rounding = 2 * torch.finfo(actual[key].dtype).eps + sharp * 4e-7
        assert relative_error(actual[key], value) < rounding, key


@pytest.mark.edge('tiled_loss', 'exact', 'Scales that are numbers or learned, frozen towers')
@pytest.mark.parametrize('loss', [ClipLoss, SigLipLoss])
def test_plain_numbers_frozen_towers_and_shapes_of_the_scale(loss):
    tensors = two_towers(7, 10.0)
    images, texts = tensors['images'].requires_grad_(), tensors['texts']
    for scale in (10.0, 10, torch.tensor([10.0])):
        (tiled,) = torch.autograd.grad(loss(tile_size=3)(images, texts, scale).sum(), images)
        (dense,) = torch.autograd.grad(loss()(images, texts, scale).sum(), images)
        assert relative_error(tiled, dense) < 1e-12
    (tiled,) = torch.autograd.grad(loss(tile_size=3)(texts, images, 10.0), images)
    (dense,) = torch.autograd.grad(loss()(texts, images, 10.0), images)
    assert relative_error(tiled, dense) < 1e-12


@pytest.mark.parametrize('loss', [ClipLoss, SigLipLoss])
def test_towers_of_two_types(loss):
    tensors = two_towers(7, 10.0)
    pair = tensors['images'].float().requires_grad_(), tensors['texts'].requires_grad_()
    tiled = torch.autograd.grad(loss(tile_size=3)(*pair, 10.0), pair)
    dense = torch.autograd.grad(loss()(*pair, 10.0), pair)
    for actual, expected in zip(tiled, dense, strict=True):
        assert actual.dtype == expected.dtype
        assert relative_error(actual, expected) < 2 * torch.finfo(expected.dtype).eps * 10


@pytest.mark.edge('tiled_loss', 'refused', 'A gradient of the gradient')
@pytest.mark.parametrize('name', ['clip', 'siglip', 'ntxent', 'supcon with labels', 'selfcon'])
def test_a_second_derivative_is_refused(name):
    case = CASES[name]
    tensors = {
        k: v.requires_grad_(k in ('images', 'view1', 'features'))
        for k, v in case.tensors(4).items()
    }
    leaf = next(tensor for tensor in tensors.values() if tensor.requires_grad)
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    loss = case.call(case.make(3), tensors) * weight
    (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
    for of in (leaf, weight):  # neither has a part of it in silence
        with pytest.raises(RuntimeError, match='first derivative only.* use tile_size=None'):
            torch.autograd.grad(gradient.square().sum(), of, retain_graph=True)
    with pytest.raises(RuntimeError, match='first derivative only'):
        gradient.square().sum().backward()


@pytest.mark.parametrize('tile_size', [0, -1, 2.5, True, 'big'])
@pytest.mark.parametrize('loss', [ClipLoss, SigLipLoss, NTXentLoss, SupConLoss])
def test_tile_size(loss, tile_size):
    with pytest.raises(ValueError, match=r"tile_size must be None .*, 'auto' or a number of rows"):
        loss(tile_size=tile_size)


@pytest.mark.parametrize('loss', [NTXentLoss, ClipLoss, SigLipLoss, SupConLoss])
def test_tiles_under_torch_func_are_refused_by_their_setting(loss):
    z = torch.randn(6, 4)
    others = dict(
        NTXentLoss=(z,), ClipLoss=(z, torch.tensor(2.0)), SupConLoss=(torch.arange(6) % 2,)
    ).get(loss.__name__, (z, torch.tensor(2.0), torch.tensor(0.0)))
    make = (lambda z: z[:, None]) if loss is SupConLoss else (lambda z: z)
    untiled, tiled = loss(tile_size=None), loss(tile_size=2)
    assert torch.func.grad(lambda x: untiled(make(x), *others))(z).any()
    with pytest.raises(NotImplementedError, match='tile_size=2: .* set tile_size=None'):
        torch.func.grad(lambda x: tiled(make(x), *others))(z)


def test_a_size_of_tiles_is_chosen_within_a_compiled_graph():
    def rows(z):
        return z * choose_tile_size('auto', len(z), z.device, z.dtype)

    z = torch.randn(6, 4)
    compiled = torch.compile(rows, fullgraph=True, backend='eager')
    assert torch.equal(compiled(z), rows(z))
