"""Which pairs are found and when they are fused, on small models that do unusual things."""

from __future__ import annotations

import copy
import pickle

import pytest
import timm
import torch
from mmcv.cnn import ConvModule
from timm.layers import BatchNormAct2d, Conv2dSame, StdConv2d
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from memengine.memory import SavedBytes
from memengine.techniques import efficient_conv_bn_eval
from memengine.testing import assert_same_step

PLAIN = 'BatchNorm uses the statistics of the batch (it is in training mode)'
OTHER = 'something else uses the output of the convolution, too'
HOOKED = 'a hook looks at the output of the convolution'


def frozen(model, seed=0):
    """In float64 and training mode, BatchNorm in eval mode, its statistics at random."""
    torch.manual_seed(seed)
    model = model.double().train()
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            layer.eval()
            if layer.running_mean is not None:
                layer.running_mean.normal_(0, 0.1)
                layer.running_var.uniform_(0.5, 2)
            if layer.affine:
                nn.init.uniform_(layer.weight, 0.5, 1.5)
                nn.init.normal_(layer.bias, 0, 0.1)
    return model


def step(model, x, *args, **kwargs):
    """Output, loss and gradients of one step, and the bytes that forward has left."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    with SavedBytes(model, x) as meter:
        out = model(x, *args, **kwargs)
        kept = meter.live_bytes
    out.square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return {'out': out, 'input': x.grad, **gradients}, kept


def check(model, x, *args, modules=None, saves=True, **kwargs):
    """The same step in fewer bytes; returns what was found."""
    plain = copy.deepcopy(model)
    found = efficient_conv_bn_eval(model, modules, strict=saves)
    for _ in range(2):
        want, plain_bytes = step(plain, x, *args, **kwargs)
        actual, kept = step(model, x, *args, **kwargs)
        assert torch.equal(actual['out'], want['out'])
        assert_same_step(actual, want, 1e-10)
    assert kept < plain_bytes if saves else kept == plain_bytes
    return found


def images(channels=3, size=8):
    return torch.randn(2, channels, size, size, dtype=torch.float64)


def pair(conv, norm=None, *rest):
    return frozen(nn.Sequential(conv, norm or nn.BatchNorm2d(conv.out_channels), *rest))


CONVOLUTIONS = {
    'bias': nn.Conv2d(3, 4, 3),
    'grouped': nn.Conv2d(3, 6, 3, groups=3, bias=False),
    'same': nn.Conv2d(3, 4, 3, padding='same', dilation=2),
    'same, even kernel': nn.Conv2d(3, 4, (2, 3), padding='same'),
    'valid': nn.Conv2d(3, 4, 3, padding='valid'),
    'reflect': nn.Conv2d(3, 4, 3, padding=1, padding_mode='reflect'),
    'circular': nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode='circular'),
    'transposed': nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1),
    'tensorflow': Conv2dSame(3, 4, 3, stride=2),
    'standardised': StdConv2d(3, 4, 3),
    'weight norm': torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)),
    'spectral norm': torch.nn.utils.spectral_norm(nn.Conv2d(3, 4, 3)),
}


@pytest.mark.parametrize('kind', CONVOLUTIONS)
def test_any_convolution(kind):
    model = pair(copy.deepcopy(CONVOLUTIONS[kind]), None, nn.ReLU(inplace=True))
    assert check(model, images()).pairs == {('0', '1'): None}


@pytest.mark.parametrize(
    ('conv', 'norm', 'shape'),
    [
        (nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), (2, 3, 9)),
        (nn.Conv3d(3, 4, 2), nn.BatchNorm3d(4), (2, 3, 4, 4, 4)),
        (nn.ConvTranspose1d(3, 4, 3), nn.BatchNorm1d(4), (2, 3, 9)),
        (nn.ConvTranspose3d(3, 4, 2), nn.BatchNorm3d(4), (2, 3, 4, 4, 4)),
    ],
)
def test_any_number_of_axes(conv, norm, shape):
    x = torch.randn(shape, dtype=torch.float64)
    assert check(pair(conv, norm), x).pairs == {('0', '1'): None}


@pytest.mark.parametrize(
    'norm',
    [
        nn.BatchNorm2d(4, affine=False),
        nn.SyncBatchNorm(4),
        BatchNormAct2d(4),
        BatchNormAct2d(4, act_layer=nn.SiLU, drop_layer=lambda: nn.Dropout(0.5)),
        BatchNormAct2d(4, act_layer=nn.Hardswish),
    ],
)
def test_any_batch_norm(norm):
    model = pair(nn.Conv2d(3, 4, 3), norm, nn.Conv2d(4, 4, 3), BatchNormAct2d(4))
    assert check(model, images()).fused == [('0', '1'), ('2', '3')]


@pytest.mark.parametrize('order', [('conv', 'norm', 'act'), ('act', 'conv', 'norm')])
@pytest.mark.parametrize('mode', ['zeros', 'reflect'])
def test_conv_module(order, mode):
    settings = dict(norm_cfg=dict(type='BN'), order=order, padding_mode=mode, inplace=False)
    block = ConvModule(3, 3, 3, padding=1, **settings)
    assert check(frozen(block), images()).pairs == {('conv', 'bn'): None}


def test_an_activation_in_the_layer_is_kept_once():
    def make():
        return pair(nn.Conv2d(3, 4, 1), BatchNormAct2d(4, act_layer=nn.SiLU), nn.Conv2d(4, 4, 1))

    model = make()
    model.append(nn.BatchNorm2d(4).double().eval())
    x = images()
    _, plain_bytes = step(model, x)
    assert check(model, x).fused == [('0', '1'), ('2', '3')]
    one = x.nbytes // 3 * 4
    # Plain: the convolutions' outputs, what SiLU has kept and its result. Fused: the third.
    assert (plain_bytes, step(model, x)[1]) == (4 * one, one)


class Unusual(nn.Module):
    """Shared layers, optional paths, keyword arguments."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.conv3 = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.bn1, self.bn2, self.bn3 = (nn.BatchNorm2d(4) for _ in range(3))

    def forward(self, x, swap=False, *, scale=1.0):
        x = self.bn1(self.conv1(x)) * scale
        x = self.bn2(self.conv2(self.conv2(x)))
        x = self.bn3(self.bn3(self.conv3(x)))
        first = self.conv1(x)
        return x + self.bn2(first) if swap else x + first


def test_what_flows_decides():
    model = frozen(Unusual())
    found = check(model, images(4), scale=2.0)
    usual = [('conv1', 'bn1'), ('conv2', 'bn2'), ('conv3', 'bn3')]
    assert found.fused == usual
    plain = copy.deepcopy(model)
    x = images(4)
    assert_same_step(step(model, x, True)[0], step(plain, x, swap=True)[0], 1e-10)
    assert found.fused == [*usual, ('conv1', 'bn2')]


class TwoUsers(nn.Module):
    """The convolution's output goes on beside BatchNorm, by itself or as a view."""

    def __init__(self, use, first):
        super().__init__()
        self.conv, self.bn, self.use, self.first = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), use, first

    def forward(self, x):
        y = self.conv(x)
        other = self.use(y) if self.first else None
        z = self.bn(y)
        return z + (self.use(y) if other is None else other)


@pytest.mark.edge(
    'efficient_conv_bn_eval',
    'exact',
    'Another user of a convolution’s output: BatchNorm keeps its input',
)
@pytest.mark.parametrize('first', [True, False])
@pytest.mark.parametrize('use', [torch.sin, lambda y: y.flatten(2).mean(2)[..., None, None]])
def test_another_user_of_the_output(use, first):
    model = frozen(TwoUsers(use, first))
    plain, x = copy.deepcopy(model), images()
    found = efficient_conv_bn_eval(model)
    assert_same_step(step(model, x)[0], step(plain, x)[0], 1e-10)
    want, plain_bytes = step(plain, x)
    actual, kept = step(model, x)
    assert_same_step(actual, want, 1e-10)
    assert kept == plain_bytes
    assert found.pairs == {('conv', 'bn'): OTHER}


def test_a_user_without_gradient_is_none():
    model = frozen(TwoUsers(lambda y: y.detach() * 2, True))
    assert check(model, images()).pairs == {('conv', 'bn'): None}


class InPlace(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.conv, self.bn, self.what = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), what

    def forward(self, x):
        x = x * 1
        y = self.conv(x)
        (y if self.what == 'output' else x).mul_(2)
        return self.bn(y)


@pytest.mark.edge(
    'efficient_conv_bn_eval',
    'exact',
    'Outputs that are changed in place between the two; inputs are an error, as without',
)
def test_changes_in_place():
    assert check(frozen(InPlace('output')), images(), saves=False).fused == []
    model = frozen(InPlace('input'))
    efficient_conv_bn_eval(model, strict=False)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):  # as without
        step(model, images())
    model.conv.requires_grad_(False)  # torch keeps the input anyway, and complains; here it is not
    model.zero_grad()  # of the backward that was broken off
    x = images()
    unchanged = step(nn.Sequential(model.conv, model.bn), x)[0]
    found = dict(zip(unchanged, step(model, x)[0].values(), strict=True))
    assert_same_step(found, unchanged, 1e-10)


@pytest.mark.edge('efficient_conv_bn_eval', 'exact', '`train()` and `eval()` at any time')
def test_modes_may_change_at_any_time():
    model = pair(nn.Conv2d(3, 4, 3), None, nn.Dropout(0.5), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    model.append(nn.BatchNorm2d(4).double())
    plain, x = copy.deepcopy(model), images()
    found = efficient_conv_bn_eval(model)
    switches = [lambda m: m, lambda m: m[4].eval(), lambda m: m.train(), lambda m: m.eval()]
    expected = [[('0', '1'), ('3', '4')]] * 2 + [[]] + [[('0', '1'), ('3', '4')]]
    for switch, pairs in zip(switches, expected, strict=True):
        switch(model), switch(plain)
        assert_same_step(step(model, x)[0], step(plain, x)[0], 1e-10)
        assert found.fused == pairs
        assert_same_step(model.state_dict(), plain.state_dict(), 1e-12)  # statistics, too
    assert_same_step({'eval': model(x)}, {'eval': plain(x)})  # without dropout


def test_without_running_statistics():
    norm = nn.BatchNorm2d(4, track_running_stats=False)
    found = check(pair(nn.Conv2d(3, 4, 3), norm), images(), saves=False)
    assert found.pairs == {('0', '1'): PLAIN}


@pytest.mark.edge('efficient_conv_bn_eval', 'exact', 'Hooks of layers and of tensors')
@pytest.mark.parametrize('kind', ['forward hook', 'pre-hook', 'backward hooks', 'retain_grad'])
def test_hooks_see_what_they_always_see(kind):
    def watched(model):
        seen = []

        def keep(grad):
            seen.append(grad)

        conv, norm = model
        if kind == 'forward hook':
            conv.register_forward_hook(lambda _, args, out: out.register_hook(keep) and None)
        elif kind == 'pre-hook':
            norm.register_forward_pre_hook(lambda _, args: args[0].register_hook(keep) and None)
        elif kind == 'backward hooks':
            for layer in model:
                layer.register_full_backward_hook(lambda _, i, o: seen.extend([*i, *o]))
        else:
            conv.register_forward_hook(lambda _, args, out: out.retain_grad() or seen.append(out))
        return seen

    model, x = pair(nn.Conv2d(3, 4, 3)), images()
    plain = copy.deepcopy(model)
    efficient_conv_bn_eval(model, strict=False)
    seen, expected = watched(model), watched(plain)
    assert_same_step(step(model, x)[0], step(plain, x)[0], 1e-10)
    assert len(seen) == len(expected) > 0
    for got, want in zip(seen, expected, strict=True):
        if kind == 'retain_grad':
            got, want = got.grad, want.grad
        torch.testing.assert_close(got, want)


class Features(nn.Module):
    """Returns what its convolutions gave as well, as feature extractors do."""

    def __init__(self, act=nn.ReLU):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3), BatchNormAct2d(4, act_layer=act)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        y1 = self.conv1(x)
        y2 = self.conv2(self.bn1(y1))
        return [y1, y2], self.bn2(y2).square().mean() + y1.square().mean()


def _by_grad(model, x):
    outputs, loss = model(x)
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(loss, [*outputs, *trained], allow_unused=True)


def _by_retain_grad(model, x):
    outputs, loss = model(x)
    for one in outputs:
        one.retain_grad()
    loss.backward()
    return [one.grad for one in [*outputs, *model.parameters()]]


def _by_hooks_put_on_afterwards(model, x):
    seen = {}
    outputs, loss = model(x)
    for name, one in enumerate(outputs):
        one.register_hook(lambda grad, name=name: seen.update({name: grad}))
    del outputs, one  # only the hooks are left
    loss.backward()
    return [seen[0], seen[1], *(p.grad for p in model.parameters())]


@pytest.mark.edge(
    'efficient_conv_bn_eval',
    'exact',
    'A convolution’s output that the model returns or retains, and hooks put on it '
    'afterwards: its gradient is whole',
)
@pytest.mark.parametrize('ask', [_by_grad, _by_retain_grad, _by_hooks_put_on_afterwards])
@pytest.mark.parametrize('frozen_weight', [False, True])
@pytest.mark.parametrize('act', [nn.ReLU, nn.SiLU])
def test_the_gradient_of_an_output_that_is_returned_is_whole(ask, frozen_weight, act):
    model, x = frozen(Features(act)), images()
    model.conv2.weight.requires_grad_(not frozen_weight)
    plain = copy.deepcopy(model)
    efficient_conv_bn_eval(model)
    for _ in range(2):
        want = ask(plain, x)
        for actual, value in zip(ask(model, x), want, strict=True):
            assert (actual is None) == (value is None)
            if value is not None:
                torch.testing.assert_close(actual, value, rtol=1e-10, atol=1e-14)
        model.zero_grad(), plain.zero_grad()


def test_hooks_of_the_result_fire():
    model, seen = pair(nn.Conv2d(3, 4, 3)), []
    model[1].register_forward_hook(lambda _, args, out: seen.append(out))
    found = check(model, images())
    assert found.fused == [('0', '1')] and len(seen) == 4  # of both models, in two steps


@pytest.mark.parametrize('again', [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_on_and_independent(again):
    model, x = pair(nn.Conv2d(3, 4, 3)), images()
    plain = copy.deepcopy(model)
    state = list(model.state_dict())
    found = efficient_conv_bn_eval(model)
    copied = again(model)
    assert list(copied.state_dict()) == state == list(model.state_dict())
    want, plain_bytes = step(plain, x)
    actual, kept = step(copied, x)
    assert_same_step(actual, want, 1e-10)
    assert kept < plain_bytes
    assert found.pairs == {}
    found.remove()
    assert step(model, x)[1] == plain_bytes > step(copied, x)[1] == kept
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks


def test_a_layer_that_raises_leaves_nothing_behind():
    model, x = pair(nn.Conv2d(3, 4, 3)), images()
    before = torch.overrides._len_torch_function_stack()
    found = efficient_conv_bn_eval(model)
    with pytest.raises(RuntimeError, match='channels'):
        model(images(5))
    model[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    assert torch.overrides._len_torch_function_stack() == before
    assert found.pairs == {}


def test_it_says_what_it_did():
    said = []
    model = pair(nn.Conv2d(3, 4, 3), None, nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    model[3].train()
    efficient_conv_bn_eval(model, report=said.append)
    with torch.no_grad():
        model(images())
    assert said == []
    for _ in range(2):
        model(images())
    (line,) = said
    assert '1 of 2 Conv-BN pairs' in line and '0 → 1' in line
    assert f'left alone as {PLAIN}: 2 → 3' in line


def test_passes_through_other_parts_are_not_judged():
    model = nn.ModuleDict({'image': pair(nn.Conv2d(3, 4, 3)), 'text': nn.Linear(2, 2)})
    model.forward = lambda x, part: model[part](x)
    found = efficient_conv_bn_eval(model)
    model(torch.ones(1, 2), 'text')
    assert not found.is_checked
    model(images(), 'image')
    assert found.is_checked


class Apart(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4))


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3)), 'no BatchNorm layer in Sequential'),
        (lambda: nn.Sequential(nn.BatchNorm2d(3)), 'no convolution layer in Sequential'),
        (Apart, 'no BatchNorm reads the output of a convolution directly'),
        (lambda: pair(nn.Conv2d(3, 4, 3)).train(), 'none of the 1 .* statistics of the batch'),
    ],
)
def test_doing_nothing_is_an_error(make, message):
    with pytest.raises(ValueError, match=message):
        efficient_conv_bn_eval(model := make().double())(model(images()))
    said = []
    model = make().double()
    efficient_conv_bn_eval(model, strict=False, report=said.append)
    model(images())
    assert said and all('does nothing' in line for line in said)


def test_names():
    model = nn.ModuleDict({'backbone': pair(nn.Conv2d(3, 4, 3)), 'neck': pair(nn.Conv2d(4, 4, 3))})
    model.forward = lambda x: model['neck'](model['backbone'](x))
    for modules in ('[backbone]', 'backbone', ['backbone'], ['back*']):
        found = efficient_conv_bn_eval(model, modules)
        model(images())
        assert found.fused == [('backbone.0', 'backbone.1')]
        with pytest.raises(ValueError, match='on already'):
            efficient_conv_bn_eval(model)
        found.remove()
    with pytest.raises(ValueError, match="no module 'backbon'; did you mean 'backbone'"):
        efficient_conv_bn_eval(model, ['backbon'])


def test_partly_frozen_networks():
    """A network that is frozen whole (for a prompt, say), and one of which parts are trained."""
    model = frozen(timm.create_model('resnet18', num_classes=4))
    model.requires_grad_(False)
    plain, x = copy.deepcopy(model), images(size=32)
    found = efficient_conv_bn_eval(model)
    want, plain_bytes = step(plain, x)
    actual, kept = step(model, x)
    assert_same_step(actual, want, 1e-10)
    assert len(found.fused) == 20 and kept < 0.5 * plain_bytes  # left is what ReLU keeps
    for some in (model, plain):
        some.layer2.requires_grad_(True)
        some.layer3[0].conv1.requires_grad_(True)
        some.layer3[0].bn2.requires_grad_(True)
        some.layer4.train()
    assert_same_step(step(model, x)[0], step(plain, x)[0], 1e-10)
    assert len(found.fused) == 15


def test_a_convolution_without_gradient():
    model = pair(nn.Conv2d(3, 4, 3))
    model[0].requires_grad_(False)
    found = efficient_conv_bn_eval(model, strict=False)
    model(images()).sum().backward()
    assert found.pairs == {('0', '1'): 'no gradient goes to the convolution'}
    assert check(pair(nn.Conv2d(3, 4, 3)).requires_grad_(False), images()).fused == [('0', '1')]


def test_nothing_is_kept_without_gradient():
    model = pair(nn.Conv2d(3, 4, 3))
    found = efficient_conv_bn_eval(model)
    with torch.no_grad():
        out = model(images())
    with torch.inference_mode():
        model(images())
    assert not out.requires_grad and found.pairs == {}
    conv, norm = model
    with torch.no_grad():
        y = conv(images())
    assert norm(F.relu(y)).requires_grad and found.pairs == {}
