"""DropIT: the plain forward, the published gradient, fewer bytes, no more products."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from memengine.memory import SavedBytes
from memengine.techniques.activation_offload import offload_activations
from memengine.techniques.codecs.quantized import Quantizer
from memengine.techniques.codecs.sparse import Cast
from memengine.techniques.compiling import compile_blocks
from memengine.techniques.compression.dropit import drop_activations, to_dropit, undo_dropit
from memengine.techniques.compression.quantized_activations import quantize_activations
from memengine.techniques.slices.grad_cache import Tower, cached_step
from memengine.testing import saved_bytes

STRATEGIES = ('mink', 'block_mink', 'random')


def smallest_dropped(x, gamma):
    """The definition: of the whole tensor, the elements of smallest magnitude are zero."""
    flat = x.detach().flatten()
    kept = flat.abs().topk(int(flat.numel() * (1 - gamma))).indices
    return torch.zeros_like(flat).scatter(0, kept, flat[kept]).view_as(x)


LAYERS = {
    'linear': (lambda: nn.Linear(12, 7), (5, 12)),
    'linear without bias, over tokens': (lambda: nn.Linear(12, 7, bias=False), (3, 5, 12)),
    'conv1d': (lambda: nn.Conv1d(4, 6, 3, padding=1), (3, 4, 9)),
    'conv2d': (lambda: nn.Conv2d(4, 6, 3, stride=2), (3, 4, 9, 9)),
    'conv3d': (lambda: nn.Conv3d(2, 3, 3), (2, 2, 5, 5, 5)),
    'conv2d same, even kernel': (lambda: nn.Conv2d(4, 6, 3, padding='same'), (3, 4, 9, 9)),
    'depthwise, dilated': (lambda: nn.Conv2d(4, 8, 3, groups=4, dilation=2), (3, 4, 9, 9)),
    'transposed': (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), (3, 4, 5, 5)),
    'transposed, grouped': (lambda: nn.ConvTranspose1d(4, 6, 3, groups=2), (3, 4, 5)),
}


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def step(model, *inputs, **kwargs):
    """Output and all gradients of a loss in which no two elements weigh alike."""
    model.zero_grad()
    output = model(*inputs, **kwargs)
    output = output[0] if isinstance(output, tuple) else output
    weights = torch.linspace(0.5, 2, output.numel(), dtype=output.dtype).view_as(output)
    (output * weights).sum().backward()
    return output.detach(), gradients(model)


@pytest.mark.parametrize('name', LAYERS)
def test_gradient_is_that_of_the_dropped_input(name):
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer = make().double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    plain, exact = step(layer, x)
    x_exact, x.grad = x.grad, None
    lossless = copy.deepcopy(layer)
    _, oracle = step(lossless, smallest_dropped(x, 0.7))
    handle = drop_activations(layer, 'mink', 0.7)
    output, dropped = step(layer, x)
    assert torch.equal(output, plain)
    assert torch.equal(x.grad, x_exact)  # of the input: the weights are whole
    torch.testing.assert_close(dropped['weight'], oracle['weight'], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(dropped['weight'], exact['weight'], rtol=1e-3)
    if 'bias' in exact:
        assert torch.equal(dropped['bias'], exact['bias'])
    handle.undo()
    assert torch.equal(step(layer, x)[1]['weight'], exact['weight'])


@pytest.mark.parametrize('mode', ['zeros', 'reflect', 'replicate', 'circular'])
def test_padding_modes_drop_of_what_the_convolution_sees(mode):
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode).double()
    x = torch.randn(2, 3, 7, 7, dtype=torch.float64)
    plain, _ = step(layer, x)
    padded = x if mode == 'zeros' else F.pad(x, (1, 1, 1, 1), mode)
    weight = layer.weight.detach().requires_grad_()
    seen = F.conv2d(smallest_dropped(padded, 0.6), weight, padding=int(mode == 'zeros'))
    factors = torch.linspace(0.5, 2, seen.numel(), dtype=seen.dtype).view_as(seen)
    (oracle,) = torch.autograd.grad((seen * factors).sum(), weight)
    drop_activations(layer, 'mink', 0.6)
    output, dropped = step(layer, x)
    assert torch.equal(output, plain)
    distance = (dropped['weight'] - oracle).norm() / oracle.norm()
    assert distance < (1e-12 if mode == 'zeros' else 0.05)  # of equal elements any may go


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize(
    'values', [None, Cast(torch.bfloat16), Quantizer(8)], ids=['whole', 'half', '8 bits']
)
def test_a_model_on_the_cpu_whatever_the_default_device(strategy, values):
    model, x = nn.Linear(64, 8), torch.randn(16, 64)
    drop_activations(model, strategy, 0.5, values=values)
    with torch.device('meta'):
        model(x).sum().backward()
    assert model.weight.grad.isfinite().all()


class Functional(nn.Module):
    """Layers that are no modules: transformers' Conv1D, a low-rank update, tied weights."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 16))
        self.bias = nn.Parameter(torch.zeros(16))
        self.down, self.up = nn.Parameter(torch.randn(12, 2)), nn.Parameter(torch.randn(2, 16))
        self.norm = nn.LayerNorm(12)

    def forward(self, x):
        x = self.norm(x)
        hidden = torch.addmm(self.bias, x.view(-1, 12), self.weight).view(*x.shape[:-1], 16)
        hidden = hidden + x @ self.down @ self.up
        return F.gelu(hidden) @ self.weight.t()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj(mixed.transpose(1, 2).reshape(x.shape))


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize(
    ('make', 'width', 'dropped'),
    [
        (Functional, 12, ['down', 'weight', 'up']),
        (Attention, 16, ['qkv.weight']),
        (lambda: SelfAttention(16, 2, batch_first=True), 16, ['in_proj_weight']),
    ],
    ids=['functions', 'fused qkv', 'MultiheadAttention'],
)
def test_layers_are_known_by_what_they_compute(make, width, dropped, strategy):
    torch.manual_seed(0)
    model = make().double()
    x = torch.randn(4, 6, width, dtype=torch.float64)
    plain, exact = step(model, x)
    drop_activations(model, strategy, 0.5)
    output, lossy = step(model, x)
    assert torch.equal(output, plain)
    assert lossy.keys() == exact.keys()
    for name in dropped:
        error = (lossy[name] - exact[name]).norm() / exact[name].norm()
        assert 1e-3 < error < 1.5, name
    for name in exact:
        if 'norm' in name or 'bias' in name:
            assert torch.equal(lossy[name], exact[name]), name


class Residual(nn.Module):
    """What keeps memory raw: ReLU shares its output with the convolution behind it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.Dropout(0.2),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x).mean((2, 3))


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('gamma', [0.0, 0.31, 0.5, 0.7, 0.9])
def test_bytes_fall_at_every_gamma_and_the_forward_is_the_plain_one(strategy, gamma):
    torch.manual_seed(0)
    model = Residual()
    x = torch.randn(4, 3, 32, 32)
    before = saved_bytes(lambda: model(x), model)
    lossy = copy.deepcopy(model)
    handle = drop_activations(lossy, strategy, gamma)
    with SavedBytes(lossy) as meter:
        torch.manual_seed(1)
        output, dropped = step(lossy, x)
    torch.manual_seed(1)
    plain, exact = step(model, x)
    assert torch.equal(output, plain)
    assert meter.peak_bytes < before
    assert meter.live_bytes == 0
    if not gamma:
        assert all(torch.equal(dropped[name], exact[name]) for name in exact)
        assert handle.kept.before == 0
    else:
        assert handle.kept.after < handle.kept.before
    for (name, kept), (_, other) in zip(model.named_buffers(), lossy.named_buffers(), strict=True):
        assert torch.equal(kept, other), name


@pytest.mark.parametrize(
    ('settings', 'share'),
    [
        (dict(strategy='mink'), 0.2),
        (dict(strategy='block_mink'), 0.13),
        (dict(strategy='block_mink', values=Cast(torch.bfloat16)), 0.08),
    ],
    ids=['mink', 'blocks', 'blocks in 16 bits'],
)
def test_bytes_of_layers_are_the_promised_share(settings, share):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    x = torch.randn(256, 64)
    before = saved_bytes(lambda: model(x), model)
    assert before == 4 * x.nbytes
    drop_activations(model, gamma=0.9, **settings)
    assert saved_bytes(lambda: model(x), model) <= share * before


def test_products_are_as_many_as_without():
    model, x = Attention(), torch.randn(4, 6, 16)
    with FlopCounterMode(display=False) as plain:
        step(model, x)
    drop_activations(model)
    with FlopCounterMode(display=False) as dropped:
        step(model, x)
    assert dropped.get_total_flops() == plain.get_total_flops() > 0


class Separate(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.q, self.k, self.v = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x):
        x = self.norm(x)
        return self.q(x) + self.k(x) + self.v(x)


def test_what_several_layers_take_is_kept_once():
    torch.manual_seed(0)
    model, x = Separate(), torch.randn(64, 64)
    handle = drop_activations(model, 'mink', 0.9)
    step(model, x)
    before, after = handle.kept.before, handle.kept.after
    assert before == 3 * x.nbytes
    assert after <= 0.15 * x.nbytes
    places = [after for _, after in handle.kept.places.values()]
    assert sorted(places)[:2] == [0, 0]


class KeptAnyway(nn.Module):
    """Something needs the layer's input as it is; before or after the layer runs."""

    def __init__(self, first):
        super().__init__()
        self.layer, self.first = nn.Linear(64, 64), first

    def forward(self, x):
        x = x * 2
        root = x.abs().sqrt() if self.first else None
        y = self.layer(x)
        return y + (x.abs().sqrt() if root is None else root)


@pytest.mark.parametrize('first', [True, False])
def test_an_input_that_is_kept_anyway_is_left_alone(first):
    torch.manual_seed(0)
    model, x = KeptAnyway(first), torch.randn(64, 64, requires_grad=True)
    plain, exact = step(model, x)
    before = saved_bytes(lambda: model(x), model)
    drop_activations(model, 'mink', 0.9)
    output, gradient = step(model, x)
    assert torch.equal(output, plain)
    assert all(torch.equal(gradient[name], exact[name]) for name in exact)
    with SavedBytes(model) as meter:
        held = model(x)
    assert meter.live_bytes == before
    del held


def test_nothing_happens_without_gradients_and_in_evaluation_mode():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(64, 64)
    handle = drop_activations(model)
    with torch.no_grad():
        model(x)
    model.eval()
    assert saved_bytes(lambda: model(x), model) == 2 * x.nbytes
    assert handle.kept.before == 0
    model.train()
    assert saved_bytes(lambda: model(x), model) < x.nbytes


def test_a_frozen_layers_input_is_not_kept():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(64, 64)
    model[0].requires_grad_(False)
    handle = drop_activations(model)
    step(model, x)
    assert list(handle.kept.places) == [('1', 'linear')]


def test_layers_are_left_out_by_name_class_or_attribute():
    def model():
        return nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64)), nn.Linear(64, 64))

    def places(model, **settings):
        handle = drop_activations(model, **settings)
        step(model, torch.randn(64, 64))
        return [name for name, _ in handle.kept.places]

    assert sorted(places(model())) == ['0', '1.0', '2']
    assert sorted(places(model(), exclude='1')) == ['0', '2']
    assert places(model(), modules=['1']) == ['1.0']
    marked = model()
    marked[2].no_dropit = True
    assert sorted(places(marked)) == ['0', '1.0']
    with pytest.raises(ValueError, match="no module '3'"):
        drop_activations(model(), exclude='3')


def test_gamma_by_name_and_in_the_course_of_training():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(64, 64)
    handle = drop_activations(model, gamma={'0': 0.0, '*': 0.5})
    step(model, x)
    assert list(handle.kept.places) == [('1', 'linear')]
    half = handle.kept.after
    handle.gamma = 0.9
    step(model, x)
    assert ('0', 'linear') in handle.kept.places
    assert handle.kept.after - half < half
    with pytest.raises(ValueError, match='gamma'):
        handle.gamma = 1.0
    with pytest.raises(ValueError, match="'3'"):
        drop_activations(nn.Linear(2, 2), gamma={'3': 0.5})


def test_the_model_stays_what_it_is():
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(2, 3, 16, 16)
    keys, names = list(model.state_dict()), [name for name, _ in model.named_modules()]
    handle = drop_activations(model)
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == names
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.manual_seed(1)
        _, expected = step(model, x)
        torch.manual_seed(1)
        _, got = step(other, x)
        assert all(torch.equal(got[name], expected[name]) for name in expected)
        assert saved_bytes(lambda other=other: other(x), other) == saved_bytes(
            lambda: model(x), model
        )
    handle.undo()
    assert not any('forward' in vars(module) for module in model.modules())


def test_a_graph_may_be_used_twice():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)), torch.randn(8, 16)
    drop_activations(model, gamma=0.5)
    loss = model(x).sum()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    again = torch.autograd.grad(loss, list(model.parameters()))
    assert all(map(torch.equal, first, again))


def test_a_tensor_that_is_modified_in_place_is_still_an_error():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x):
            x = x * 1
            root = x.exp()
            y = self.layer(root)
            root.add_(1)
            return y

    model = Wrong()
    drop_activations(model)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        model(torch.randn(64, 64, requires_grad=True)).sum().backward()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_autocast_drops_of_what_it_casts(dtype):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(64, 64)

    def forward():
        with torch.autocast('cpu', dtype):
            return model(x)

    plain, before = forward(), saved_bytes(forward, model)
    handle = drop_activations(model, gamma=0.9)
    assert torch.equal(forward(), plain)
    assert saved_bytes(forward, model) < before - 1.5 * x.nbytes / 2
    forward().float().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert len(handle.kept.places) == 2


def test_strided_and_channels_last_inputs():
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 8, 3, padding=1)
    for x in (
        torch.randn(4, 8, 9, 9).to(memory_format=torch.channels_last),
        torch.randn(4, 9, 9, 16)[..., ::2].permute(0, 3, 1, 2),
        torch.randn(1, 8, 9, 9).expand(4, 8, 9, 9),
    ):
        model = copy.deepcopy(layer)
        plain, exact = step(model, x)
        _, oracle = step(model, smallest_dropped(x, 0.2))
        drop_activations(model, 'mink', 0.2)
        output, dropped = step(model, x)
        assert torch.equal(output, plain)
        distance = (dropped['weight'] - oracle['weight']).norm() / oracle['weight'].norm()
        assert distance < 0.05  # among the equal elements of an expanded tensor any may go
        assert not torch.equal(dropped['weight'], exact['weight'])


def test_inside_checkpointing_nothing_is_kept_and_so_nothing_dropped():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = Attention(), nn.Linear(16, 16)

        def forward(self, x):
            return self.last(checkpoint(self.first, x, use_reentrant=False))

    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(4, 6, 16)
    plain, exact = step(model, x)
    handle = drop_activations(model, gamma=0.5)
    output, gradient = step(model, x)
    assert torch.equal(output, plain)
    assert [name for name, _ in handle.kept.places] == ['last']
    for name in exact:
        assert torch.equal(gradient[name], exact[name]) == (name != 'last.weight'), name


def test_slices_of_the_gradient_cache_drop_each_by_itself():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(32, 64)

    def loss(embeddings):
        return (embeddings @ embeddings.t()).logsumexp(1).mean()

    def cached():
        model.zero_grad()
        value = cached_step(Tower(model, x.split(8)), loss)
        return value, gradients(model)

    _, exact = cached()
    drop_activations(model, 'block_mink', 0.5, block_size='row')
    value, sliced = cached()
    model.zero_grad()
    whole = loss(model(x))
    whole.backward()
    assert torch.allclose(value, whole)
    for name, gradient in gradients(model).items():  # by row, so that slices do not matter
        torch.testing.assert_close(sliced[name], gradient, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(sliced['0.weight'], exact['0.weight'], rtol=1e-3)


@pytest.mark.parametrize(
    'bad', [dict(gamma=1.0), dict(gamma=-0.1), dict(strategy='minc'), dict(block_size='row')]
)
@pytest.mark.parametrize('call', [drop_activations, to_dropit])
def test_settings_that_are_refused(call, bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        call(nn.Linear(2, 2), **bad)


def test_dropping_twice_and_compiled_models_are_refused():
    model = nn.Linear(4, 4)
    drop_activations(model)
    with pytest.raises(ValueError, match='has it already; undo that first'):
        drop_activations(model)
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)])
    drop_activations(blocks)
    with pytest.raises(ValueError, match='compile_blocks and dropit do not go together'):
        compile_blocks(blocks, '0')
    moved = nn.Linear(4, 4)
    offload_activations(moved)
    with pytest.raises(ValueError, match='dropit: activation_offload .* afterwards'):
        drop_activations(moved)
    compiled = nn.Linear(4, 4)
    compiled.compile()
    with pytest.raises(ValueError, match='is compiled'):
        drop_activations(compiled)


def test_the_published_call():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    x = torch.randn(2, 3, 8, 8)
    before = saved_bytes(lambda: model(x), model)
    assert to_dropit(model, strategy='mink', gamma=0.9) is model
    assert saved_bytes(lambda: model(x), model) < 0.5 * before
    undo_dropit(model)
    assert saved_bytes(lambda: model(x), model) == before
    with pytest.raises(ValueError, match='drops nothing'):
        undo_dropit(model)
    to_dropit(model, 'mink', 0.9, True)
    assert saved_bytes(lambda: model(x), model) < 0.5 * before


@pytest.mark.parametrize('gamma', [0.0, 0.9])
def test_an_offload_around_moves_the_codes_and_what_stays_as_it_is(gamma):
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(4, 3, 32, 32)
    drop_activations(model, 'mink', gamma)
    torch.manual_seed(1)
    _, expected = step(model, x)
    with SavedBytes(model) as before:
        held = model(x)
    on_device = before.live_bytes
    del held
    offload = offload_activations(model, 'host', min_bytes=0)
    with SavedBytes(model) as after:
        held = model(x)
    assert after.live_bytes < 0.05 * on_device
    assert offload.stored_bytes > 0.8 * on_device  # all but the model's input
    del held
    torch.manual_seed(1)
    _, got = step(model, x)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert offload.stored_bytes == 0


class Towers(nn.Module):
    """Products of activations that look like layers: their inputs are constants."""

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(64, 32), nn.Linear(64, 32)
        self.words, self.kernel = nn.Embedding(9, 32), nn.Linear(9, 4 * 3 * 3 * 3)

    def forward(self, images, ids):
        logits = self.image(images) @ self.text(images.flip(0)).t()
        logits = logits + self.words(ids) @ self.words(ids.flip(0)).t()
        kernel = self.kernel(images[:1, :9]).view(4, 3, 3, 3)
        maps = F.conv2d(images[:, :48].reshape(-1, 3, 4, 4), kernel)
        return logits.logsumexp(1) + maps.flatten(1).sum(1)


def test_products_of_activations_are_no_layers():
    torch.manual_seed(0)
    model, x, ids = Towers(), torch.randn(16, 64), torch.arange(16) % 9
    plain, exact = step(model, x, ids)
    drop_activations(model, gamma=0.9, exclude=['image', 'text', 'kernel'])
    output, gradient = step(model, x, ids)
    assert torch.equal(output, plain)
    assert all(torch.equal(gradient[name], exact[name]) for name in exact)


@pytest.mark.parametrize(
    'activation',
    [
        lambda: nn.SiLU(inplace=True), lambda: nn.Hardswish(inplace=True),
        lambda: nn.ReLU6(inplace=True), lambda: nn.LeakyReLU(inplace=True),
        lambda: nn.ELU(inplace=True), lambda: nn.ReLU(inplace=True),
    ],
)  # fmt: skip
def test_activations_in_place_are_coded_and_nothing_is_left(activation):
    torch.manual_seed(0)
    layers = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), activation()) for _ in range(4)]
    model, x = nn.Sequential(*(part for some in layers for part in some)), torch.randn(4, 8, 32, 32)
    with SavedBytes(model) as meter:
        held = model(x)
    before = meter.live_bytes
    del held
    drop_activations(model, gamma=0.9)
    quantize_activations(model, 8)
    for _ in range(3):
        with SavedBytes(model) as meter:
            held = model(x)
            assert meter.live_bytes < 0.4 * before
            held.sum().backward()
            del held
            assert meter.live_bytes == 0


def test_what_dies_in_the_forward_is_let_go():
    class Metric(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x):
            for _ in range(20):
                (F.gelu(x * 1.5) * x).softmax(-1).mean()  # its graph ends here
            return self.layer(x)

    model, x = Metric(), torch.randn(256, 64, requires_grad=True)
    before = saved_bytes(lambda: model(x), model)
    drop_activations(model)
    assert saved_bytes(lambda: model(x), model) <= before


def test_copies_within_the_model_are_undone_too():
    """As peft copies a head that it trains beside the original, and others repeat a block."""
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    handle = drop_activations(model, gamma=0.5)
    model.extend([copy.deepcopy(model[2]), copy.deepcopy(model[1])])
    plain = nn.Sequential(
        *(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 8)), nn.GELU()
    )
    plain.load_state_dict(model.state_dict())
    handle.undo()
    assert not any('forward' in vars(module) for module in model.modules())
    inputs = torch.randn(16, 8)
    for network in (model, plain):
        network(inputs).square().mean().backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


def test_undoing_leaves_a_part_with_a_rule_of_its_own():
    """A model whose head drops by a gamma of its own; and a copy of that head."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(64, 64)
    whole = drop_activations(model, gamma=0.5, exclude='1')
    head = drop_activations(model[1], gamma=0.9)
    model.append(copy.deepcopy(model[1]))
    whole.undo()
    model(x).sum().backward()
    assert [('forward' in vars(module)) for module in model] == [False, True, True]
    assert head.kept.before, 'the head drops on'
    head.undo()
    assert 'forward' not in vars(model[1])


def test_undoing_twice_leaves_others_alone():
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(64, 64)
    drop = drop_activations(model)
    quantised = quantize_activations(model, min_numel=1)
    quantised.undo()
    quantised.undo()
    step(model, x)
    assert drop.kept.before
    drop.undo()
    assert 'forward' not in vars(model[0])


def test_what_wraps_a_forward_afterwards_has_to_go_first():
    model = nn.Sequential(nn.Linear(64, 64))
    handle = drop_activations(model)
    inner = model[0].forward
    model[0].forward = lambda x: inner(x)
    with pytest.raises(ValueError, match='forward of 0 was wrapped again'):
        handle.undo()
    model[0].forward = inner
    handle.undo()
    assert not any('forward' in vars(module) for module in model.modules())


def test_names_are_those_of_the_model_that_was_given():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

        def forward(self, x):
            return self.backbone(x)

    model, x = Whole(), torch.randn(64, 64)
    drop = drop_activations(model.backbone, gamma={'2': 0.5})
    rest = quantize_activations(model, {'backbone.*': 8}, min_numel=1)
    step(model, x)
    assert list(drop.kept.places) == [('2', 'linear')]
    assert {name for name, _ in rest.kept.places} == {'backbone.0', 'backbone.1'}


def test_a_checkpoint_around_the_model_keeps_nothing():
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(4, 6, 16, requires_grad=True)
    _, exact = step(model, x)
    handle = drop_activations(model)
    model.zero_grad()
    with SavedBytes(model, x) as meter:
        output = checkpoint(model, x, use_reentrant=False)
    assert meter.live_bytes == 0 == handle.kept.before
    weights = torch.linspace(0.5, 2, output.numel()).view_as(output)
    (output * weights).sum().backward()
    assert all(torch.equal(p.grad, exact[name]) for name, p in model.named_parameters())


def test_a_forward_may_differentiate():
    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x):
            energy = (self.layer(x).tanh() * x).sum()
            return torch.autograd.grad(energy, x)[0], energy

    model, x = Force(), torch.randn(8, 16, requires_grad=True)
    expected = model(x)[0]
    drop_activations(model)
    assert torch.equal(model(x)[0], expected)


def test_an_input_that_is_kept_anyway_and_modified_is_an_error():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x):
            return self.layer(x), x.sin()

    model, x = Both(), torch.randn(64, 64, requires_grad=True)
    handle = drop_activations(model)
    y = model(x)
    assert handle.kept.before == handle.kept.after == 0  # nothing was gained
    with torch.no_grad():
        x.mul_(0)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        y[0].sum().backward()


def test_a_part_is_copied_without_the_rest():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))
    alone = len(pickle.dumps(nn.Linear(64, 64)))
    drop_activations(model)
    assert len(pickle.dumps(model[0])) < alone + 2000
    other = copy.deepcopy(model)
    undo_dropit(other)
    assert 'forward' in vars(model[0])
    assert 'forward' not in vars(other[0])
