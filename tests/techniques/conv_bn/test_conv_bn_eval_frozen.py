"""BatchNorm in eval mode whose weight takes no gradient: nothing is kept, whatever it reads."""

import copy

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from memengine.techniques import checkpoint_activations, efficient_conv_bn_eval
from memengine.techniques.conv_bn.gradient import frozen_bn
from memengine.techniques.sharding.materializing import on_meta
from memengine.testing import assert_same_step, saved_bytes
from tests.techniques.conv_bn.test_conv_bn_eval import frozen, images, step


class PreActivated(nn.Module):
    """As in a DenseNet: norm, ReLU, convolution, and a concatenation with what went in."""

    def __init__(self, channels):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, 4, 3, padding=1)

    def forward(self, x):
        return torch.cat([x, self.conv(F.relu(self.norm(x), inplace=True))], 1)


def pre_activated(bias=False):
    layers = [PreActivated(3 + 4 * index) for index in range(3)]
    model = frozen(nn.Sequential(*layers, nn.Conv2d(15, 4, 3), nn.BatchNorm2d(4)))
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.weight.requires_grad_(False)
            layer.bias.requires_grad_(bias)
    return model


NAMES = ['0.norm', '1.norm', '2.norm']


@pytest.mark.parametrize('bias', [True, False], ids=['bias trained', 'bias frozen'])
def test_same_step_without_what_batchnorm_reads(bias):
    plain, x = pre_activated(bias), images()
    model, said = copy.deepcopy(plain), []
    found = efficient_conv_bn_eval(model, report=said.append)
    for _ in range(2):
        want, plain_bytes = step(plain, x)
        actual, kept = step(model, x)
        assert_same_step(actual, want, 1e-10)
    pixels = x[:, 0].numel()
    read = (7 + 11) * pixels * 8  # of each concatenation; the images live anyway
    last = actual['out'].nbytes
    assert plain_bytes - kept == read + last
    assert found.frozen == NAMES and found.fused == [('3', '4')]
    assert '3 other BatchNorm layers keep nothing' in said[0] and '0.norm, 1.norm' in said[0]


def test_it_is_something_to_do_where_no_pair_is():
    model = pre_activated()[:3]
    found = efficient_conv_bn_eval(model)  # strict
    step(model, images())
    assert found.is_checked and found.frozen == NAMES and found.pairs == {}


@pytest.mark.parametrize('what', ['training', 'weight'])
def test_a_layer_that_needs_its_input_keeps_it(what):
    plain, x = pre_activated(), images()
    if what == 'training':
        plain[1].norm.train()
    else:
        plain[1].norm.weight.requires_grad_()
    model = copy.deepcopy(plain)
    found = efficient_conv_bn_eval(model)
    assert_same_step(step(model, x)[0], step(plain, x)[0], 1e-10)
    assert_same_step(model.state_dict(), plain.state_dict())  # statistics
    assert found.frozen == ['0.norm', '2.norm']


def test_another_user_of_a_convolution_s_output_is_no_hindrance():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x):
            y = self.conv(x)
            return self.norm(y) + y.mean()

    plain, x = frozen(Both()), images()
    plain.norm.requires_grad_(False)
    model = copy.deepcopy(plain)
    efficient_conv_bn_eval(model)
    for _ in range(2):
        want, plain_bytes = step(plain, x)
        actual, kept = step(model, x)
        assert_same_step(actual, want, 1e-10)
    assert kept < plain_bytes


def test_with_checkpointing():
    plain, x = pre_activated(bias=True), images()
    model = copy.deepcopy(plain)
    checkpoint_activations(model, 'PreActivated')
    efficient_conv_bn_eval(model)
    for _ in range(2):
        assert_same_step(step(model, x)[0], step(plain, x)[0], 1e-10)


def test_autocast():
    plain, x = pre_activated(bias=True).float(), images().float()
    model = copy.deepcopy(plain)
    efficient_conv_bn_eval(model)
    results = []
    for each in (model, plain):
        with torch.autocast('cpu', torch.bfloat16):
            results.append(step(each, x))
    assert_same_step(results[0][0], results[1][0], 2e-2)
    assert results[0][1] < results[1][1]


@pytest.mark.parametrize('affine', [True, False])
def test_gradients_of_gradients(affine):
    mean, var = torch.randn(3).double(), torch.rand(3).double() + 0.5
    weight = torch.rand(3).double() if affine else None
    bias = torch.randn(3).double().requires_grad_() if affine else None
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)

    def run(x, bias):
        return frozen_bn(x, mean, var, weight, bias, False, 0.1, 1e-5)

    torch.testing.assert_close(run(x, bias), F.batch_norm(x, mean, var, weight, bias))
    assert torch.autograd.gradcheck(run, (x, bias))
    assert torch.autograd.gradgradcheck(run, (x, bias))


def test_densenet():
    """With BatchNorm's weights frozen, all 121 of its layers keep nothing."""
    with on_meta():
        model, batch = timm.create_model('densenet121').train(), torch.empty(8, 3, 128, 128)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval().requires_grad_(False)
    plain = saved_bytes(lambda: model(batch), model)
    found = efficient_conv_bn_eval(model)
    assert saved_bytes(lambda: model(batch), model) < 0.6 * plain
    assert len(found.fused) == 59 and len(found.frozen) == 62
