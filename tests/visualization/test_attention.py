"""Attention maps against what timm itself computes with fused attention off."""

import sys

import matplotlib
import pytest
import timm
import torch
from PIL import Image
from torch import nn

from memengine.visualization.attention import (
    NoAttentionError,
    attention_maps,
    save_attention_figure,
)


def softmax_of_last_block(model, images):
    """The attention matrix [B, heads, N, N], as the dropout behind the softmax is given it."""
    attn = model.blocks[-1].attn
    seen = []
    fused, attn.fused_attn = attn.fused_attn, False
    handle = attn.attn_drop.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    training = model.training
    with torch.no_grad():
        model.eval()(images)
    model.train(training)
    handle.remove()
    attn.fused_attn = fused
    return seen[-1]


def make(name='vit_tiny_patch16_224', **options):
    torch.manual_seed(0)
    model = timm.create_model(name, **{'num_classes': 0, 'depth': 2, **options})
    with torch.no_grad():
        for p in model.parameters():  # far from uniform attention
            p.add_(torch.randn_like(p) * 0.1)
    return model


CASES = {
    'class token': dict(img_size=64),
    'no class token': dict(img_size=64, class_token=False, global_pool='avg'),
    'class token, average pooling': dict(img_size=64, global_pool='avg'),
    'registers': dict(img_size=64, reg_tokens=4),
    'q and k normalised': dict(img_size=64, qk_norm=True),
    'distillation token': dict(name='deit_tiny_distilled_patch16_224', img_size=64),
    'relative positions as a mask': dict(name='beit_base_patch16_224', img_size=64),
    'rotary positions': dict(name='eva02_tiny_patch14_224', img_size=56),
}


@pytest.mark.parametrize('fused', [True, False])
@pytest.mark.parametrize('case', CASES)
def test_maps_are_those_of_timm(case, fused):
    model = make(**CASES[case])
    images = torch.randn(2, 3, 64, 64) if 'rotary' not in case else torch.randn(2, 3, 56, 56)
    full = softmax_of_last_block(model, images)
    for block in model.blocks:
        block.attn.fused_attn = fused
    prefix = model.num_prefix_tokens
    rows = full[:, :, :1] if model.global_pool == 'token' else full[:, :, prefix:]
    expected = rows.mean(2)[..., prefix:].unflatten(-1, (4, 4))
    maps = attention_maps(model, images)
    assert maps.shape == (2, full.shape[1], 4, 4)
    torch.testing.assert_close(maps, expected, rtol=1e-4, atol=1e-6)
    assert maps.flatten(2).std(-1).min() > 1e-3  # not uniform, or the test says nothing


def test_which_query_is_taken():
    pooled = dict(CASES['class token, average pooling'])
    assert make(**pooled).num_prefix_tokens == 1
    images = torch.randn(1, 3, 64, 64)
    by_token = attention_maps(make(**CASES['class token']), images)
    by_patches = attention_maps(make(**pooled), images)
    assert (by_token - by_patches).abs().max() > 1e-2


def test_image_sizes_and_oblong_grids():
    model = make(img_size=64, dynamic_img_size=True)
    images = torch.randn(2, 3, 48, 96)
    expected = softmax_of_last_block(model, images)[:, :, 0, 1:].unflatten(-1, (3, 6))
    maps = attention_maps(model, images)
    torch.testing.assert_close(maps, expected, rtol=1e-4, atol=1e-6)


def test_images_that_are_padded_to_whole_patches():
    model = make(img_size=64, dynamic_img_size=True, dynamic_img_pad=True)
    assert attention_maps(model, torch.randn(1, 3, 50, 70)).shape == (1, 3, 4, 5)


def test_a_bright_patch_that_draws_attention_is_found():
    """q of the class token is constant, k is the patch's brightness."""
    model = make(img_size=64, depth=1, class_token=True)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.patch_embed.proj.weight[0] = 1 / 256  # feature 0: mean brightness
        model.blocks[0].norm1 = nn.Identity()
        qkv = model.blocks[0].attn.qkv
        qkv.bias[:64] = 1.0  # q of head 0
        qkv.weight[192, 0] = 50.0  # k of head 0 from feature 0
    images = torch.zeros(1, 3, 64, 64)
    images[..., 16:32, 32:48] = 1.0
    first = attention_maps(model, images)[0, 0]
    assert first.argmax() == 1 * 4 + 2
    assert first.max() > 0.99


def test_the_model_is_left_as_it_was():
    model = make(img_size=64, drop_path_rate=0.5)
    model.train()
    model.blocks[0].eval()
    modes = [m.training for m in model.modules()]
    images = torch.randn(2, 3, 64, 64)
    first, second = attention_maps(model, images), attention_maps(model, images)
    assert torch.equal(first, second)  # no drop path
    assert not first.requires_grad
    assert [m.training for m in model.modules()] == modes
    assert not model.blocks[-1]._forward_hooks and not model.blocks[-1]._forward_pre_hooks
    assert all(p.grad is None for p in model.parameters())


def test_an_error_leaves_no_hooks():
    model = make(img_size=64)
    with pytest.raises(AssertionError):  # timm's own: wrong image size
        attention_maps(model, torch.randn(1, 3, 80, 80))
    assert not model.blocks[-1]._forward_hooks


@pytest.mark.parametrize(
    ('name', 'options', 'message'),
    [
        ('resnet18', {}, 'ResNet has no blocks'),
        (
            'samvit_base_patch16',
            dict(img_size=256, depth=1, window_size=8, global_attn_indexes=()),
            'last block of VisionTransformerSAM does not attend over all patches',
        ),
    ],
)
def test_models_without_attention_over_patches(name, options, message):
    model = timm.create_model(name, num_classes=0, **options)
    side = options.get('img_size', 224)
    with pytest.raises(NoAttentionError, match=f'attention_maps.*{message}'):
        attention_maps(model, torch.randn(1, 3, side, side))


def test_a_last_block_without_attention():
    model = make(img_size=64)
    model.blocks[-1] = nn.Identity()
    with pytest.raises(NoAttentionError, match='last block of VisionTransformer does not attend'):
        attention_maps(model, torch.randn(1, 3, 64, 64))


@pytest.mark.parametrize('channels', [1, 3])
def test_figure(tmp_path, channels):
    """One row per image: image, mean, heads; it is the map that is drawn."""
    images = torch.randn(2, channels, 32, 32) * 5 + 7
    maps = torch.zeros(2, 3, 4, 4)
    maps[0, :, 0, 0] = 1.0
    path = tmp_path / 'new' / 'attention.png'
    save_attention_figure(images, maps, path)
    with Image.open(path) as picture:
        assert picture.format == 'PNG'
        width, height = picture.size
        assert width == pytest.approx(1.3 * 5 * 150, abs=2)
        assert height == pytest.approx(1.3 * 2 * 150, abs=2)
        pixels = torch.frombuffer(bytearray(picture.convert('RGB').tobytes()), dtype=torch.uint8)
    off = pixels.view(height, width, 3).int() - torch.tensor([253, 231, 37])  # viridis's end
    bright = off.abs().amax(-1) < 4
    columns = bright.any(0).nonzero().flatten()
    assert bright.any(1).nonzero().max() < height / 2  # in the first row only
    assert columns.min() > width / 5 and columns.max() > width * 4 / 5  # in all maps, not the image
    assert list(path.parent.iterdir()) == [path]


def test_drawing_leaves_matplotlib_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib.pyplot', None)  # importing it fails
    monkeypatch.delattr(matplotlib, 'pyplot', raising=False)
    before = matplotlib.rcParams._get_backend_or_none()
    path = tmp_path / 'a.png'
    save_attention_figure(torch.randn(1, 3, 8, 8), torch.rand(1, 2, 2, 2), str(path))
    assert matplotlib.rcParams._get_backend_or_none() == before
    assert path.exists()
