"""CLIP and SigLIP against their definitions; frozen towers; text towers of other libraries."""

import math
import sys

import open_clip
import pytest
import torch
from torch.nn import functional as F

from memengine.models import CLIP, OpenClipText, SigLIP, TextTransformer, TransformersText
from tests.models.toy import TEXT, VIT, B, batch, build


def unit_embeddings(model, images, samples):
    image, text = model.towers['image'], model.towers['text']
    return (
        F.normalize(image.projection(image.backbone(images)), dim=1),
        F.normalize(text.projection(text.backbone(samples['tokens'])), dim=1),
    )


def clip_definition(model, images, texts):
    logits = model.logit_scale.exp() * images @ texts.T
    own = torch.arange(B)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def siglip_definition(model, images, texts):
    logits = model.logit_scale.exp() * images @ texts.T + model.logit_bias
    signs = 2 * torch.eye(B, dtype=torch.float64) - 1
    return -torch.log(1 / (1 + torch.exp(-signs * logits))).sum() / B


@pytest.mark.parametrize(
    ('kind', 'definition'), [(CLIP, clip_definition), (SigLIP, siglip_definition)]
)
def test_loss_and_every_gradient_are_the_definitions(kind, definition):
    model, (images, samples) = build(kind), batch(kind)
    losses = model(images, samples, mode='loss')
    expected = definition(model, *unit_embeddings(model, images, samples))
    assert losses['loss'].item() == pytest.approx(expected.item(), rel=1e-10)
    parameters = dict(model.named_parameters())
    got = torch.autograd.grad(losses['loss'], parameters.values())
    want = torch.autograd.grad(expected, parameters.values())
    for name, g, w in zip(parameters, got, want, strict=True):
        assert w.norm() > 0, name
        assert (g - w).norm() <= 1e-9 * w.norm() + 1e-13, name
    assert losses['logit_scale'].item() == pytest.approx(model.logit_scale.exp().item())
    assert ('logit_bias' in losses) == (kind is SigLIP)


def test_where_scale_and_bias_start_and_how_far_the_scale_goes():
    assert build(CLIP).logit_scale.exp().item() == pytest.approx(1 / 0.07, rel=1e-6)
    model = build(SigLIP)
    assert model.logit_scale.exp().item() == pytest.approx(10, rel=1e-6)
    assert model.logit_bias.item() == -10
    with torch.no_grad():
        model.logit_scale.fill_(9.0)
    model.after_update()
    assert model.logit_scale.exp().item() == pytest.approx(100)


def test_a_frozen_tower_is_the_common_space_and_has_nothing_to_train():
    image = {**VIT, 'proj_drop_rate': 0.5}
    model, (images, samples) = (
        build(CLIP, image=image, embed_dim=None, frozen=['image']),
        batch(CLIP),
    )
    model.train()
    before = model.tower('image')(images)
    assert torch.equal(before, model.tower('image').backbone(images))  # no projection, no dropout
    assert before.shape[1] == 12
    model(images, samples, mode='loss')['loss'].backward()
    assert not any(p.requires_grad for p in model.tower('image').parameters())
    assert all(p.grad is not None for p in model.tower('text').parameters())
    assert model.logit_scale.grad is not None
    assert model.tower(None) is model


def test_prediction_is_of_length_one():
    model, (images, samples) = build(CLIP).eval(), batch(CLIP)
    image, text = unit_embeddings(model, images, samples)
    predictions = model(images, samples, mode='predict')
    assert torch.allclose(torch.stack([p['feature'] for p in predictions]), image)
    assert torch.allclose(torch.stack([p['text_feature'] for p in predictions]), text)
    without_text = model(images, dict(label=samples['label']), mode='predict')
    assert without_text[0].keys() == {'feature'}
    assert torch.allclose(model.features(images), image)


@pytest.mark.parametrize(
    ('settings', 'named'),
    [
        (dict(frozen=['img']), 'frozen must be a list'),
        (dict(frozen='image'), 'frozen must be a list'),
        (dict(frozen=['image', 'text'], embed_dim=None), 'both towers'),
        (dict(frozen=['text'], embed_dim=6), 'set embed_dim=8'),
        (dict(embed_dim=None), 'embed_dim must be at least 1'),
        (dict(init_scale=0), 'init_scale'),
        (dict(init_scale=200.0), 'max_scale'),
    ],
)
def test_bad_settings_are_named(settings, named):
    with pytest.raises(ValueError, match=named):
        build(CLIP, **settings)


def test_batches_that_do_not_fit_are_refused():
    model, (images, samples) = build(CLIP), batch(CLIP)
    with pytest.raises(ValueError, match=r"CLIP needs data_samples\['tokens'\]"):
        model(images, dict(label=samples['label']), mode='loss')
    with pytest.raises(ValueError, match='one view of each image, got 2'):
        model([images, images], samples, mode='loss')
    with pytest.raises(ValueError, match=r"SigLIP needs data_samples\['tokens'\]"):
        build(SigLIP).slices(images, None, 2)


# ------------------------------------------------------------------ text towers


def test_padding_changes_nothing():
    torch.manual_seed(0)
    tower = TextTransformer(9, context_length=6, width=8, depth=2, num_heads=2).double()
    tokens = torch.tensor([[2, 5, 3], [2, 7, 3]])
    padded = F.pad(tokens, (0, 3))
    assert torch.allclose(tower(tokens), tower(padded), atol=1e-12)
    other = padded.clone()
    other[0, 1] = 6
    changed = (tower(other) - tower(padded)).norm(dim=1)
    assert changed[0] > 1e-6 and changed[1] == 0


def test_texts_that_do_not_fit_are_refused():
    tower = TextTransformer(**{key: value for key, value in TEXT.items() if key != 'type'})
    with pytest.raises(ValueError, match=r'context_length=6, got .*\(1, 7\)'):
        tower(torch.zeros(1, 7).long())
    with pytest.raises(ValueError, match='whole numbers'):
        tower(torch.zeros(1, 6))
    with pytest.raises(ValueError, match='num_heads: must divide width=10'):
        TextTransformer(9, width=10, num_heads=4)


@pytest.mark.parametrize(
    ('kind', 'module'), [(OpenClipText, 'open_clip'), (TransformersText, 'transformers')]
)
def test_a_missing_library_is_named(kind, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f'{kind.__name__} needs {module}: pip install'):
        kind('any')


def test_open_clip_text_tower():
    torch.manual_seed(0)
    tower = OpenClipText('ViT-S-32')
    tokens = open_clip.get_tokenizer('ViT-S-32')(['a cat', 'two dogs'])
    features = tower(tokens)
    assert features.shape == (2, tower.num_features)
    features.sum().backward()
    missing = [n for n, p in tower.named_parameters() if p.requires_grad and p.grad is None]
    assert missing == []
    with pytest.raises(ValueError, match='ViT-Z'):
        OpenClipText('ViT-Z')


def test_transformers_text_tower():
    torch.manual_seed(0)
    config = dict(
        vocab_size=50,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    tower = TransformersText('bert', pretrained=False, config=config).eval()
    tokens = torch.tensor([[2, 5, 3], [2, 7, 3]])
    features = tower(tokens)
    assert features.shape == (2, tower.num_features) == (2, 8)
    assert torch.allclose(features, tower(F.pad(tokens, (0, 3))), atol=1e-6)
    features.square().sum().backward()
    missing = [n for n, p in tower.named_parameters() if p.requires_grad and p.grad is None]
    assert missing == []
    with pytest.raises(ValueError, match='no-such-model'):
        TransformersText('no-such-model', pretrained=False)


def test_scale_is_a_factor_of_similarities():
    model = build(CLIP, init_scale=2.0)
    assert model.logit_scale.item() == pytest.approx(math.log(2))
