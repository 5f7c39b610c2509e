"""SupCon's loss against its formula, written out in loops in float64."""

import math

import pytest
import torch
from torch.nn import functional as F

from memengine.losses.supcon import SupConLoss
from memengine.memory.meter import saved_bytes
from memengine.testing import relative_error


def rows(features, positives, anchors, temperature):
    """Losses of the anchors (view, sample): the paper's L_out for one i at a time, in floats.

    ``positives(b, c)`` is the weight of sample c as a positive of sample b.
    """
    batch_size, views = features.shape[:2]
    z = features.tolist()
    losses = []
    for view, b in anchors:
        others = [(v, c) for v in range(views) for c in range(batch_size) if (v, c) != (view, b)]
        similarity = {
            (v, c): sum(x * y for x, y in zip(z[b][view], z[c][v], strict=True)) / temperature
            for v, c in others
        }
        if not others:
            losses.append((0.0, False))
            continue
        largest = max(similarity.values())
        log_sum = largest + math.log(sum(math.exp(s - largest) for s in similarity.values()))
        weight = sum(positives(b, c) for _, c in others)
        if weight == 0:
            losses.append((0.0, False))
            continue
        total = sum(positives(b, c) * (log_sum - similarity[v, c]) for v, c in others)
        losses.append((total / weight, True))
    return losses


def supcon(features, temperature=0.07, base_temperature=0.07, labels=None, mask=None, mode='all'):
    batch_size, views = features.shape[:2]

    def positives(b, c):
        if mask is not None:
            return float(mask[b][c])
        return float(b == c if labels is None else labels[b] == labels[c])

    anchors = [(v, b) for v in range(views if mode == 'all' else 1) for b in range(batch_size)]
    losses = [loss for loss, _ in rows(features, positives, anchors, temperature)]
    return temperature / base_temperature * sum(losses) / len(losses)


def embeddings(*shape, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return F.normalize(torch.randn(*shape, dtype=dtype), dim=-1)


@pytest.mark.parametrize('views', [1, 2, 3])
@pytest.mark.parametrize('mode', ['all', 'one'])
@pytest.mark.parametrize('kind', ['none', 'labels', 'mask', 'weights'])
@pytest.mark.parametrize('temperature', [0.01, 0.07, 2.0])
def test_formula(views, mode, kind, temperature):
    features = embeddings(6, views, 5)
    labels = mask = None
    if kind == 'labels':
        labels = torch.tensor([3, 1, 3, 3, 1, 7])  # 7 occurs once
    elif kind == 'mask':
        mask = torch.rand(6, 6) < 0.5  # not symmetric
    elif kind == 'weights':
        mask = torch.rand(6, 6, dtype=torch.float64)
    loss = SupConLoss(temperature, mode)(features, labels, mask)
    expected = supcon(
        features,
        temperature,
        labels=None if labels is None else labels.tolist(),
        mask=None if mask is None else mask.tolist(),
        mode=mode,
    )
    assert abs(loss.item() - expected) <= 1e-12 * max(1, abs(expected))


@pytest.mark.parametrize('tile_size', [None, 2])
def test_a_temperature_of_one_element_may_be_wider(tile_size):
    features = F.normalize(torch.randn(5, 2, 8), dim=-1)
    loss = SupConLoss(torch.tensor([0.1], dtype=torch.float64), tile_size=tile_size)(features)
    torch.testing.assert_close(loss.item(), SupConLoss(0.1)(features).item(), rtol=1e-5, atol=0)


def test_base_temperature_scales_the_loss():
    features = embeddings(5, 2, 4)
    loss = SupConLoss(0.2, base_temperature=0.05)(features)
    assert loss.item() == pytest.approx(supcon(features, 0.2, 0.05), rel=1e-12)


@pytest.mark.parametrize('mode', ['all', 'one'])
@pytest.mark.parametrize('labelled', [False, True])
def test_gradients(mode, labelled):
    features = embeddings(5, 2, 3).requires_grad_()
    labels = torch.tensor([0, 1, 0, 2, 1]) if labelled else None
    assert torch.autograd.gradcheck(lambda f: SupConLoss(0.3, mode)(f, labels), features)


def test_gradient_at_a_temperature_of_a_hundredth():
    features = embeddings(8, 2, 6).requires_grad_()
    assert torch.autograd.gradcheck(SupConLoss(0.01), features, eps=1e-8, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize('temperature', [0.01, 0.07])
def test_low_precision_input_is_summed_in_fp32(dtype, temperature):
    low = embeddings(64, 2, 32).to(dtype).requires_grad_()
    exact = low.detach().double().requires_grad_()
    labels = torch.arange(64) % 20
    with torch.autocast('cpu', dtype=torch.bfloat16):
        loss = SupConLoss(temperature)(low, labels)
    loss.backward()
    expected = SupConLoss(temperature)(exact, labels)
    expected.backward()
    assert loss.dtype == torch.float32
    assert low.grad.dtype == dtype
    assert relative_error(loss, expected) < 1e-5
    assert relative_error(low.grad, exact.grad) < (2 * torch.finfo(dtype).eps + 1e-5)


@pytest.mark.parametrize('shape', [(1, 1, 4), (1, 2, 4), (4, 1, 4)])
def test_anchors_without_positives_add_zero_and_no_nan(shape):
    features = embeddings(*shape).requires_grad_()
    loss = SupConLoss()(features, torch.arange(shape[0]))
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-12)
    assert features.grad.abs().max() <= 1e-12


def test_one_anchor_without_positives_counts_in_the_mean():
    features = embeddings(3, 1, 4)
    loss = SupConLoss()(features, torch.tensor([0, 0, 1]))
    pair = SupConLoss()(features, mask=torch.tensor([[0, 1, 0], [1, 0, 0], [0, 0, 0]]))
    assert loss.item() == pytest.approx(supcon(features, labels=[0, 0, 1]), rel=1e-12)
    assert loss.item() == pair.item() > 0


def test_more_dimensions_and_column_labels():
    features = embeddings(4, 2, 3, 2)
    labels = torch.tensor([0, 1, 0, 1])
    loss = SupConLoss()(features, labels[:, None])
    assert loss.item() == SupConLoss()(features.flatten(2), labels).item()


def test_keeps_one_matrix_of_similarities():
    def kept(batch_size):
        features = embeddings(batch_size, 2, 8, dtype=torch.float32).requires_grad_()
        return saved_bytes(lambda: SupConLoss()(features))

    matrix = 4 * (2 * 512) ** 2
    assert matrix < kept(512) < 1.05 * matrix
    assert kept(256) < 0.27 * kept(512)


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda: SupConLoss(0.0), 'temperature must be positive, got 0'),
        (lambda: SupConLoss(base_temperature=-1), 'base_temperature must be positive'),
        (lambda: SupConLoss(contrast_mode='any'), "contrast_mode must be one of .* got 'any'"),
        (lambda: SupConLoss()(torch.randn(4, 3)), r'must be \[B, V, D\].*got \(4, 3\)'),
        (lambda: SupConLoss()(torch.randn(0, 2, 3)), 'must not be empty'),
        (lambda: SupConLoss()(torch.randn(4, 2, 3), torch.arange(8)), r'\[4\], got \(8,\)'),
        (lambda: SupConLoss()(torch.randn(4, 2, 3), mask=torch.ones(8, 8)), r'\[4, 4\], got'),
        (
            lambda: SupConLoss()(torch.randn(2, 2, 3), torch.arange(2), torch.eye(2)),
            'labels or mask, not both',
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
