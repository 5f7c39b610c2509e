"""Which modules a setting means."""

import pytest
import timm
import torchvision
from torch import nn

from memengine.techniques.modules.blocks import find_blocks, select_modules
from memengine.techniques.sharding.materializing import on_meta

FOUND = {
    'vit_tiny_patch16_224': {'Block': 12},
    'swin_tiny_patch4_window7_224': {'SwinTransformerBlock': 12},
    'convnext_tiny': {'ConvNeXtBlock': 18},
    'resnet50': {'Bottleneck': 16},
    'regnety_002': {'Bottleneck': 13},
    'darknet53': {'DarkBlock': 23},
    'dla34': {'DlaBasic': 12},
    'davit_tiny': {'SpatialBlock': 6, 'ChannelBlock': 6},
    'densenet121': {'DenseLayer': 58},
}
FOUND_TORCHVISION = {
    'vit_b_16': {'EncoderBlock': 12},
    'swin_t': {'SwinTransformerBlock': 12},
    'resnet18': {'BasicBlock': 8},
    'convnext_tiny': {'CNBlock': 18},
    'efficientnet_b0': {'MBConv': 16},
    'mobilenet_v2': {'InvertedResidual': 17},
}


def count(blocks):
    kinds = [type(block).__name__ for block in blocks.values()]
    return {kind: kinds.count(kind) for kind in kinds}


@pytest.mark.parametrize('name', FOUND)
def test_blocks_of_timm(name):
    with on_meta():
        model = timm.create_model(name)
    assert count(find_blocks(model)) == FOUND[name]


@pytest.mark.parametrize('name', FOUND_TORCHVISION)
def test_blocks_of_torchvision(name):
    with on_meta():
        model = torchvision.models.get_model(name)
    assert count(find_blocks(model)) == FOUND_TORCHVISION[name]


def test_blocks_of_both_towers_and_a_decoder():
    layer = nn.TransformerDecoderLayer(8, 2, 16)
    decoder = nn.TransformerDecoder(layer, 3)
    towers = nn.ModuleDict({'image': decoder, 'text': nn.TransformerDecoder(layer, 2)})
    names = list(find_blocks(towers))
    assert names == [*(f'image.layers.{i}' for i in range(3)), 'text.layers.0', 'text.layers.1']


@pytest.fixture(scope='module')
def vit():
    with on_meta():
        return timm.create_model('vit_tiny_patch16_224', depth=4)


BLOCKS = [f'blocks.{index}' for index in range(4)]


@pytest.mark.parametrize(
    ('selectors', 'names'),
    [
        ('blocks', BLOCKS),
        (['blocks.2', 'patch_embed'], ['patch_embed', 'blocks.2']),
        ('blocks.*.mlp', [f'{name}.mlp' for name in BLOCKS]),
        ('*blocks*', BLOCKS),
        ('Mlp', [f'{name}.mlp' for name in BLOCKS]),
        (['Block'], BLOCKS),
        ([timm.models.vision_transformer.Attention], [f'{name}.attn' for name in BLOCKS]),
    ],
)
def test_selectors(vit, selectors, names):
    assert list(select_modules(vit, selectors)) == names


def test_every_counts_within_each_selector(vit):
    names = list(select_modules(vit, ['blocks', 'norm'], every=2))
    assert names == ['blocks.0', 'blocks.2', 'norm']


def test_a_list_stands_for_its_members_and_a_sequence_of_different_ones_for_itself():
    layers = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)]
    model = nn.ModuleDict({'list': nn.ModuleList(layers), 'head': nn.Sequential(*layers[0])})
    assert list(select_modules(model, 'list')) == ['list.0', 'list.1']
    assert list(select_modules(model, 'head')) == ['head']


@pytest.mark.parametrize(
    ('selectors', 'message'),
    [
        ('block', "no module 'block'; did you mean 'blocks'"),
        ('backbone.blocks.0', "did you mean .*'blocks.0'"),
        ('Blok', "did you mean .*'Block'"),
        ('zzz.*', r"no module 'zzz\.\*'$"),
        ([], 'names no module'),
        (['blocks.1', '*.mlp'], r'blocks\.1 holds blocks\.1\.mlp'),
        ([nn.Conv3d], 'no module .Conv3d'),
    ],
)
def test_what_matches_nothing_is_an_error(vit, selectors, message):
    with pytest.raises(ValueError, match=message):
        select_modules(vit, selectors)


def test_a_model_without_blocks():
    with pytest.raises(ValueError, match='Linear has no repeated blocks'):
        select_modules(nn.Linear(2, 2), 'blocks')


def test_wrong_types(vit):
    with pytest.raises(TypeError, match='int 3'):
        select_modules(vit, [3])
    for every in (0, True, 1.5):
        with pytest.raises(ValueError, match='every must be'):
            select_modules(vit, 'blocks', every=every)
