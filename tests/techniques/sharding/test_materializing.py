"""Models that were built without values get those that their constructors would have drawn."""

import pytest
import timm
import torch
import torch.distributed as dist
import torchvision
from timm.models.eva import Eva
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from memengine.memory.allocated import allocated_peak_bytes
from memengine.models.algorithms.clip import _Tower
from memengine.models.backbones.text_transformer import TextTransformer
from memengine.models.heads.dino_head import DINOHead
from memengine.techniques.layers.weight_norm import WeightNormLinear
from memengine.techniques.sharding.materializing import materialize, on_meta
from memengine.techniques.sharding.shard_model import shard_model
from tests.marks import NEEDS_SHARDING

DEVICE = torch.get_default_device()


def vit():
    return timm.create_model('vit_tiny_patch16_224', img_size=64, depth=2, num_classes=40)


def eva():
    """Scales its blocks' last layers, and computes rotary embeddings in buffers."""
    return timm.create_model('eva02_tiny_patch14_224', img_size=56, depth=2, num_classes=40)


RESETTABLE = pytest.mark.skipif(
    not hasattr(Eva, 'init_weights'),
    reason='this timm gives Eva its values in the constructor only, so that meta=True is refused',
)


def built_on_meta(build):
    with on_meta():
        return build()


def everything(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {n: t.to_local() if isinstance(t, DTensor) else t.detach() for n, t in tensors.items()}


def assert_drawn_alike(actual, expected):
    """Constants are equal; what is drawn is as wide, and as long in its tails."""
    actual, expected = everything(actual), everything(expected)
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        got = actual[name]
        assert got.shape == want.shape and got.dtype == want.dtype, name
        is_constant = not want.is_floating_point() or want.numel() < 2 or want.std() == 0
        if is_constant or torch.equal(got, want):
            assert torch.equal(got, want), name
            continue
        assert not torch.equal(got, want)
        width = got.std() / want.std()
        assert 0.8 < width < 1.25, (name, width)
        tail = got.abs().quantile(0.95) / want.abs().quantile(0.95)
        assert 0.8 < tail < 1.25, (name, tail)


@pytest.mark.parametrize('build', [vit, pytest.param(eva, marks=RESETTABLE)])
def test_timms_vits_need_no_function(build):
    torch.manual_seed(1)
    expected = build()
    model = built_on_meta(build)
    materialize(model, DEVICE)
    assert_drawn_alike(model, expected)
    with pytest.raises(AssertionError, match=r'qkv|q_proj'):  # what modules would have drawn
        for part in model.modules():
            if hasattr(part, 'reset_parameters'):
                part.reset_parameters()
        assert_drawn_alike(model, expected)


@NEEDS_SHARDING
@pytest.mark.parametrize('build', [vit, pytest.param(eva, marks=RESETTABLE)])
def test_one_unit_after_the_other_is_the_same(build):
    torch.manual_seed(1)
    expected, model = build(), built_on_meta(build)
    dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=1)
    try:
        shard_model(model, offload=True)
        assert_drawn_alike(model, expected)
    finally:
        dist.destroy_process_group()


@NEEDS_SHARDING
def test_a_process_never_holds_more_than_its_shards_and_a_unit():
    def build():
        return timm.create_model('vit_tiny_patch16_224', img_size=64, depth=8, num_classes=40)

    model = built_on_meta(build)
    block, whole = size_of(model.blocks[0]), size_of(model)
    dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=4)
    try:
        from_meta = allocated_peak_bytes(lambda: shard_model(model))
        at_once = allocated_peak_bytes(lambda: shard_model(build()))
    finally:
        dist.destroy_process_group()
    assert whole / 4 < from_meta < whole / 4 + 2 * block < whole <= at_once


def size_of(module):
    return sum(parameter.nbytes for parameter in module.parameters())


def test_what_is_there_already_stays():
    model = built_on_meta(vit)
    materialize(model.blocks[0], DEVICE, model=model)
    kept = {name: tensor.clone() for name, tensor in model.blocks[0].state_dict().items()}
    ready = [*model.blocks[0].parameters()]
    assert all(tensor.is_meta for tensor in model.blocks[1].parameters())
    materialize(model, DEVICE, ready=ready, model=model)
    for name, tensor in model.blocks[0].state_dict().items():
        assert torch.equal(tensor, kept[name]), name
    assert not any(tensor.is_meta for tensor in model.parameters())


@pytest.mark.parametrize(
    'build',
    [
        lambda: nn.MultiheadAttention(64, 4),  # resets its child's bias
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128), 2),
        lambda: nn.Sequential(nn.Conv2d(8, 64, 3), nn.BatchNorm2d(64)),
        lambda: DINOHead(64, 128, hidden_dim=64, bottleneck_dim=64),
        lambda: WeightNormLinear(64, 64),
        lambda: TextTransformer(300, width=64),
        lambda: _Tower(TextTransformer(300, width=64), 48, frozen=False),
        lambda: timm.create_model('resnet18', num_classes=40),
    ],
)
def test_modules_that_draw_for_their_children(build):
    torch.manual_seed(1)
    expected, model = build(), built_on_meta(build)
    materialize(model, DEVICE)
    assert_drawn_alike(model, expected)


def test_models_that_draw_in_their_constructor_only_are_refused():
    convnext = built_on_meta(lambda: timm.create_model('convnext_atto'))
    with pytest.raises(ValueError, match='ConvNeXt of timm.models draws .* constructed.* init_fn'):
        materialize(convnext, DEVICE)
    resnet = built_on_meta(lambda: nn.Sequential(torchvision.models.resnet18()))
    with pytest.raises(ValueError, match='ResNet of torchvision.models draws'):
        materialize(resnet, DEVICE)

    def ones(part):
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            nn.init.ones_(tensor)

    materialize(resnet, DEVICE, init_fn=ones)
    assert all((tensor == 1).all() for tensor in resnet.state_dict().values())
    torch_vit = torchvision.models.resnet18()  # has its values
    materialize(torch_vit, DEVICE)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('index', torch.arange(4))
        self.layer = nn.Linear(2, 2)


def test_whole_numbers_without_a_value_are_named():
    with pytest.raises(ValueError, match='1 tensors of Own .* a value: index; pass init_fn'):
        materialize(built_on_meta(Own), DEVICE)


class Tied(nn.Module):
    """A weight at both ends, and a layer under two names."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.out.weight = self.embed.weight
        self.inner = self.again = nn.Linear(4, 4)


class DrawnAtOnce(Tied):
    def init_weights(self):
        nn.init.ones_(self.out.weight)


def two(part):
    for parameter in part.parameters(recurse=False):
        nn.init.constant_(parameter, 2.0)


@pytest.mark.edge('sharding', 'exact', 'A tied weight of a model that is built without values')
@pytest.mark.parametrize(
    ('build', 'init_fn', 'value'), [(DrawnAtOnce, None, 1), (Tied, two, 2), (DrawnAtOnce, two, 2)]
)
def test_a_tied_weight_stays_one(build, init_fn, value):
    model = built_on_meta(build)
    materialize(model, DEVICE, init_fn)
    assert model.out.weight is model.embed.weight and model.again is model.inner
    assert len(list(model.parameters())) == 3
    assert (model.out.weight == value).all()


def test_a_tied_weight_of_which_nobody_knows_whose_values_it_had_is_refused():
    with pytest.raises(ValueError, match='embed.weight and out.weight are one .* pass init_fn'):
        materialize(built_on_meta(Tied), DEVICE)
