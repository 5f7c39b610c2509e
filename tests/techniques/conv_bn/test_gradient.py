"""The pair's gradients against torch's own two layers, for every kind of convolution."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from memengine.memory import SavedBytes
from memengine.techniques.conv_bn.gradient import ConvOutput, Geometry, conv_bn_eval
from memengine.testing import assert_same_step

NAMES = ('x', 'weight', 'bias', 'gamma', 'beta')
CASES = {
    '1d': (F.conv1d, (2, 4, 9), (6, 4, 3), dict(stride=2, padding=1)),
    '2d': (F.conv2d, (2, 4, 7, 6), (6, 4, 3, 2), dict(padding=(1, 0), dilation=(2, 1))),
    '2d grouped': (F.conv2d, (2, 4, 5, 5), (6, 2, 3, 3), dict(groups=2)),
    '2d depthwise': (F.conv2d, (2, 4, 5, 5), (4, 1, 3, 3), dict(groups=4, padding=1)),
    '3d': (F.conv3d, (1, 2, 4, 4, 4), (3, 2, 2, 2, 2), dict(stride=(2, 1, 1))),
    'transposed 1d': (F.conv_transpose1d, (2, 4, 5), (4, 3, 3), dict(stride=2)),
    'transposed 2d': (
        F.conv_transpose2d,
        (2, 4, 4, 4),
        (4, 3, 3, 3),
        dict(stride=2, padding=1, output_padding=1, groups=2),
    ),
    'transposed 3d': (F.conv_transpose3d, (1, 2, 3, 3, 3), (2, 3, 2, 2, 2), dict(dilation=2)),
}


def tensors(case, frozen=()):
    """x, weight, bias, gamma, beta and the running mean and variance."""
    function, x_shape, weight_shape, settings = CASES[case]
    torch.manual_seed(0)
    transposed = 'transpose' in function.__name__
    channels = weight_shape[1] * settings.get('groups', 1) if transposed else weight_shape[0]
    shapes = (x_shape, weight_shape, (channels,), (channels,), (channels,))
    made = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    for name, tensor in zip(NAMES, made, strict=True):
        tensor.requires_grad_(name not in frozen)
    mean = torch.randn(channels, dtype=torch.float64)
    return made, (mean, torch.rand(channels, dtype=torch.float64) + 0.5)


def plain(case, made, statistics):
    x, weight, bias, gamma, beta = made
    function, *_, settings = CASES[case]
    return F.batch_norm(function(x, weight, bias, **settings), *statistics, gamma, beta)


def fused(case, made, statistics):
    x, weight, bias, gamma, beta = made
    function, *_, settings = CASES[case]
    geometry = Geometry.of({'weight': weight, **settings}, 'transpose' in function.__name__)
    output = function(x, weight, bias, **settings)
    source = ConvOutput('conv', x, weight, bias, geometry)
    return conv_bn_eval(source, output.detach(), statistics, (gamma, beta), 1e-5, lambda: False)


def gradients(out, made):
    out.pow(3).sum().backward()
    result = {name: t.grad for name, t in zip(NAMES, made, strict=True) if t is not None}
    return {'output': out, **result}


@pytest.mark.parametrize('case', CASES)
def test_same_as_two_layers(case):
    made, statistics = tensors(case)
    twins, _ = tensors(case)
    out, want = fused(case, made, statistics), plain(case, twins, statistics)
    assert torch.equal(out, want)
    assert_same_step(gradients(out, made), gradients(want, twins), 1e-10)


@pytest.mark.parametrize('case', ['2d grouped', 'transposed 2d'])
@pytest.mark.parametrize('trained', [c for n in (1, 2) for c in itertools.combinations(NAMES, n)])
def test_only_what_is_trained_gets_a_gradient(case, trained):
    frozen = {*NAMES} - {*trained}
    made, statistics = tensors(case, frozen)
    twins, _ = tensors(case, frozen)
    actual = gradients(fused(case, made, statistics), made)
    assert_same_step(actual, gradients(plain(case, twins, statistics), twins), 1e-10)
    assert {name for name in NAMES if actual[name] is not None} == {*trained}


@pytest.mark.parametrize('missing', [('bias',), ('gamma', 'beta'), ('bias', 'gamma', 'beta')])
def test_without_bias_or_affine(missing):
    made, statistics = tensors('2d')
    twins, _ = tensors('2d')
    for some in (made, twins):
        some[:] = [None if n in missing else t for n, t in zip(NAMES, some, strict=True)]
    actual = gradients(fused('2d', made, statistics), made)
    assert_same_step(actual, gradients(plain('2d', twins, statistics), twins), 1e-10)


@pytest.mark.parametrize('wrong', ['doubled', 'missing', 'zero'])
def test_a_wrong_gradient_is_found(wrong):
    made, statistics = tensors('2d')
    twins, _ = tensors('2d')
    actual = gradients(fused('2d', made, statistics), made)
    replaced = {'doubled': 2 * actual['gamma'], 'missing': None, 'zero': 0 * actual['gamma']}
    actual['gamma'] = replaced[wrong]
    with pytest.raises(AssertionError, match='gamma'):
        assert_same_step(actual, gradients(plain('2d', twins, statistics), twins), 1e-10)


@pytest.mark.parametrize('case', ['2d', 'transposed 1d'])
def test_first_and_second_derivatives_by_finite_differences(case):
    made, statistics = tensors(case)
    with torch.no_grad():
        made[0] = made[0][:1].clone().requires_grad_()

    def function(*made):
        return fused(case, made, statistics)

    assert torch.autograd.gradcheck(function, made)
    assert torch.autograd.gradgradcheck(function, made)


def test_an_activation_before_is_computed_again():
    made, statistics = tensors('2d')
    twins, _ = tensors('2d')
    _, _, _, settings = CASES['2d']

    def through_silu(made, fuse):
        before = made[0] * 1
        x, (weight, bias, gamma, beta) = F.silu(before), made[1:]
        output = F.conv2d(x, weight, bias, **settings)
        if not fuse:
            return F.batch_norm(output, *statistics, gamma, beta)
        geometry = Geometry.of({'weight': weight, **settings}, False)
        source = ConvOutput('conv', x, weight, bias, geometry, F.silu, before)
        return conv_bn_eval(source, output.detach(), statistics, (gamma, beta), 1e-5, lambda: False)

    actual = gradients(through_silu(made, True), made)
    assert_same_step(actual, gradients(through_silu(twins, False), twins), 1e-10)
    with SavedBytes(*made[1:], *statistics) as meter:
        out = through_silu(made, True)
    assert out.requires_grad
    assert meter.live_bytes == made[0].nbytes  # what SiLU keeps, and not its result


def bytes_and_flops(step, frozen):
    made, statistics = tensors('2d', frozen)
    with SavedBytes(*made[1:], *statistics) as meter, FlopCounterMode(display=False) as flops:
        out = step('2d', made, statistics)
        kept = meter.live_bytes
        out.sum().backward()
    return kept, flops.get_total_flops()


def test_bytes_and_price():
    made, statistics = tensors('2d')
    x, output = made[0].nbytes, plain('2d', made, statistics).nbytes
    kept, flops = bytes_and_flops(plain, ())
    assert kept == x + output
    assert bytes_and_flops(fused, ()) == (x, flops)
    # Where all is frozen nothing is kept, though torch keeps what it does not need.
    kept, flops_of_input = bytes_and_flops(plain, NAMES[1:])
    assert kept == x + output
    assert bytes_and_flops(fused, NAMES[1:]) == (0, flops_of_input)
    # gamma's gradient takes the weight's, even if that is not wanted.
    assert bytes_and_flops(plain, ['weight']) == (x + output, flops_of_input)
    assert bytes_and_flops(fused, ['weight']) == (x, flops)
