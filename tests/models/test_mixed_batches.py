"""MixUp and CutMix: images and labels are mixed alike, whole batches, in training only."""

import pytest
import torch
from torch.nn import functional as F

from memengine.models import Classifier, MixedBatches
from memengine.testing import assert_same_step
from tests.models.toy import CLASSES, batch, build


def flat_batch():
    """Images that show nothing but their label."""
    labels = torch.tensor([0, 1, 2, 2, 0])
    images = labels.double()[:, None, None, None].expand(5, 1, 8, 8).clone()
    return dict(inputs=images, data_samples=dict(label=labels, index=torch.arange(5)))


@pytest.mark.parametrize('kind', ['mixup', 'cutmix'])
def test_the_weights_are_the_shares_of_the_pixels(kind):
    other = {'mixup': 'cutmix', 'cutmix': 'mixup'}[kind]
    mixing = MixedBatches(3, **{f'{other}_alpha': 0.0})
    torch.manual_seed(0)
    mixed = 0
    for _ in range(5):
        out = mixing(flat_batch(), training=True)
        weights, images = out['data_samples']['label_weights'], out['inputs']
        assert weights.shape == (5, 3) and weights.dtype == images.dtype
        assert torch.allclose(weights.sum(dim=1), torch.ones(5).double())
        shown = weights @ torch.arange(3.0).double()  # the label that pixels show on average
        assert torch.allclose(images.mean(dim=(1, 2, 3)), shown, atol=1e-6)
        mixed += int((weights.max(dim=1).values < 0.999).any())
    assert mixed >= 3


def test_both_come_in_turn():
    mixing = MixedBatches(3)
    torch.manual_seed(0)
    whole = [len(mixing(flat_batch(), training=True)['inputs'].frac().unique()) for _ in range(12)]
    assert min(whole) == 1 < max(whole)  # CutMix leaves the values that there are


@pytest.mark.parametrize('kind', ['mixup', 'cutmix'])
def test_neighbours_are_mixed_with_others_than_themselves(kind):
    """Repeated augmentation on one rank: an image's three augmentations lie side by side."""
    other = {'mixup': 'cutmix', 'cutmix': 'mixup'}[kind]
    mixing = MixedBatches(20, **{f'{other}_alpha': 0.0})
    labels = torch.arange(20).repeat_interleave(3)
    images = labels.double()[:, None, None, None].expand(60, 1, 8, 8)
    torch.manual_seed(0)
    alone = mixed = 0
    for _ in range(10):
        out = mixing(dict(inputs=images, data_samples=dict(label=labels)), training=True)
        weights = out['data_samples']['label_weights']
        own = weights[torch.arange(60), labels]
        if own.min() > 0.999:  # next to nothing was drawn
            continue
        mixed += 60
        alone += int((own > 0.999).sum())
        shown = weights @ torch.arange(20.0).double()
        assert torch.allclose(out['inputs'].mean(dim=(1, 2, 3)), shown, atol=1e-6)
    assert mixed and alone / mixed < 0.15  # of 59 others two are the same image


def test_evaluation_is_left_alone():
    out = MixedBatches(3)(flat_batch(), training=False)
    assert torch.equal(out['inputs'], flat_batch()['inputs'])
    assert 'label_weights' not in out['data_samples']


def test_the_classifier_learns_the_weights():
    model, (images, samples) = build(Classifier, label_smoothing=0.2), batch(Classifier)
    weights = torch.rand(len(images), CLASSES, dtype=torch.float64)
    weights /= weights.sum(dim=1, keepdim=True)
    samples['label_weights'] = weights
    losses = model(images, samples, mode='loss')
    logits = model(images)
    smooth = 0.8 * weights + 0.2 / CLASSES
    expected = -(smooth * F.log_softmax(logits, dim=1)).sum(dim=1).mean()
    assert losses['loss'].item() == pytest.approx(expected.item(), rel=1e-12)
    right = (logits.argmax(dim=1) == weights.argmax(dim=1)).double().mean().item()
    assert losses['train_top1'].item() == pytest.approx(100 * right)
    targets = model.targets(images, samples)
    parts = [
        model.slice_loss(model(piece.inputs), targets, piece)
        for piece in model.slices(images, samples, 2)
    ]
    sums = {name: sum(part[name] for part in parts) for name in parts[0]}
    assert_same_step(sums, losses)
    samples['label_weights'] = weights[:, :2]
    with pytest.raises(ValueError, match='label_weights are of 2 classes'):
        model(images, samples, mode='loss')


def test_what_does_not_fit_is_refused():
    for alphas in ((0.0, 0.0), (-1.0, 1.0)):
        with pytest.raises(ValueError, match='mixup_alpha and cutmix_alpha'):
            MixedBatches(3, *alphas)
    with pytest.raises(ValueError, match=r'labels must lie in 0\.\.1 .* got 0\.\.2'):
        MixedBatches(2)(flat_batch(), training=True)
