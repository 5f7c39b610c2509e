"""SigLIP's loss against its formula, written out in loops in float64."""

import math

import pytest
import torch

from memengine.losses.siglip import SigLipLoss
from memengine.testing import relative_error

from .test_clip import pairs


def softplus(x):
    """log(1 + exp(x)), exact in both tails."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def formula(images, texts, scale, bias):
    size = len(images)
    total = 0.0
    for i in range(size):
        for j in range(size):
            logit = scale * float(images[i] @ texts[j]) + bias
            total += softplus(-logit if i == j else logit)
    return total / size


@pytest.mark.parametrize('scale', [1.0, 10.0, 100.0])
@pytest.mark.parametrize('bias', [None, -10.0, 5.0])
@pytest.mark.parametrize('batch_size', [1, 6])
def test_formula(scale, bias, batch_size):
    images, texts = pairs(batch_size)
    expected = formula(images, texts, scale, bias or 0.0)
    assert SigLipLoss()(images, texts, scale, bias).item() == pytest.approx(expected, rel=1e-12)


def test_a_confident_pair_keeps_its_tiny_loss():
    unit = torch.eye(1, 4, dtype=torch.float64)
    assert SigLipLoss()(unit, unit, 100.0).item() == pytest.approx(math.exp(-100), rel=1e-12)


def test_gradients_of_features_scale_and_bias():
    images, texts = pairs(4, 3)
    scalars = (torch.tensor(5.0, dtype=torch.float64), torch.tensor(-2.0, dtype=torch.float64))
    inputs = tuple(tensor.requires_grad_() for tensor in (images, texts, *scalars))
    assert torch.autograd.gradcheck(SigLipLoss(), inputs)


def test_gradient_does_not_vanish_where_it_should_not():
    """A far negative taken for a pair has a slope of 1 / B, however large its logit."""
    images, texts = torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64).flip(0)
    bias = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    SigLipLoss()(images, texts, 1000.0, bias).backward()
    # Two negatives with logit 1000 (slope 1 each), two pairs with logit 0 (slope -1/2 each).
    assert bias.grad.item() == pytest.approx((2 * 1 - 2 * 0.5) / 2, rel=1e-12)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_at_a_scale_of_a_hundred(dtype):
    low = [tensor.to(dtype).requires_grad_() for tensor in pairs(64, 32)]
    exact = [tensor.detach().double().requires_grad_() for tensor in low]
    with torch.autocast('cpu', dtype=torch.bfloat16):
        loss = SigLipLoss()(*low, 100.0, -10.0)
    loss.backward()
    expected = SigLipLoss()(*exact, 100.0, -10.0)
    expected.backward()
    assert loss.dtype == torch.float32
    assert relative_error(loss, expected) < 1e-5
    assert relative_error(low[0].grad, exact[0].grad) < 2 * torch.finfo(dtype).eps


def test_output_dict():
    images, texts = pairs()
    losses = SigLipLoss()(images, texts, 10.0, -10.0, output_dict=True)
    assert losses == {'contrastive_loss': SigLipLoss()(images, texts, 10.0, -10.0)}


def test_shapes():
    with pytest.raises(ValueError, match=r'SigLipLoss: expected .* got \(4, 3\) and \(5, 3\)'):
        SigLipLoss()(torch.randn(4, 3), torch.randn(5, 3), 1.0)
