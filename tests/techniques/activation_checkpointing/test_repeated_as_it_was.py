"""What the first forward used is what the repeated one uses, or it is refused."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from memengine.techniques import checkpoint_activations

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)


def block():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 6), nn.Tanh()
    ).double()


def gradients(model, between=lambda model: None, calls=1):
    """Of a step with something done between its forward and backward."""
    torch.manual_seed(1)
    loss = sum(model(X * (n + 1)).square().sum() for n in range(calls))
    between(model)
    return torch.autograd.grad(loss, list(model.parameters()))


def assert_exact(model, between=lambda model: None, calls=1):
    expected = gradients(copy.deepcopy(model), between, calls)
    checkpoint_activations(model, '')
    for found, value in zip(gradients(model, between, calls), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-12, atol=0)


@pytest.mark.edge(
    'activation_checkpointing',
    'exact',
    '`eval()`, a rate of dropout or another weight that is set between forward and '
    'backward: the repetition has what the forward had',
)
@pytest.mark.parametrize(
    'between',
    [
        lambda model: model.eval(),
        lambda model: setattr(model[2], 'p', 0.1),
        lambda model: setattr(model[0], 'weight', nn.Parameter(model[0].weight.detach() * 2)),
    ],
    ids=['eval', 'rate of dropout', 'another weight'],
)
def test_what_is_set_between_forward_and_backward_is_for_the_next_forward(between):
    model = block()
    torch.manual_seed(1)
    expected = model(X).square().sum()
    weights = list(model.parameters())
    expected = torch.autograd.grad(expected, weights)
    checkpoint_activations(model, '')
    torch.manual_seed(1)
    loss = model(X).square().sum()
    between(model)
    states = [dict(vars(m)) for m in model.modules()], list(model.parameters())
    for found, value in zip(torch.autograd.grad(loss, weights), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-12, atol=0)
    assert states == ([dict(vars(m)) for m in model.modules()], list(model.parameters()))


@pytest.mark.edge(
    'activation_checkpointing',
    'exact',
    'Parameters that `torch.func.functional_call` has swapped in',
)
def test_functional_call_repeats_with_the_parameters_that_it_was_given():
    model = block().eval()
    given = {name: (p * 1.5).detach().requires_grad_() for name, p in model.named_parameters()}

    def found():
        loss = functional_call(model, given, (X,)).square().sum()
        return torch.autograd.grad(loss, list(given.values()))

    expected = found()
    checkpoint_activations(model, '')
    for one, other in zip(found(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


@pytest.mark.edge(
    'activation_checkpointing',
    'refused',
    'A parameter that is written to between forward and backward',
)
def test_parameters_stepped_before_backward_are_refused():
    model = block()
    checkpoint_activations(model, '')

    def step(model):
        with torch.no_grad():
            model[3].weight.mul_(0.9)

    with pytest.raises(ValueError, match=r'3\.weight of the model changes between its forward'):
        gradients(model, step)


class Counting(nn.Module):
    """Scales by how often it was called, which it keeps in one way or another."""

    def __init__(self, way, warm_up=0):
        super().__init__()
        self.way, self.calls, self.warm_up = way, 0, warm_up
        self.layer = nn.Linear(6, 6).double()
        self.register_buffer('count', torch.ones(()).double())

    def forward(self, x):
        self.calls += 1
        if self.calls > self.warm_up and self.training:
            if self.way == 'in place':
                self.count.add_(1)
            elif self.way == 'buffer':
                self.count = self.count + 1
        return torch.tanh(self.layer(x) * (self.calls if self.way == 'number' else self.count))


@pytest.mark.edge(
    'activation_checkpointing',
    'exact',
    'A number or buffer that each forward replaces: it is counted once',
)
@pytest.mark.parametrize('way', ['number', 'buffer'])
def test_what_a_forward_replaces_is_counted_once(way):
    torch.manual_seed(0)
    model = Counting(way)
    assert_exact(model, calls=3)
    assert model.calls == 3


@pytest.mark.edge(
    'activation_checkpointing',
    'refused',
    'A buffer other than a norm’s statistics that a forward writes to, from whichever call on',
)
@pytest.mark.parametrize('warm_up', [0, 2])
def test_a_buffer_that_is_written_to_is_refused_in_whichever_call(warm_up):
    model = Counting('in place', warm_up)
    checkpoint_activations(model, '')
    gradients(model.eval())  # nothing changes here
    with pytest.raises(ValueError, match='count of the model changes in its forward'):
        for _ in range(3):
            gradients(model.train())


class Silent(nn.Module):
    """Normalises by statistics of its own, which F.batch_norm writes without a version."""

    def __init__(self, reads):
        super().__init__()
        self.reads, self.layer = reads, nn.Linear(6, 6).double()
        self.register_buffer('mean', torch.zeros(6).double())
        self.register_buffer('variance', torch.ones(6).double())

    def forward(self, x):
        x = self.layer(x)
        y = F.batch_norm(x, self.mean, self.variance, training=True)
        return torch.tanh(x * self.mean.clone() if self.reads else y)  # autograd saves the clone


@pytest.mark.edge(
    'activation_checkpointing',
    'exact',
    'Small buffers that `F.batch_norm` or a fused observer writes to without counting a version: '
    'once, and the repetition reads what the forward has read',
)
@pytest.mark.parametrize('kept', [{}, {'keep': 'matmuls'}, {'budget': 0.5}])
@pytest.mark.parametrize('reads', [False, True])
def test_buffers_that_are_written_to_without_a_version_count_once(reads, kept):
    torch.manual_seed(0)
    model = nn.Sequential(Silent(reads), nn.Linear(6, 6).double())
    same = copy.deepcopy(model)
    checkpoint_activations(model, ['0'], **kept)
    for found, value in zip(gradients(model, calls=3), gradients(same, calls=3), strict=True):
        torch.testing.assert_close(found, value, rtol=1e-12, atol=0)
    for found, value in zip(model.buffers(), same.buffers(), strict=True):
        torch.testing.assert_close(found, value, rtol=0, atol=0)


class KeepingResults(nn.Module):
    """Computes something of its weights once, and notes each call."""

    def __init__(self):
        super().__init__()
        self.layer, self.kept, self.sizes = nn.Linear(6, 6).double(), {}, []

    def forward(self, x):
        self.sizes.append(len(x))
        if not hasattr(self, 'scale'):
            self.scale = self.layer.bias.exp()
        self.kept.setdefault('weight', self.layer.weight.tanh())
        return torch.tanh(x @ self.kept['weight'] * self.scale)


@pytest.mark.edge(
    'activation_checkpointing',
    'exact',
    'Results that a module computes in its first call and keeps',
)
def test_results_that_are_kept_are_computed_again_where_they_were_computed():
    torch.manual_seed(0)
    model = KeepingResults()
    assert_exact(model, calls=2)
    assert model.sizes == [4, 4] and set(model.kept) == {'weight'} and model.scale.requires_grad


@pytest.mark.edge(
    'activation_checkpointing',
    'refused',
    'Spectral norm (the parametrisation) in training, which writes its vectors; in eval '
    'mode it is exact',
)
def test_spectral_norm_is_exact_in_eval_mode_and_refused_where_it_iterates():
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh())
    assert_exact(model.double().eval())
    with pytest.raises(ValueError, match=r'_u of the model changes in its forward'):
        gradients(model.train())


@pytest.mark.edge(
    'activation_checkpointing',
    'exact',
    'A weight that a pre-hook computes outside of the wrapped forward (the older spectral '
    'norm): it is that of its call',
)
def test_a_weight_that_a_hook_computes_outside_is_the_one_of_its_call():
    torch.manual_seed(0)
    model = nn.utils.spectral_norm(nn.Linear(6, 6)).double().eval()
    checkpoint_activations(model, '')
    loss = model(X).tanh().sum()
    weight = model.weight
    model.weight_u = model.weight_u.flip(0)
    model(X)
    assert not torch.equal(model.weight, weight)
    found = torch.autograd.grad(loss, model.weight_orig, retain_graph=True)
    expected = torch.autograd.grad((X @ weight.T + model.bias).tanh().sum(), model.weight_orig)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.edge(
    'activation_checkpointing',
    'exact',
    'A module that ends in `nn.RReLU`, which saves its noise before it fills it: it is repeated to '
    'its end',
)
@pytest.mark.parametrize('kept', [{}, {'keep': 'matmuls'}, {'budget': 0.5}])
def test_noise_that_is_filled_after_it_is_saved(kept, fresh_memory_is_nan):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.RReLU()).double()
    expected = gradients(copy.deepcopy(model))
    checkpoint_activations(model, '', **kept)
    for _ in range(2):
        for found, value in zip(gradients(model), expected, strict=True):
            torch.testing.assert_close(found, value, rtol=1e-12, atol=0)


class Stashing(nn.Module):
    """Keeps its last result, with its graph."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(6, 6).double(), None

    def forward(self, x):
        self.seen = self.layer(x)
        return self.seen.tanh()


def test_results_of_a_step_before_are_let_go():
    model = Stashing()
    checkpoint_activations(model, '')
    model(X).sum().backward()
    before = weakref.ref(model.seen)
    out = model(X)
    gc.collect()
    assert before() is None
    out.sum().backward()


class OwnGenerator(nn.Module):
    """Drops by a generator of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.generator = nn.Linear(6, 6).double(), None

    def forward(self, x):
        kept = torch.rand(x.shape, generator=self.generator, device=x.device) < 0.5
        return self.layer(x).tanh() * kept


@pytest.mark.edge(
    'activation_checkpointing',
    'exact',
    'Random numbers from a `torch.Generator` that a module inside has as an attribute: the '
    'repetition draws the same',
)
def test_a_generator_of_a_modules_own_is_replayed():
    torch.manual_seed(0)
    model = OwnGenerator()
    same = copy.deepcopy(model)
    checkpoint_activations(model, '')
    for each in (model, same):
        each.generator = torch.Generator(torch.get_default_device()).manual_seed(3)
    for _ in range(2):
        for found, value in zip(gradients(model), gradients(same), strict=True):
            torch.testing.assert_close(found, value, rtol=1e-12, atol=0)


@pytest.mark.edge(
    'activation_checkpointing',
    'exact',
    '`torch.func.grad`, `vjp`, `jvp` and `vmap`: nothing is checkpointed',
)
@pytest.mark.parametrize('options', [{}, dict(keep='matmuls'), dict(budget=0.5)])
@pytest.mark.parametrize('transform', ['grad', 'vjp', 'jvp', 'vmap', 'gradient of vmap'])
def test_transforms_of_torch_func_run_as_without(transform, options):
    model, x = nn.Sequential(block().eval()), X.detach()

    def loss(x):
        return model(x).square().sum()

    def result():
        if transform == 'grad':
            return torch.func.grad(loss)(x)
        if transform == 'vjp':
            return torch.func.vjp(loss, x)[1](torch.ones((), dtype=x.dtype))[0]
        if transform == 'jvp':
            return torch.func.jvp(loss, (x,), (x,))[1]
        losses = torch.func.vmap(lambda row: loss(row[None]))(x)
        if transform == 'vmap':
            return losses
        return torch.autograd.grad(losses.sum(), next(model.parameters()))[0]

    expected = result()
    checkpoint_activations(model, '0', **options)
    torch.testing.assert_close(result(), expected, rtol=0, atol=0)
