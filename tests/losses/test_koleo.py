"""KoLeo against its definition, where rows are equal, and over ranks."""

import math

import pytest
import torch

from memengine.losses import KoLeoLoss, koleo_loss
from memengine.models import DINO
from memengine.testing import assert_same_step, relative_error, run_ranks


def features(rows=9, width=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, dtype=torch.float64, generator=generator)


def definition(x):
    """Pair by pair, as the paper writes it."""
    z = [row / row.square().sum().sqrt() for row in x]
    nearest = [
        torch.stack([(a - b).square().sum().sqrt() for b in z if b is not a]).min() for a in z
    ]
    return -sum(torch.log(distance) for distance in nearest) / len(nearest)


@pytest.mark.parametrize('rows', [2, 3, 9, 40])
def test_value_and_gradient_are_the_definitions(rows):
    x, expected = (features(rows).requires_grad_() for _ in range(2))
    loss, want = koleo_loss(x), definition(expected)
    loss.backward()
    want.backward()
    assert relative_error(loss, want) < 1e-6  # of eps
    assert relative_error(koleo_loss(x, eps=0.0), want) < 1e-12
    assert relative_error(x.grad, expected.grad) < 1e-6


def test_the_gradient_is_the_values():
    assert torch.autograd.gradcheck(koleo_loss, features().requires_grad_())


def test_the_module_is_the_function():
    x = features()
    assert torch.equal(KoLeoLoss()(x), koleo_loss(x))
    assert torch.equal(KoLeoLoss(eps=0.1)(x), koleo_loss(x, eps=0.1))


def test_equal_rows_have_a_finite_loss_and_no_gradient_of_their_own():
    x = features()
    x[3] = x[1]
    x.requires_grad_()
    loss = koleo_loss(x)
    loss.backward()
    assert loss > 2 * -math.log(1e-8) / 9 - 1
    assert torch.isfinite(loss) and torch.isfinite(x.grad).all()
    same = torch.ones(4, 3, requires_grad=True)
    koleo_loss(same).backward()
    assert torch.equal(same.grad, torch.zeros(4, 3))


def test_half_precision_is_computed_with_in_fp32():
    x = features().float()
    with torch.autocast('cpu', torch.bfloat16):
        assert koleo_loss(x.bfloat16()).dtype == torch.float32
        assert torch.equal(koleo_loss(x), koleo_loss(x.clone()))
    assert relative_error(koleo_loss(x), koleo_loss(x.double())) < 1e-5


def test_what_cannot_be_is_refused():
    for wrong in (torch.ones(3), torch.ones(0, 4), torch.ones(2, 3, 4)):
        with pytest.raises(ValueError, match=r'expected features \[B, D\]'):
            koleo_loss(wrong)
        with pytest.raises(ValueError, match=r'expected features \[B, D\]'):
            KoLeoLoss()(wrong)
    with pytest.raises(ValueError, match='no neighbour'):
        koleo_loss(torch.ones(1, 4))
    with pytest.raises(ValueError, match='eps must be positive'):
        KoLeoLoss(eps=0.0)
    with pytest.raises(ValueError, match='koleo_weight must not be negative'):
        DINO(backbone={}, head={}, koleo_weight=-0.1)


def _rank(rank, world_size, shares):
    start = sum(shares[:rank])
    x = features()[start : start + shares[rank]].clone().requires_grad_()
    loss = KoLeoLoss()
    loss.process_group = torch.distributed.group.WORLD
    value = loss(x)
    value.backward()
    return value.detach(), x.grad / world_size


@pytest.mark.parametrize('shares', [(5, 4), (1, 8)])
def test_ranks_follow_one_process(shares):
    whole = features().requires_grad_()
    want = koleo_loss(whole)
    want.backward()
    results = run_ranks(2, _rank, shares)
    for value, _ in results:
        assert relative_error(value, want) < 1e-12
    gradient = torch.cat([part for _, part in results])
    assert_same_step({'gradient': gradient}, {'gradient': whole.grad})
    with pytest.raises(AssertionError, match='gradient'):
        assert_same_step({'gradient': 2 * gradient}, {'gradient': whole.grad})
