"""Image encoders of torchvision, transformers and open_clip."""

import json

import pytest
import torch

from memengine.registry import MODELS


def build(kind, **config):
    return MODELS.build(dict(type=kind, _scope_='memengine', **config))


@pytest.mark.parametrize(
    ('name', 'width', 'arguments'),
    [
        ('resnet18', 512, {}),
        ('mobilenet_v3_small', 1024, {}),
        ('shufflenet_v2_x0_5', 1024, {}),
        ('googlenet', 1024, dict(aux_logits=False, init_weights=False)),
    ],
)
def test_torchvision_without_its_classifier(name, width, arguments):
    backbone = build('TorchvisionBackbone', model_name=name, **arguments).eval()
    assert backbone.num_features == width
    assert backbone(torch.zeros(2, 3, 32, 32)).shape == (2, width)


def test_torchvisions_own_file_is_read_with_and_without_classifier(tmp_path):
    from torchvision.models import resnet18

    network = resnet18().eval()
    images = torch.randn(2, 3, 32, 32)
    path = tmp_path / 'resnet18.pth'
    for dropped in ((), ('fc.weight', 'fc.bias')):
        state = {key: v for key, v in network.state_dict().items() if key not in dropped}
        torch.save(state, path)
        backbone = build('TorchvisionBackbone', model_name='resnet18', checkpoint_path=str(path))
        features = backbone.eval()(images)
        assert torch.equal(network.fc(features), network(images))
    del state['conv1.weight']
    torch.save(state, path)
    with pytest.raises(ValueError, match='does not fit: .*conv1.weight'):
        build('TorchvisionBackbone', model_name='resnet18', checkpoint_path=str(path))


def test_what_torchvision_does_not_have_is_said():
    with pytest.raises(ValueError, match="no classifier 'resnet19'; did you mean"):
        build('TorchvisionBackbone', model_name='resnet19')
    with pytest.raises(ValueError, match='does not end in a linear layer'):
        build('TorchvisionBackbone', model_name='squeezenet1_0')
    with pytest.raises(ValueError, match='inception_v3 trains .*; set aux_logits=False'):
        build('TorchvisionBackbone', model_name='inception_v3', init_weights=False)


SMALL = dict(
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    image_size=16,
    patch_size=8,
)


@pytest.mark.parametrize(('pool', 'tokens'), [('token', [0]), ('mean', [0, 1, 2, 3, 4])])
def test_transformers_features_are_of_the_last_layers_tokens(pool, tokens):
    pytest.importorskip('transformers', reason='transformers is not installed')
    config = dict(model_name='vit', pretrained=False, config=SMALL, pool=pool)
    backbone = build('TransformersImage', **config).eval()
    images = torch.randn(2, 3, 16, 16)
    hidden = backbone.model(pixel_values=images).last_hidden_state
    torch.testing.assert_close(backbone(images), hidden[:, tokens].mean(1))
    assert backbone.num_features == 16
    backbone.train()(images).sum().backward()
    unused = [name for name, p in backbone.named_parameters() if p.grad is None]
    assert not [name for name in unused if 'mask_token' not in name], 'DDP awaits a gradient'


def test_a_network_of_transformers_that_gives_maps_is_refused():
    pytest.importorskip('transformers', reason='transformers is not installed')
    small = dict(hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1])
    with pytest.raises(ValueError, match=r"'convnext' \(ConvNextModel\) has no hidden_size.*TimmB"):
        build('TransformersImage', model_name='convnext', pretrained=False, config=small)


@pytest.fixture
def tiny_clip(tmp_path):
    """Name of a small model in open_clip."""
    open_clip = pytest.importorskip('open_clip', reason='open_clip is not installed')
    vision = dict(image_size=16, layers=1, width=64, patch_size=8, head_width=32)
    text = dict(context_length=8, vocab_size=49408, width=32, heads=2, layers=1)
    path = tmp_path / 'memengine-tiny.json'
    path.write_text(json.dumps(dict(embed_dim=24, vision_cfg=vision, text_cfg=text)))
    open_clip.add_model_config(path)
    return path.stem


def test_open_clips_image_tower(tiny_clip):
    import open_clip

    torch.manual_seed(0)
    backbone = build('OpenClipImage', model_name=tiny_clip).eval()
    torch.manual_seed(0)
    whole = open_clip.create_model(tiny_clip).eval()
    images = torch.randn(2, 3, 16, 16)
    assert backbone.num_features == 24 and backbone.model.training is False
    assert torch.equal(backbone(images), whole.encode_image(images))
    with pytest.raises(ValueError, match='OpenClipImage'):
        build('OpenClipImage', model_name='RN5000')


class Maps(torch.nn.Module):
    """A backbone as mmpretrain has them: a tuple of feature maps."""

    def forward(self, images):
        return images, images[:, :2]


def test_the_last_of_the_feature_maps_is_averaged():
    images = torch.randn(3, 3, 4, 4)
    pooled = build('PooledBackbone', backbone=dict(type=Maps), num_features=2)
    torch.testing.assert_close(pooled(images), images[:, :2].mean((2, 3)))
    wrong = build('PooledBackbone', backbone=dict(type=Maps), num_features=3)
    with pytest.raises(ValueError, match=r'num_features=3, but Maps gives .*\(3, 2, 4, 4\)'):
        wrong(images)
