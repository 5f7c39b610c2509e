"""What one forward keeps and computes again is replayed in later ones, until anything differs."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from memengine.memory import SavedBytes, saved_bytes
from memengine.techniques import (
    drop_activations,
    offload_activations,
    quantize_activations,
    recompute_activations,
)
from memengine.techniques.compression.hooks import forward_graph, forward_hooks
from memengine.techniques.compression.hooks.compressed_forward import CompressedForward
from memengine.techniques.compression.replay import ForwardPlans
from memengine.techniques.modules.private_random import restart_private_generators
from memengine.techniques.modules.wrapped_forward import wrapper_of


class Changing(nn.Module):
    """Of one input, whose way through it can be changed in one respect at a time."""

    def __init__(self):
        super().__init__()
        self.part = nn.GELU()
        self.dtype, self.rows, self.more = torch.float32, 8, ()

    def forward(self, x):
        x = x.to(self.dtype)[: self.rows]
        if 'nodes' in self.more:
            x = x + 1
        x = self.part(x.exp().sin())
        if 'less is saved' not in self.more:
            x = x.cos()
        return x.sin() if 'more is saved' in self.more else x


def change_input_layout(model, x):
    return x.detach().T.contiguous().T.requires_grad_()


def set_to(name, value):
    def change(model, x):
        setattr(model, name, value)
        return x

    return change


def add_a_rule(model, x):
    quantize_activations(model.part)
    return x


CHANGES = {
    'node': set_to('more', ('nodes',)),
    'shape': set_to('rows', 4),
    'stride': change_input_layout,
    'dtype': set_to('dtype', torch.float64),
    'rules': add_a_rule,
    'more is saved': set_to('more', ('more is saved',)),
    'less is saved': set_to('more', ('less is saved',)),
}


def gradient(model, x):
    (found,) = torch.autograd.grad(model(x).double().square().sum(), x)
    return found


def plans_of(model):
    return wrapper_of(model, CompressedForward)._plans._plans


def count_looks(monkeypatch):
    """What operations were looked at is appended to the list."""
    looked_at = []
    plain = forward_hooks.needs_of
    monkeypatch.setattr(
        forward_hooks, 'needs_of', lambda node: looked_at.append(node.name()) or plain(node)
    )
    return looked_at


@pytest.mark.parametrize('what', CHANGES)
def test_what_differs_drops_the_plan(what, monkeypatch):
    x = torch.randn(8, 8, dtype=torch.bfloat16, requires_grad=True)
    plain, model = Changing().train(), Changing().train()
    recompute_activations(model)
    looked_at = count_looks(monkeypatch)
    for step in range(1, 6):
        looked_at.clear()
        assert torch.equal(gradient(model, x), gradient(plain, x))
        assert bool(looked_at) == (step & (step - 1) == 0)  # the first, second and fourth time
    changed = CHANGES[what](model, x)
    plain.dtype, plain.rows, plain.more = model.dtype, model.rows, model.more
    found = gradient(model, changed)
    assert not plans_of(model)
    if what != 'rules':  # which is lossy
        assert torch.equal(found, gradient(plain, changed))
    gradient(model, changed)
    assert plans_of(model)  # is noted again
    looked_at.clear()


def test_steps_that_follow_a_plan_are_the_plain_ones(monkeypatch):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, F.gelu, batch_first=True, norm_first=True)
    plain = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train()
    model = copy.deepcopy(plain)
    recompute_activations(model)
    looked_at, numbers = count_looks(monkeypatch), []
    for step in range(8):
        x = torch.randn(4, 6, 16)
        grads = []
        for one in (plain, model):
            torch.manual_seed(step)
            looked_at.clear()
            grads.append(torch.autograd.grad(one(x).square().sum(), list(one.parameters())))
        numbers.append(len(looked_at))
        assert all(map(torch.equal, *grads))
    assert max(numbers[i] for i in (2, 4, 5, 6)) < min(numbers[i] for i in (0, 1, 3, 7)) / 2


class Factors(nn.Module):
    """A product of two results; the shape of the second may change, after the first is let go."""

    def __init__(self):
        super().__init__()
        self.rows = 8

    def forward(self, x):
        return F.gelu(x.sin()) * x[: self.rows].cos()


def test_a_plan_that_ends_between_what_one_operation_saves():
    model, plain = Factors().train(), Factors().train()
    recompute_activations(model)
    x = torch.randn(8, 8, requires_grad=True)
    for rows in (8, 8, 8, 1, 8):
        model.rows = plain.rows = rows
        assert torch.equal(gradient(model, x), gradient(plain, x))


def test_what_autocast_saves_beside_a_result_that_was_let_go():
    """Its copies of weights, which offload may move, and so have to be looked at each time."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)).train()
    model = copy.deepcopy(plain)
    recompute_activations(model)
    offload_activations(model, min_bytes=1)
    x = torch.randn(8, 16, requires_grad=True)
    with torch.autocast('cpu', torch.bfloat16):
        for _ in range(4):
            assert torch.equal(gradient(model, x), gradient(plain, x))


class Swapped(nn.Module):
    """A part may be given the result that is computed again, as later on one needs it whole."""

    def __init__(self):
        super().__init__()
        self.part, self.layer = nn.SiLU(), nn.Linear(16, 16)
        self.is_swapped = False

    def forward(self, x):
        h = x.sin()
        result, other = F.gelu(h), h.cos()
        y = self.part(result if self.is_swapped else other)
        return y.sum() + (result.sin() if self.is_swapped else result @ self.layer.weight).sum()


def test_what_is_coded_by_now_is_not_let_go_by_plan():
    torch.manual_seed(0)
    plain = Swapped().train()
    model = copy.deepcopy(plain)
    recompute_activations(model, exclude=['part'])
    quantize_activations(model, 1, modules=['part'], min_numel=1)
    x = torch.randn(64, 16, requires_grad=True)
    for step in (1, 2, 3):
        plain.is_swapped = model.is_swapped = step == 3
        is_same = torch.equal(gradient(model, x), gradient(plain, x))
        assert is_same == plain.is_swapped  # as the sine needs all of it whole


class Chain(nn.Module):
    """Many operations of one module; says how many results are there when each has ended."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(16, 16) / 4 for _ in range(12))

    def forward(self, x):
        self.results, self.activated = [], []
        self.most = 0
        for weight in self.weights:
            activated = F.gelu(x)
            x = activated @ weight
            self.results.append(weakref.ref(x.untyped_storage()))
            self.activated.append(weakref.ref(activated.untyped_storage()))
            del activated
            self.most = max(self.most, sum(result() is not None for result in self.results))
        self.left = sum(result() is not None for result in self.activated)
        return x


def test_a_module_of_many_operations_holds_few_results_raw():
    model = Chain().train()
    quantize_activations(model, min_numel=1)
    for _ in range(3):
        model(torch.randn(64, 16)).sum().backward()
        assert model.most <= 5  # of twelve


def test_results_that_were_computed_again_are_let_go_when_they_are_saved():
    model = Chain().train()
    recompute_activations(model)
    left = []
    for _ in range(3):
        model(torch.randn(64, 16, requires_grad=True)).sum().backward()
        left.append(model.left)
    assert left[0] > 0
    assert left[2] == 0


def test_a_plan_holds_nothing_of_the_forward_that_it_is_from():
    model = Chain().train()
    recompute_activations(model)
    for _ in range(3):
        model(torch.randn(64, 16, requires_grad=True)).sum().backward()
        gc.collect()
        assert not any(one() is not None for one in model.results + model.activated)
    assert plans_of(model)


class NeededTwice(nn.Module):
    """A result that its own operation needs as it is, and a layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, x):
        return self.layer(x.exp())


def test_no_code_is_kept_beside_what_stays_by_plan():
    model = NeededTwice().train()
    quantize_activations(model)
    x = torch.randn(64, 256, requires_grad=True)
    sizes = [saved_bytes(lambda: model(x), model) for _ in range(3)]
    assert sizes == [x.nbytes] * 3


class Attention(nn.Module):
    """With scores so large that four bits of queries and keys change them by much."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x):
        q, k, v = (self.qkv(x) * 8).view(8, 32, 3, 1, 64).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v)


def test_attention_to_codes_of_fewer_bits_than_planned():
    """Its row sums follow queries and keys, whatever bits these had in earlier steps."""
    torch.manual_seed(0)
    x, model = torch.randn(8, 32, 64), Attention().train()
    model(x).square().sum().backward()
    plain = model.qkv.weight.grad.norm()
    rule = quantize_activations(model, 8, min_numel=1)
    for _ in range(5):
        model(x).sum().backward()
    rule.bits_of = {('the model', 'attention'): 4}
    model.zero_grad()
    model(x).square().sum().backward()
    assert model.qkv.weight.grad.norm() < 10 * plain


def coded_gradients(model, x, seed=0):
    """Of a model whose codes round by the seed."""
    torch.manual_seed(seed)
    restart_private_generators()
    parameters = [p for p in model.parameters() if p.requires_grad]
    loss = model(x).double().square().sum()
    return torch.autograd.grad(loss, [*parameters, x], allow_unused=True)


@pytest.mark.parametrize('min_numel', [1, 3000], ids=['', 'small ones stay'])
@pytest.mark.parametrize('bits', [8, 4, {'attention': 2, 'linear': 8, 'norm': 4}], ids=str)
@pytest.mark.parametrize('others', ['', 'recomputed', 'dropped'])
def test_what_is_coded_is_the_same_by_plan(others, bits, min_numel, monkeypatch):
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(32, 2, 64, 0.0, F.gelu, batch_first=True, norm_first=True)
    model = nn.Sequential(block, Attention32(), nn.ReLU6(inplace=True), nn.Linear(32, 32)).train()
    if others == 'recomputed':
        recompute_activations(model)
    if others == 'dropped':
        drop_activations(model, gamma=0.5)
    quantize_activations(model, bits, min_numel=min_numel)
    looked_into = []
    plain = forward_graph.saved_by
    monkeypatch.setattr(
        forward_graph,
        'saved_by',
        lambda node, field: looked_into.append(field) or plain(node, field),
    )
    searched = []
    for step in range(7):
        x = torch.randn(8, 16, 32, requires_grad=True)
        expected = coded_gradients(copy.deepcopy(model), x, step)  # which has no plan
        looked_into.clear()
        assert all(map(torch.equal, coded_gradients(model, x, step), expected))
        searched.append(len(looked_into))
    assert max(searched[2], *searched[4:7]) < min(searched[0], searched[1], searched[3]) / 2


class Attention32(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = (self.qkv(x) * 4).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)


class OneOrTheOther(nn.Module):
    """Two operations that save their result alike; of one alone it may be coded."""

    def __init__(self):
        super().__init__()
        self.function = torch.tanh

    def forward(self, x):
        return self.function(x) * 2


def test_another_operation_in_the_place_of_one_that_is_coded():
    model, x = OneOrTheOther().train(), torch.randn(64, 64, requires_grad=True)
    quantize_activations(model, 1)
    for _ in range(3):
        assert not torch.equal(gradient(model, x), 8 * x.tanh() * (1 - x.tanh().square()))
    model.function = torch.exp
    assert plans_of(model)
    (found,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(found, 2 * x.exp())


class Layers(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layers, self.function = nn.ModuleList(nn.Linear(32, 32) for _ in range(3)), function

    def forward(self, x):
        return self.function(x, *self.layers)


def branches(x, a, b, c):
    return a(x).sin() * b(x).cos()


def attended(x, a, b, c):
    scores = torch.bmm(a(x), b(x).transpose(1, 2))
    return torch.bmm(scores.softmax(-1), c(x))


def many_of_which_half_stay(x, a, b, c):
    for _ in range(8):
        x = F.gelu(x.exp().sin())
    return x


def coded_before_it_has_to_stay(x, a, b, c):
    y = a(x)
    return c(b(y)) + y.sin()


def one_of_two_that_share_a_code_is_let_go(x, a, b, c):
    y = a(x)
    z = c(y)
    b(F.gelu(y))
    return b(z)


def chain_of_products(x, a, b, c):
    for layer in (a, b, c) * 3:
        x = torch.tanh(x) @ layer.weight
    return x


FUNCTIONS = [
    *(branches, attended, many_of_which_half_stay, chain_of_products),
    *(coded_before_it_has_to_stay, one_of_two_that_share_a_code_is_let_go),
]


@pytest.mark.parametrize('function', FUNCTIONS)
@pytest.mark.parametrize('ranges', ['group', 'running'])
def test_codes_draw_the_same_noise_by_plan(function, ranges):
    """So that a run that is resumed, which has no plan at first, goes on as it would have."""
    torch.manual_seed(0)
    model = Layers(function).train()
    quantize_activations(model, 8, ranges=ranges, min_numel=1)
    for step in range(8):
        x = torch.randn(4, 16, 32, requires_grad=True)
        found = [coded_gradients(one, x, step) for one in (copy.deepcopy(model), model)]
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(*found, strict=True))


def attention_beside_a_layer(x, a, b, c):
    y = a(x)
    attended = F.scaled_dot_product_attention(y, y, y)
    return F.linear(attended, b.weight) + F.linear(y, c.weight)


def test_attention_in_few_bits_whose_memory_has_many_for_a_layer():
    torch.manual_seed(0)
    model = Layers(attention_beside_a_layer).train()
    quantize_activations(model, {'attention': 2, 'linear': 8}, min_numel=1)
    for step in range(8):
        x = torch.randn(2, 2, 16, 32, requires_grad=True)
        found = [coded_gradients(one, x, step) for one in (copy.deepcopy(model), model)]
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_a_plan_codes_stays_where_that_takes_no_less():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64)).train(), torch.randn(64, 64)
    (exact,) = torch.autograd.grad(model(x).square().sum(), model[0].weight)
    handle = drop_activations(model, gamma=0.9)
    for gamma in (0.9, 0.9, 0.01):
        handle.gamma = gamma
        (found,) = torch.autograd.grad(model(x).square().sum(), model[0].weight)
        assert torch.equal(found, exact) == (gamma == 0.01)


def test_a_rule_of_a_module_within_changes_its_mind():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).train()
    plain, x = copy.deepcopy(model), torch.randn(64, 32)
    recompute_activations(model)
    rule = quantize_activations(model[1], 1, min_numel=1)
    weights = [model[1].weight, plain[1].weight]
    for step in range(7):
        if step == 4:
            rule.bits_of = {('the model', 'linear'): 32}
        losses = [one(x).square().sum() for one in (model, plain)]
        found, exact = (torch.autograd.grad(*pair)[0] for pair in zip(losses, weights, strict=True))
        assert torch.equal(found, exact) == (step >= 4)


class WithMore(nn.Module):
    """A result that is coded, and has to stay when there is more."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.is_more = nn.Linear(64, 64), nn.Linear(64, 64), False

    def forward(self, x):
        y = self.first(x)
        z = self.second(y)
        return z, y.sin() if self.is_more else None


def test_what_stays_after_all_is_counted():
    torch.manual_seed(0)
    model, x = WithMore().train(), torch.randn(64, 64)
    quantize_activations(model, min_numel=1)
    for _ in range(2):
        model(x)[0].sum().backward()
    model.is_more = True
    live = []
    for one in (copy.deepcopy(model), model):
        with SavedBytes(one, x) as meter:
            z, more = one(x)
            del more
            live.append(meter.live_bytes)
            z.sum().backward()
    assert live[0] == live[1]


@pytest.mark.parametrize('inplace', [False, True])
def test_what_acts_in_place_is_computed_again_by_plan(inplace):
    """Of its input a copy was saved, under the next node's number."""
    layers = [nn.Linear(16, 16), nn.SiLU(inplace), nn.LayerNorm(16), nn.Linear(16, 16)]
    model = nn.Sequential(*layers).train()
    recompute_activations(model)
    x = torch.randn(8, 16, requires_grad=True)
    sizes = [saved_bytes(lambda: model(x), model) for _ in range(6)]
    assert len(set(sizes)) == 1


class Swap(nn.Module):
    """A constant stands where a result was, or the other factor, or one whose sign is lazy."""

    def __init__(self, what):
        super().__init__()
        self.what, self.is_swapped = what, False
        self.register_buffer('table', torch.rand(8, 64, 64))
        self.frozen = nn.Parameter(torch.rand(8, 64, 64), requires_grad=False)

    def forward(self, x):
        result = x.detach().cos()[:4]
        if self.what == 'factor':
            one, other = x[0].sin(), x.detach().cos()[0]
            return torch.mm(one, other) if self.is_swapped else torch.mm(other, one)
        if self.what == 'sign':
            z, shape = torch.fft.fft(x), x.shape
            real = F.gelu(z.real)
            lazy = z.conj().imag if self.is_swapped else z.view(shape).view(shape).imag.view(shape)
            return real + F.gelu(lazy)
        own = self.table if self.what == 'buffer' else self.frozen
        return x.sin() * (own[:4] if self.is_swapped else result)


@pytest.mark.parametrize('what', ['buffer', 'frozen', 'factor', 'sign'])
def test_what_stands_in_the_place_of_what_is_coded_is_kept_as_without_a_plan(what):
    torch.manual_seed(0)
    model, x = Swap(what).train(), torch.randn(4, 64, 64, requires_grad=True)
    quantize_activations(model, 4)
    for _ in range(2):
        coded_gradients(model, x)
    model.is_swapped = True
    found = [coded_gradients(one, x)[-1] for one in (model, copy.deepcopy(model))]
    assert torch.equal(*found)


def test_a_buffer_of_the_models_own_that_it_is_given_is_kept():
    torch.manual_seed(0)
    model = nn.Linear(64, 64).train()
    model.register_buffer('table', torch.randn(64, 64))
    quantize_activations(model, 4, min_numel=1)
    for _ in range(2):
        model(torch.randn(64, 64)).sum().backward()
    for one in (copy.deepcopy(model), model):
        assert not saved_bytes(lambda one=one: one(one.table), one)


def test_what_may_be_computed_again_now_is_not_dropped_by_plan():
    x, model = torch.randn(8, 16, 32, requires_grad=True), Layers(lambda x, a, *_: a(x.sin().abs()))
    model.train()
    recompute_activations(model)
    drop_activations(model, gamma=0.9)
    for _ in range(2):
        coded_gradients(model, x)
    model.function = lambda x, a, *_: a(F.gelu(x.sin()))
    found = torch.autograd.grad(model(x).sum(), model.layers[0].weight)[0]
    exact = F.gelu(x.sin()).sum((0, 1)).expand(32, 32)
    assert torch.allclose(found, exact, rtol=1e-4)


@pytest.mark.parametrize(
    ('norm', 'activation'),
    [
        (nn.LayerNorm(8, elementwise_affine=False), nn.SiLU(inplace=True)),
        (nn.BatchNorm2d(4).requires_grad_(False), nn.SiLU(inplace=True)),
        (nn.GroupNorm(2, 4).requires_grad_(False), nn.Hardswish(inplace=True)),
    ],
    ids=['layer', 'batch', 'group'],
)
def test_a_frozen_norm_before_what_acts_in_place(norm, activation):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 1), norm, activation, nn.Conv2d(4, 4, 1)
    plain = nn.Sequential(*layers).train()
    model = copy.deepcopy(plain)
    recompute_activations(model)
    for _ in range(5):
        x = torch.randn(2, 3, 8, 8, requires_grad=True)
        assert torch.equal(gradient(model, x), gradient(plain, x))


def test_rules_that_change_their_mind_have_other_plans():
    torch.manual_seed(0)
    x = torch.randn(64, 32, requires_grad=True)
    plain = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)).train()
    exact = coded_gradients(plain, x)
    model = copy.deepcopy(plain)
    bits = quantize_activations(model, {'linear': 32, 'activation': 32})
    for width in (32, 2, 32):
        bits.bits_of = {(name, need): width for name in '012' for need in ('linear', 'activation')}
        for _ in range(5):  # of one plan, the first, second and fourth would not follow it
            assert all(map(torch.equal, coded_gradients(model, x), exact)) == (width == 32)
    model = copy.deepcopy(plain)
    shares = drop_activations(model, gamma=0.0)
    for gamma in (0.0, 0.5, 0.0):
        shares.gamma = gamma
        for _ in range(5):
            assert all(map(torch.equal, coded_gradients(model, x), exact)) == (gamma == 0)


def test_plans_of_the_last_few_shapes_are_kept():
    plans = ForwardPlans()
    for length in [*range(1, 20), 19]:
        plans.begin([torch.empty(length)], []).finish(False, {})
    assert len(plans._plans) == 8
    assert ((torch.Size([19]), torch.float32),) in plans._plans


def test_copies_and_pickles_have_no_plan():
    model = Changing().train()
    recompute_activations(model)
    gradient(model, torch.randn(8, 8, requires_grad=True))
    assert plans_of(model)
    assert not plans_of(copy.deepcopy(model))


class WithBuffer(Changing):
    """Saves a buffer, of which a plan knows that it stays as it is."""

    def __init__(self):
        super().__init__()
        self.register_buffer('scale', torch.linspace(1, 2, 8))

    def forward(self, x):
        return super().forward(x * self.scale)


def test_what_the_model_owns_is_not_looked_for_by_plan(monkeypatch):
    asked = []
    plain_owned_by = forward_hooks.owned_by
    monkeypatch.setattr(
        forward_hooks, 'owned_by', lambda owners: asked.append(owners) or plain_owned_by(owners)
    )
    plain, model = WithBuffer().train(), WithBuffer().train()
    recompute_activations(model)
    x = torch.randn(8, 8, requires_grad=True)
    for step in range(1, 8):
        asked.clear()
        if step == 6:  # in the middle of steps that follow the plan
            plain.scale, model.scale = plain.scale * 2, model.scale * 2
        assert torch.equal(gradient(model, x), gradient(plain, x))
        assert bool(asked) == (step & (step - 1) == 0)
    assert plans_of(model)


class Settings(nn.Module):
    """Operations that are computed again, each with a setting that no saved tensor shows."""

    def __init__(self):
        super().__init__()
        self.norm, self.batch_norm = nn.LayerNorm(16), nn.BatchNorm1d(16)
        self.group_norm = nn.GroupNorm(4, 16)
        self.gelu, self.softplus = nn.GELU(), nn.Softplus()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.p = 0.5

    def forward(self, x):
        x = self.layers[0](self.norm(x))
        x = self.layers[1](self.batch_norm(x))
        x = self.layers[2](F.relu(self.group_norm(x)))
        x = self.layers[3](self.gelu(x))
        x = self.layers[4](self.softplus(x))
        return self.layers[5](F.dropout(F.silu(x), self.p))


def replace_weight(model):
    model.norm.weight = nn.Parameter(torch.linspace(1, 2, 16))


def replace_bias(model):
    model.group_norm.bias = nn.Parameter(torch.linspace(1, 2, 16))


SETTINGS = {
    'epsilon': lambda model: setattr(model.norm, 'eps', 0.5),
    'epsilon of groups': lambda model: setattr(model.group_norm, 'eps', 0.5),
    'weight': replace_weight,
    'bias': replace_bias,
    'training': lambda model: model.batch_norm.eval(),
    'approximation': lambda model: setattr(model.gelu, 'approximate', 'tanh'),
    'beta': lambda model: setattr(model.softplus, 'beta', 2.0),
    'probability': lambda model: setattr(model, 'p', 0.25),
}


@pytest.mark.parametrize('what', SETTINGS)
def test_a_setting_that_changes_in_steps_that_follow_a_plan(what):
    torch.manual_seed(0)
    plain = Settings().train()
    model = copy.deepcopy(plain)
    rule = recompute_activations(model)
    x = torch.randn(8, 16)
    for step in range(1, 8):
        if step == 6:
            SETTINGS[what](plain)
            SETTINGS[what](model)
        grads = []
        for one in (plain, model):
            torch.manual_seed(step)
            grads.append(torch.autograd.grad(one(x).square().sum(), [*one.parameters()]))
        assert all(map(torch.equal, *grads))
    assert rule.kept.after < rule.kept.before


class Ways(nn.Module):
    """Of two results, the way of which differs without a trace in what is saved before them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.way = ''

    def forward(self, x):
        a, b = F.gelu(x.sin()), F.gelu(x.cos())
        c = F.relu(F.silu(x) if self.way == 'operation before' else F.gelu(x))
        if self.way == 'other branch':
            a, b = b, a
        if self.way == 'written to':
            with torch.no_grad():
                a.mul_(2)
        if self.way == 'part of other memory':
            a.data = torch.cat([2 * a.data, b.data])[:8]
        d = (a if self.way == 'other factor' else b) * b
        return sum(layer(y) for layer, y in zip(self.layers, (a, c, d), strict=True))


@pytest.mark.parametrize(
    'way',
    ['operation before', 'other branch', 'written to', 'part of other memory', 'other factor'],
)
def test_another_way_in_a_step_that_follows_a_plan(way):
    torch.manual_seed(0)
    plain = Ways().train()
    model = copy.deepcopy(plain)
    rule = recompute_activations(model)
    x = torch.randn(8, 16, requires_grad=True)
    for step in range(1, 8):
        plain.way = model.way = way if step > 5 else ''
        before = rule.kept.before
        grads = [
            torch.autograd.grad(one(x).sum(), [x, *one.parameters()]) for one in (plain, model)
        ]
        assert all(map(torch.equal, *grads))
    assert rule.kept.before > before


class Squared(nn.Module):
    """Saves one result twice, and needs both at the same time."""

    def forward(self, x):
        y = F.gelu(x)
        return y * y


class CountGelu(TorchDispatchMode):
    """Counts how often it is computed."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.gelu.default
        return function(*args, **(kwargs or {}))


class Scaling(nn.Module):
    """By a parameter that is frozen, so that nothing but that is saved."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8), requires_grad=False)

    def forward(self, x):
        return x * self.weight


def test_a_parameter_that_is_sharded_again_in_a_step_that_follows_a_plan():
    model = nn.Sequential(nn.GELU(), Scaling(), nn.Linear(8, 8)).train()
    handle = recompute_activations(model)
    x = torch.randn(4, 8, requires_grad=True)
    bytes_let_go = []

    def result():
        before = handle.kept.before
        found = model(x).square().sum()
        bytes_let_go.append(handle.kept.before - before)
        return found

    for _ in range(5):
        (expected,) = torch.autograd.grad(result(), x)
    memory = model[1].weight.untyped_storage()
    values = memory.clone()

    def shard_again(*_):
        memory.resize_(0)

    model[1].register_forward_hook(shard_again)
    last = result()
    memory.resize_(values.nbytes())
    memory.copy_(values)
    assert torch.equal(torch.autograd.grad(last, x)[0], expected)
    assert bytes_let_go == [x.nbytes] * 5 + [0]


def test_memory_that_is_saved_twice_is_computed_again_once_by_plan():
    model = Squared().train()
    recompute_activations(model)
    for _ in range(4):
        y = model(torch.randn(8, 8, requires_grad=True))
        with CountGelu() as counted:
            y.sum().backward()
        assert counted.count == 1


class Mixed(nn.Module):
    """Saves a matrix of few entries beside what is coded."""

    def __init__(self):
        super().__init__()
        self.layer, self.matrix = nn.Linear(16, 16), torch.eye(8).to_sparse()

    def forward(self, x):
        return torch.sparse.mm(self.matrix, F.gelu(self.layer(x)))


@pytest.mark.parametrize('technique', [recompute_activations, quantize_activations])
def test_what_is_sparse_passes_by_plan(technique):
    model = Mixed().train()
    technique(model)
    for _ in range(4):
        x = torch.randn(8, 16, requires_grad=True)
        assert gradient(model, x).isfinite().all()
