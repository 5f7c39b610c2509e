"""CLIP's loss against its formula, written out in loops in float64."""

import math

import pytest
import torch
from torch.nn import functional as F

from memengine.losses.clip import ClipLoss
from memengine.memory.meter import saved_bytes
from memengine.testing import relative_error


def pairs(batch_size=6, dim=5, dtype=torch.float64):
    torch.manual_seed(0)
    return tuple(F.normalize(torch.randn(batch_size, dim), dim=1).to(dtype) for _ in range(2))


def cross_entropy(logits, true):
    largest = max(logits)
    return largest + math.log(sum(math.exp(value - largest) for value in logits)) - logits[true]


def formula(images, texts, scale):
    size = len(images)
    logits = [[scale * float(images[i] @ texts[j]) for j in range(size)] for i in range(size)]
    rows = sum(cross_entropy(logits[i], i) for i in range(size)) / size
    columns = sum(cross_entropy([row[j] for row in logits], j) for j in range(size)) / size
    return (rows + columns) / 2


@pytest.mark.parametrize('scale', [1.0, 14.3, 100.0])
@pytest.mark.parametrize('batch_size', [1, 2, 6])
def test_formula(scale, batch_size):
    images, texts = pairs(batch_size)
    expected = formula(images, texts, scale)
    assert ClipLoss()(images, texts, scale).item() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    learned = ClipLoss()(images, texts, torch.tensor(scale, dtype=torch.float64))
    assert learned.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_gradients_of_features_and_scale():
    images, texts = pairs(4, 3)
    scale = torch.tensor(5.0, dtype=torch.float64)
    inputs = tuple(tensor.requires_grad_() for tensor in (images, texts, scale))
    assert torch.autograd.gradcheck(ClipLoss(), inputs)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_at_a_scale_of_a_hundred(dtype):
    low = [tensor.to(dtype).requires_grad_() for tensor in pairs(64, 32)]
    exact = [tensor.detach().double().requires_grad_() for tensor in low]
    scale = torch.tensor(100.0, requires_grad=True)
    exact_scale = torch.tensor(100.0, dtype=torch.float64, requires_grad=True)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        loss = ClipLoss()(*low, scale)
    loss.backward()
    expected = ClipLoss()(*exact, exact_scale)
    expected.backward()
    assert loss.dtype == torch.float32
    assert relative_error(loss, expected) < 1e-5
    assert relative_error(low[0].grad, exact[0].grad) < 2 * torch.finfo(dtype).eps
    assert relative_error(low[1].grad, exact[1].grad) < 2 * torch.finfo(dtype).eps
    assert relative_error(scale.grad, exact_scale.grad) < 1e-4


def test_keeps_one_matrix_of_similarities():
    images, texts = (tensor.requires_grad_() for tensor in pairs(1024, 8, torch.float32))
    matrix = 4 * 1024**2
    assert matrix < saved_bytes(lambda: ClipLoss()(images, texts, 10.0)) < 1.05 * matrix


def test_output_dict():
    images, texts = pairs()
    losses = ClipLoss()(images, texts, 10.0, output_dict=True)
    assert losses == {'contrastive_loss': ClipLoss()(images, texts, 10.0)}


@pytest.mark.parametrize(
    'shapes', [((4, 3), (5, 3)), ((4, 3), (4, 2)), ((4,), (4,)), ((0, 3), (0, 3))]
)
def test_shapes(shapes):
    with pytest.raises(ValueError, match=r'ClipLoss: expected .* \[B, D\] of the same pairs'):
        ClipLoss()(torch.randn(shapes[0]), torch.randn(shapes[1]), 1.0)


def test_takes_the_bias_that_models_of_open_clip_hand_over():
    images, texts = F.normalize(torch.randn(2, 6, 4), dim=-1)
    bias = torch.tensor(-10.0, requires_grad=True)
    expected = ClipLoss()(images, texts, 10.0)
    for tile_size in (None, 4):
        loss = ClipLoss(tile_size=tile_size)(images, texts, 10.0, bias, True)['contrastive_loss']
        assert torch.allclose(loss, expected)
        assert torch.autograd.grad(loss, bias) == (0,)
