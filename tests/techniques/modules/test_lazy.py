"""Lazy modules, whose parameters get their shapes in the first forward that is trained."""

import pytest
import torch
from torch import nn

from memengine.techniques import (
    cached_step,
    checkpoint_activations,
    drop_activations,
    offload_activations,
    quantize_activations,
    recompute_activations,
)
from memengine.techniques.slices.tower import Tower
from memengine.testing import assert_same_step

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)


def network():
    lazy = nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.GELU(), nn.LazyLinear(8), nn.Dropout(0.3)
    return nn.Sequential(nn.Sequential(*lazy), nn.Linear(8, 2)).double()


def steps(model):
    """Gradients of two steps, with the buffers after them."""
    found = {}
    torch.manual_seed(0)
    for number in range(2):
        model.zero_grad()
        model(X).square().sum().backward()
        found.update({f'{number} {name}': p.grad for name, p in model.named_parameters()})
    return {**found, **dict(model.named_buffers()), 'drawn': torch.rand(3)}


EXACT = {
    'offloaded': lambda model: offload_activations(model, 'disk', min_bytes=0),
    'recomputed': recompute_activations,
}


@pytest.mark.parametrize('name', EXACT)
def test_the_first_steps_are_the_plain_ones(name):
    torch.manual_seed(1)
    plain = network()
    torch.manual_seed(1)
    model = network()
    EXACT[name](model)
    assert_same_step(steps(model), steps(plain))


def test_what_runs_a_forward_twice_asks_for_one_before():
    # The first one draws initial values, the repeated one would not, and would drop others.
    model = network()
    checkpoint_activations(model, '0')
    with pytest.raises(ValueError, match='uninitialized'):
        model(X)
    model = network()
    with pytest.raises(ValueError, match='uninitialized'):
        cached_step(Tower(model, X.split(2)), lambda z: z.square().sum())


@pytest.mark.parametrize('apply', [drop_activations, quantize_activations])
def test_lossy_techniques_begin_with_them(apply):
    model = network()
    apply(model)
    assert all(torch.isfinite(tensor).all() for tensor in steps(model).values())
