"""CoCa: contrast and captions are their definitions, and in slices and on ranks the plain step."""

import pytest
import torch
from torch.nn import functional as F

from memengine.engine.optim import AccumulationOptimWrapper, GradCacheOptimWrapper
from memengine.engine.step import run_step
from memengine.engine.wrappers import DisCoDistributedDataParallel
from memengine.models import CaptionHead, CoCa, TimmBackbone
from memengine.testing import assert_same_step, run_ranks
from tests.engine.test_sliced import share, wrap
from tests.models.test_clip import clip_definition, unit_embeddings
from tests.models.toy import TEXT, VIT, VOCABULARY, B, batch

CAPTION = dict(
    type='CaptionHead', vocab_size=VOCABULARY, context_length=6, width=8, depth=2, num_heads=2
)


def make(**changes):
    torch.manual_seed(0)
    settings = dict(image=VIT, text=TEXT, caption=CAPTION, embed_dim=6, caption_weight=0.7)
    return CoCa(**{**settings, **changes}).double()


def data(seed=0, batch_size=B):
    """Texts of different lengths, so that those of a slice weigh what they do in the batch."""
    images, samples = batch(CoCa, None, batch_size, seed)
    samples['tokens'][::2, 2:] = 0
    return dict(inputs=images, data_samples=samples)


def caption_definition(model, images, texts):
    """Each token from those before it, one text after the other."""
    losses = []
    places = model.towers['image'].backbone.model.forward_features(images)
    for number, text in enumerate(texts):
        said = text[: int((text != 0).sum()) + 1]  # and its end, if there is room for one
        logits = model.caption.logits(places[number : number + 1], said[None, :-1])[0]
        losses.append(-F.log_softmax(logits, dim=1)[torch.arange(len(said)), said].mean())
    return sum(losses) / len(losses)


def test_losses_and_every_gradient_are_the_definitions():
    model, given = make(), data()
    images, samples = given['inputs'], given['data_samples']
    losses = model(images, samples, mode='loss')
    contrast = clip_definition(model, *unit_embeddings(model, images, samples))
    caption = 0.7 * caption_definition(model, images, samples['tokens'])
    assert losses['loss_contrastive'].item() == pytest.approx(contrast.item(), rel=1e-10)
    assert losses['loss_caption'].item() == pytest.approx(caption.item(), rel=1e-10)
    parameters = dict(model.named_parameters())
    total = losses['loss_contrastive'] + losses['loss_caption']
    got = torch.autograd.grad(total, parameters.values())
    want = torch.autograd.grad(contrast + caption, parameters.values())
    for name, g, w in zip(parameters, got, want, strict=True):
        assert w.norm() > 0, name
        assert (g - w).norm() <= 1e-9 * w.norm() + 1e-12, name


def test_a_word_is_predicted_from_those_before_it_and_from_the_image():
    head = make().caption
    image, tokens = torch.randn(2, 4, 12).double(), torch.randint(1, VOCABULARY, (2, 5))
    later, other = tokens.clone(), image.clone()
    later[:, 3] = (later[:, 3] + 1) % VOCABULARY
    other[:, 2] += 1
    logits, changed = head.logits(image, tokens), head.logits(image, later)
    assert torch.equal(logits[:, :4], changed[:, :4])
    assert not torch.allclose(logits[:, 4:], changed[:, 4:])
    assert not torch.allclose(logits[:, 0], head.logits(other, tokens)[:, 0])


def test_it_learns_to_say_what_it_sees():
    model, given = make().float(), data(batch_size=3)
    images, samples = given['inputs'].float(), given['data_samples']
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        losses = model(images, samples, mode='loss')
        (losses['loss_contrastive'] + losses['loss_caption']).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    assert torch.equal(model.captions(images), samples['tokens'])
    features = model.predict(images, samples)
    assert set(features[0]) == {'feature', 'text_feature'}


@pytest.mark.parametrize(('size', 'keep_graph'), [(1, 0), (2, 0), (2, 1), (100, 0), (2, 99)])
def test_slices_are_the_plain_step(size, keep_graph):
    expected, model = make(), make()
    plain = wrap(expected)
    sliced = wrap(model, GradCacheOptimWrapper, chunk_size=size, keep_graph=keep_graph)
    for seed in range(3):
        want = run_step(expected, data(seed), plain)
        assert_same_step(run_step(model, data(seed), sliced), want, tolerance=1e-8)
    assert_same_step(dict(model.named_parameters()), dict(expected.named_parameters()), 1e-8)


def step_of_a_rank(rank, world_size, expected):
    model = make()
    wrapped = DisCoDistributedDataParallel(model)
    wrapper = wrap(model, GradCacheOptimWrapper, chunk_size=2)
    run_step(wrapped, share(data(0, 8), rank, world_size), wrapper)
    assert_same_step(dict(model.named_parameters()), expected, 1e-8)


def test_two_ranks_in_slices_follow_one_process():
    model = make()
    run_step(model, data(0, 8), wrap(model))
    expected = {name: p.detach() for name, p in model.named_parameters()}
    run_ranks(2, step_of_a_rank, expected)


@pytest.mark.parametrize('name', ['resnet10t', 'test_vit', 'swin_tiny_patch4_window7_224'])
def test_places_are_those_that_are_pooled(name):
    torch.manual_seed(0)
    small = dict(img_size=32, window_size=2, embed_dim=12, num_heads=(1, 2, 2, 2))
    backbone = TimmBackbone(name, **(small if 'swin' in name else {})).eval()
    side = {'resnet10t': 64, 'test_vit': 160}.get(name, 32)
    images = torch.randn(2, 3, side, side)
    features, places = backbone.with_places(images)
    assert places.shape[::2] == (2, backbone.place_width)
    torch.testing.assert_close(features, backbone(images))
    if 'vit' not in name:  # it pools by its first token
        torch.testing.assert_close(places.mean(dim=1), features)


def test_what_is_refused():
    with pytest.raises(ValueError, match='caption_weight must not be negative, got -1'):
        make(caption_weight=-1)
    with pytest.raises(ValueError, match='num_heads must divide width=8'):
        CaptionHead(12, VOCABULARY, width=8, num_heads=3)
    model, given = make(caption={**CAPTION, 'context_length': 4}), data()
    with pytest.raises(ValueError, match='texts have 6 tokens, and context_length is 4'):
        model(**given, mode='loss')
    sizes = dict(image=2, text=4)
    with pytest.raises(ValueError, match=r"must be a number, got \{'image': 2"):
        run_step(make(), data(), wrap(make(), GradCacheOptimWrapper, chunk_size=sizes))
    with pytest.raises(ValueError, match='samples meet in the loss of CoCa'):
        run_step(make(), data(), wrap(make(), AccumulationOptimWrapper, micro_batch_size=2))
