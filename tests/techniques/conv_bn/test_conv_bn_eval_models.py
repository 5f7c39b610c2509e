"""The issue's models: all of their pairs, fewer bytes at every size, the same steps.

Bytes and pairs are counted on the meta device, where a pass costs nothing; the meter counts there
what it counts elsewhere.
"""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from mmengine.model.efficient_conv_bn_eval import (
    efficient_conv_bn_eval_control,
    turn_on_efficient_conv_bn_eval_for_single_model,
)
from torch import nn
from torch.fx.proxy import TraceError
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.models import efficientnet_b0, mobilenet_v3_small
from torchvision.models.detection import maskrcnn_resnet50_fpn

from memengine.memory import SavedBytes
from memengine.techniques import efficient_conv_bn_eval
from memengine.techniques.sharding.materializing import on_meta
from memengine.testing import assert_same_step, saved_bytes
from tests.techniques.conv_bn.test_conv_bn_eval import frozen

# Model: pairs that exist, those that MMEngine fuses, what is saved at least of the bytes.
MODELS = {
    'resnet18': (20, 20, 0.44),
    'resnet50': (53, 53, 0.51),
    'efficientnet_b0': (49, 0, 0.47),
    'regnety_002': (44, 0, 0.45),
    'darknet53': (52, 0, 0.40),
    'mobilenetv3_small_100': (34, 0, 0.45),
    'dla34': (37, 37, 0.42),
    'res2net50_26w_4s': (85, 85, 0.45),
    'densenet121': (59, 0, 0.15),  # 62 of its 121 BatchNorm layers read a concatenation
    'mask_rcnn': (53, 53, 0.49),
    'tf_efficientnet_b0': (49, None, 0.38),  # Conv2dSame, which torch.fx cannot trace
    'torchvision efficientnet_b0': (49, 49, 0.25),
    'torchvision mobilenet_v3_small': (34, 34, 0.25),
}
SIZES = [(32, 224), (1, 64)]


def make(name, **kwargs):
    if name == 'mask_rcnn':
        return maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, **kwargs).backbone
    if name.startswith('torchvision'):
        return {'efficientnet_b0': efficientnet_b0, 'mobilenet_v3_small': mobilenet_v3_small}[
            name.split()[1]
        ](weights=None, **kwargs)
    return timm.create_model(name, **kwargs)


def built_on_meta(name):
    with on_meta():
        model = make(name).train()
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            layer.eval()
    return model


def convolutions_before_batch_norm(model, x):
    """Pairs by another way than the library's: what autograd says BatchNorm's input came from."""
    found = []

    def look(layer, args):
        found.append(type(args[0].grad_fn).__name__ == 'ConvolutionBackward0')

    norms = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    hooks = [layer.register_forward_pre_hook(look) for layer in norms]
    model(x)
    for hook in hooks:
        hook.remove()
    return sum(found)


@pytest.mark.parametrize('name', MODELS)
def test_pairs_and_bytes(name):
    pairs, _, saved = MODELS[name]
    model = built_on_meta(name)
    inputs = [torch.empty(batch, 3, size, size, device='meta') for batch, size in SIZES]
    existing = []

    def plain(x):
        existing.append(convolutions_before_batch_norm(model, x))

    before = [saved_bytes(lambda x=x: plain(x), model) for x in inputs]
    assert existing == [pairs] * len(inputs)
    found = efficient_conv_bn_eval(model)
    for x, plain in zip(inputs, before, strict=True):
        assert saved_bytes(lambda x=x: model(x), model) <= (1 - saved) * plain, x.shape
    assert len(found.pairs) == len(found.fused) == pairs


@pytest.mark.parametrize('name', MODELS)
def test_mmengine_beside(name):
    """What MMEngine's own finds, so that the page's comparison stays true."""
    model = built_on_meta(name)
    x = torch.empty(8, 3, 128, 128, device='meta')
    before = saved_bytes(lambda: model(x), model) if name == 'resnet18' else None
    if MODELS[name][1] is None:
        with pytest.raises(TraceError):
            turn_on_efficient_conv_bn_eval_for_single_model(model)
        return
    turn_on_efficient_conv_bn_eval_for_single_model(model)
    nodes = model.forward.__self__.graph.nodes
    assert sum(n.target is efficient_conv_bn_eval_control for n in nodes) == MODELS[name][1]
    after = saved_bytes(lambda: model(x), model)
    ours = built_on_meta(name)
    efficient_conv_bn_eval(ours)
    assert saved_bytes(lambda: ours(x), ours) < after
    if before is not None:
        assert after > 1.3 * before


FAST = ('resnet18', 'mobilenetv3_small_100', 'regnety_002')


@pytest.mark.parametrize(
    'name',
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def test_same_steps(name):
    """Three steps with weight decay and clipping; some layers are frozen, a BatchNorm trains."""
    model = frozen(make(name))
    norms = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    norms[1].requires_grad_(False)
    convolutions[3].requires_grad_(False)
    norms[-1].train()
    plain = copy.deepcopy(model)
    found = efficient_conv_bn_eval(model)
    results = []
    for some in (model, plain):
        torch.manual_seed(2)
        optimizer = torch.optim.SGD(some.parameters(), lr=1e-3, momentum=0.9, weight_decay=0.05)
        result = {}
        for index in range(3):
            optimizer.zero_grad()
            out = some(torch.randn(2, 3, 32, 32, dtype=torch.float64))
            outs = out.values() if isinstance(out, dict) else [out]
            loss = sum(o.square().mean() for o in outs)
            loss.backward()
            result |= {f'gradient of {n}': p.grad for n, p in some.named_parameters()}
            result[f'loss {index}'] = loss.detach()
            nn.utils.clip_grad_norm_(some.parameters(), 1.0)
            optimizer.step()
        results.append(result | some.state_dict())
    assert_same_step(*results, 1e-9)
    assert len(found.fused) >= MODELS[name][0] - 1


@pytest.mark.slow
def test_bytes_on_meta_are_those_on_cpu():
    for name in ('resnet18', 'mobilenetv3_small_100'):
        figures = []
        for device in ('meta', 'cpu'):
            model = built_on_meta(name)
            if device == 'cpu':
                model = model.to_empty(device='cpu')
            efficient_conv_bn_eval(model)
            with SavedBytes(model) as meter:
                out = model(torch.zeros(2, 3, 96, 96, device=device))
                figures.append(meter.live_bytes)
            assert out.requires_grad
        assert figures[0] == figures[1]
