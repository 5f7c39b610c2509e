"""Modules of TorchScript, which hold what they have in C++ and take no wrapper inside."""

import pytest
import torch
from torch import nn

from memengine.techniques import checkpoint_activations, recompute_activations
from memengine.techniques.slices.grad_cache import Tower, cached_step
from memengine.techniques.slices.slicing import split_batch
from memengine.testing import assert_same_step

pytestmark = pytest.mark.filterwarnings('ignore:.*torch.jit')  # is deprecated, and in use
X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)


class Counting(nn.Module):
    """A number, a list and a buffer that every forward replaces and reads."""

    calls: int

    def __init__(self):
        super().__init__()
        self.layer, self.drop, self.calls, self.seen = nn.Linear(6, 6), nn.Dropout(0.5), 0, [1]
        self.register_buffer('mean', torch.zeros(6, dtype=torch.float64))

    def forward(self, x):
        self.calls += 1
        y = self.drop(self.layer(x)).tanh() * self.calls * self.seen[0] - self.mean
        self.mean = self.mean * 0.9 + y.detach().mean(0)
        self.seen = [self.seen[0] + 1]
        return y


def network(number):
    torch.manual_seed(0)
    scripted = torch.jit.script(Counting().double())
    if number:  # its last saved tensor is one of Python's
        return nn.Sequential(nn.Linear(6, 6).double(), scripted, nn.GELU())
    return scripted


def step(model):
    """Two steps, each with another mode set before backward."""
    torch.manual_seed(1)
    for _ in range(2):
        loss = model(X).square().sum()
        model.eval()
        loss.backward()
        model.train()
    found = {name: p.grad for name, p in model.named_parameters()}
    scripted = next(m for m in model.modules() if isinstance(m, torch.jit.ScriptModule))
    assert scripted.calls == 2
    assert scripted.seen == [3]
    return {**found, **dict(model.named_buffers()), 'drawn': torch.rand(3)}


@pytest.mark.edge(
    'activation_checkpointing',
    'exact',
    'Modules of TorchScript, checkpointed themselves or inside: their mode, numbers and buffers '
    'are those of the forward',
)
@pytest.mark.parametrize('number', range(2))
@pytest.mark.parametrize('settings', [{}, {'keep': 'matmuls'}, {'budget': 0.5}], ids=str)
def test_checkpointing(number, settings):
    expected, model = step(network(number)), network(number)
    checkpoint_activations(model, '', **settings)
    assert_same_step(step(model), expected)


def test_checkpointing_does_not_stop_within_a_script():
    torch.manual_seed(0)
    model = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))).double()
    model(X).square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    checkpoint_activations(model, '')
    model(X).square().sum().backward()
    assert_same_step({name: p.grad for name, p in model.named_parameters()}, expected)


def test_a_traced_module_has_its_forward():
    torch.manual_seed(0)
    traced = torch.jit.trace(nn.Sequential(nn.Linear(6, 6), nn.GELU()).double(), X)
    model = nn.Sequential(traced, nn.Linear(6, 2).double())
    expected = model(X)
    with recompute_activations(model):
        assert torch.equal(model(X), expected)
    assert torch.equal(model(X), expected)


def test_the_gradient_cache_repeats_slices_as_they_were():
    def gradients(model):
        return {name: p.grad for name, p in model.named_parameters()}

    model, expected = network(1), network(1)
    torch.manual_seed(1)
    torch.cat([expected(piece) for piece in split_batch(X, 3)]).square().sum().backward()
    torch.manual_seed(1)
    cached_step(Tower(model, split_batch(X, 3)), lambda z: z.square().sum())
    assert_same_step(gradients(model), gradients(expected))
    assert_same_step(dict(model.named_buffers()), dict(expected.named_buffers()))
    assert model[1].calls == expected[1].calls
