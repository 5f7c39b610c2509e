"""SelfCon's loss against its formula, written out in loops in float64."""

import pytest
import torch

from memengine.losses.selfcon import ConLoss
from memengine.losses.supcon import SupConLoss
from memengine.testing import relative_error

from .test_supcon import embeddings, rows

TEMPERATURE, BASE = 0.2, 0.07


def mean(losses):
    return TEMPERATURE / BASE * sum(losses) / len(losses)


def positives(labels):
    return lambda b, c: float(b == c if labels is None else labels[b] == labels[c])


@pytest.mark.parametrize('outputs', [1, 2, 4])
@pytest.mark.parametrize('labels', [None, [0, 1, 0, 2, 1]])
def test_every_output_is_an_anchor(outputs, labels):
    features = embeddings(5, outputs, 6)
    anchors = [(n, b) for n in range(outputs) for b in range(5)]
    expected = mean([loss for loss, _ in rows(features, positives(labels), anchors, TEMPERATURE)])
    loss = ConLoss(TEMPERATURE)(features, None if labels is None else torch.tensor(labels))
    assert loss.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize('labels', [None, [0, 1, 0, 2, 1]])
def test_one_view_with_sub_networks_as_anchors(labels):
    features = embeddings(5, 3, 6)
    anchors = [(n, b) for n in range(2) for b in range(5)]  # not the backbone's output, the last
    expected = mean([loss for loss, _ in rows(features, positives(labels), anchors, TEMPERATURE)])
    label_tensor = None if labels is None else torch.tensor(labels)
    loss = ConLoss(TEMPERATURE)(features, label_tensor, selfcon_s_FG=True)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert loss.item() != pytest.approx(ConLoss(TEMPERATURE)(features, label_tensor).item())


@pytest.mark.parametrize('labels', [None, [0, 1, 0]])
def test_two_views_with_sub_networks_as_anchors(labels):
    batch_size, outputs = 3, 3
    features = embeddings(2 * batch_size, outputs, 6)  # cat([view 1, view 2])
    # The same rows as B samples with 2n outputs each: view 1's and view 2's of every output.
    regrouped = torch.cat([features[:batch_size], features[batch_size:]], dim=1)
    sub_networks = [n for n in range(2 * outputs) if n % outputs != outputs - 1]
    anchors = [(n, b) for n in sub_networks for b in range(batch_size)]
    expected = mean([loss for loss, _ in rows(regrouped, positives(labels), anchors, TEMPERATURE)])
    label_tensor = None if labels is None else torch.tensor(labels)
    loss = ConLoss(TEMPERATURE)(features, label_tensor, selfcon_m_FG=True)
    assert loss.item() == pytest.approx(expected, rel=1e-12)


def test_single_view_leaves_out_anchors_without_positives():
    features, labels = embeddings(5, 1, 6), [0, 1, 0, 2, 1]
    losses = rows(features, positives(labels), [(0, b) for b in range(5)], TEMPERATURE)
    expected = mean([loss for loss, has_positive in losses if has_positive])
    loss = ConLoss(TEMPERATURE)(features, torch.tensor(labels), supcon_s=True)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert loss.item() == pytest.approx(
        5 / 4 * ConLoss(TEMPERATURE)(features, torch.tensor(labels)).item(), rel=1e-12
    )


def test_single_view_without_any_positive_is_zero():
    features = embeddings(4, 1, 6).requires_grad_()
    loss = ConLoss()(features, torch.arange(4), supcon_s=True)
    loss.backward()
    assert loss.item() == 0
    assert features.grad.abs().max() == 0


def test_two_views_are_supcon():
    features, labels = embeddings(6, 2, 4), torch.tensor([0, 1, 0, 2, 1, 1])
    for mode in ('all', 'one'):
        expected = SupConLoss(TEMPERATURE, mode)(features, labels)
        assert ConLoss(TEMPERATURE, mode)(features, labels).item() == expected.item()


@pytest.mark.parametrize(
    'options', [{}, {'supcon_s': True}, {'selfcon_s_FG': True}, {'selfcon_m_FG': True}]
)
def test_gradients(options):
    features = embeddings(6, 3, 3).requires_grad_()
    labels = torch.tensor([0, 1, 0] if 'selfcon_m_FG' in options else [0, 1, 0, 2, 1, 3])
    assert torch.autograd.gradcheck(lambda f: ConLoss(0.3)(f, labels, **options), features)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_at_a_temperature_of_a_hundredth(dtype):
    low = embeddings(32, 3, 16).to(dtype).requires_grad_()
    exact = low.detach().double().requires_grad_()
    loss, expected = ConLoss(0.01)(low), ConLoss(0.01)(exact)
    loss.backward()
    expected.backward()
    assert relative_error(loss, expected) < 1e-5
    assert relative_error(low.grad, exact.grad) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ('features', 'options', 'message'),
    [
        ((4, 3, 2), {'selfcon_s_FG': True, 'selfcon_m_FG': True}, 'not both'),
        ((4, 1, 2), {'selfcon_s_FG': True}, 'one output per sample'),
        ((5, 2, 2), {'selfcon_m_FG': True}, r'\[2B, n, D\], got \(5, 2, 2\)'),
        ((4, 2), {}, r'\[B, V, D\]'),
        ((4, 2, 3), {'labels': torch.arange(2)}, r'\[4\], got \(2,\)'),
        ((4, 2, 3), {'labels': torch.arange(4), 'selfcon_m_FG': True}, r'\[2\], got \(4,\)'),
    ],
)
def test_errors(features, options, message):
    with pytest.raises(ValueError, match=message):
        ConLoss()(torch.randn(features), **options)


def test_anchors_cannot_be_chosen_twice():
    with pytest.raises(ValueError, match="needs contrast_mode='all'"):
        ConLoss(contrast_mode='one')(torch.randn(4, 2, 3), selfcon_s_FG=True)
