"""NT-Xent against SimCLR's equation 1, written out in loops in float64."""

import math

import pytest
import torch
from torch.nn import functional as F

from memengine.losses.ntxent import NTXentLoss
from memengine.losses.supcon import SupConLoss
from memengine.testing import relative_error


def formula(view1, view2, temperature):
    z = [*view1, *view2]
    batch_size = len(view1)
    total = 0.0
    for i in range(2 * batch_size):
        similarity = [
            F.cosine_similarity(z[i], z[k], dim=0).item() / temperature
            for k in range(2 * batch_size)
        ]
        others = [s for k, s in enumerate(similarity) if k != i]
        largest = max(others)
        log_sum = largest + math.log(sum(math.exp(s - largest) for s in others))
        total += log_sum - similarity[(i + batch_size) % (2 * batch_size)]
    return total / (2 * batch_size)


def views(batch_size=6, dim=5, dtype=torch.float64):
    torch.manual_seed(0)
    return torch.randn(batch_size, dim, dtype=dtype), torch.randn(batch_size, dim, dtype=dtype)


@pytest.mark.parametrize('temperature', [0.01, 0.5, 3.0])
def test_formula(temperature):
    view1, view2 = views()
    expected = formula(view1, view2, temperature)
    assert NTXentLoss(temperature)(view1, view2).item() == pytest.approx(expected, rel=1e-12)


def test_is_supcon_without_labels():
    first, second = (F.normalize(view, dim=1) for view in views())
    expected = SupConLoss(0.1, base_temperature=0.1)(torch.stack([first, second], dim=1))
    assert NTXentLoss(0.1)(first, second).item() == pytest.approx(expected.item(), rel=1e-12)


def test_gradients():
    inputs = tuple(view.requires_grad_() for view in views(4, 3))
    assert torch.autograd.gradcheck(NTXentLoss(0.2), inputs)


def test_one_pair_has_nothing_to_learn():
    view1, view2 = (view.requires_grad_() for view in views(1))
    loss = NTXentLoss()(view1, view2)
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-12)
    assert view1.grad.abs().max() < 1e-12


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    low = [view.to(dtype).requires_grad_() for view in views(64, 32)]
    exact = [view.detach().double().requires_grad_() for view in low]
    with torch.autocast('cpu', dtype=torch.bfloat16):
        loss = NTXentLoss(0.01, precision='fp32')(*low)
    expected = NTXentLoss(0.01)(*exact)
    loss.backward()
    expected.backward()
    assert loss.dtype == torch.float32
    assert relative_error(loss, expected) < 1e-5
    assert relative_error(low[0].grad, exact[0].grad) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize('shapes', [((4, 3), (5, 3)), ((4, 3, 1), (4, 3, 1)), ((0, 3), (0, 3))])
def test_shapes(shapes):
    with pytest.raises(ValueError, match=r'two views \[B, D\]'):
        NTXentLoss()(torch.randn(shapes[0]), torch.randn(shapes[1]))


def test_temperature():
    with pytest.raises(ValueError, match='temperature must be positive, got -1'):
        NTXentLoss(-1)
