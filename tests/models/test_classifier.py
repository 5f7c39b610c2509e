"""Supervised classification against torch's own cross-entropy."""

import pytest
import torch
from torch.nn import functional as F

from memengine.models import Classifier
from tests.models.toy import CLASSES, VIT, batch, build


def test_loss_is_the_mean_cross_entropy():
    model, (images, samples) = build(Classifier, label_smoothing=0.2), batch(Classifier)
    losses = model(images, samples, mode='loss')
    logits = model.head(model.backbone(images))
    expected = F.cross_entropy(logits, samples['label'], label_smoothing=0.2)
    assert losses['loss'].item() == pytest.approx(expected.item(), rel=1e-12)
    right = (logits.argmax(1) == samples['label']).double().mean().item()
    assert losses['train_top1'].item() == pytest.approx(100 * right)


def test_prediction_holds_features_and_logits():
    model = build(Classifier).eval()
    images, _ = batch(Classifier)
    predictions = model(images, mode='predict')
    logits = torch.stack([p['logits'] for p in predictions])
    assert torch.equal(logits, model(images))
    assert logits.shape == (len(images), CLASSES)
    assert torch.equal(torch.stack([p['feature'] for p in predictions]), model.backbone(images))


def test_linear_probe_trains_the_linear_layer_only():
    model = build(Classifier, backbone={**VIT, 'proj_drop_rate': 0.5}, freeze_backbone=True).train()
    images, samples = batch(Classifier)
    assert torch.equal(model(images), model(images))  # no dropout
    model(images, samples, mode='loss')['loss'].backward()
    trained = [name for name, p in model.named_parameters() if p.grad is not None]
    assert trained == ['head.weight', 'head.bias']


def test_what_does_not_fit_is_refused():
    model, (images, samples) = build(Classifier), batch(Classifier)
    with pytest.raises(ValueError, match=r'labels must lie in 0\.\.2 .*, got 0\.\.3'):
        model(images, dict(label=torch.tensor([0, 1, 2, 3, 0])), mode='loss')
    with pytest.raises(ValueError, match='one view of each image, got 2 views'):
        model([images, images], samples, mode='loss')
    for mode in ('loss', 'predict'):  # as without a collate_fn
        with pytest.raises(ValueError, match=r'list of its 5 images; set collate_fn=.*stack_views'):
            model(list(images), samples, mode=mode)
    with pytest.raises(ValueError, match=r"needs data_samples\['label'\]"):
        model(images, None, mode='loss')
    with pytest.raises(ValueError, match='num_classes'):
        build(Classifier, num_classes=0)
    with pytest.raises(ValueError, match='label_smoothing'):
        build(Classifier, label_smoothing=1.5)
