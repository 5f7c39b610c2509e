"""Objects that blocks hand on, and whose attributes they set."""

import copy
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from memengine.techniques import checkpoint_activations
from tests.techniques.activation_checkpointing.test_other_calls import gradients


@dataclass
class State:
    x: torch.Tensor
    earlier: list = field(default_factory=list)
    inner: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(calls=0, cached={}))


@dataclass(slots=True)
class SlottedState:
    x: torch.Tensor
    earlier: list = field(default_factory=list)
    inner: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(calls=0, cached={}))


class Block(nn.Module):
    """Replaces what the state holds, and reads what blocks before it have left there."""

    def __init__(self):
        super().__init__()
        self.linear, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, state):
        state.inner.calls += 1
        hidden = self.linear(state.x).tanh() * state.inner.calls
        hidden = sum(state.earlier, hidden) + state.inner.cached.get('hidden', 0)
        state.earlier.append(hidden)
        state.inner.cached['hidden'] = hidden.detach()
        state.x = state.x + self.last(hidden.sin())
        return state


class Stack(nn.Module):
    def __init__(self, state):
        super().__init__()
        self.state = state
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.Sequential(Block(), Block(), Block())

    def forward(self, x):
        state = self.state(self.embed(x))
        x = self.blocks(state).x
        assert state.inner.calls == len(state.earlier) == 3
        return x


@pytest.mark.edge(
    'activation_checkpointing',
    'exact',
    'Objects that blocks hand on and whose attributes they replace (a state, a cache), with what '
    'containers and objects in them hold: the repetition finds them as they were',
)
@pytest.mark.parametrize('options', [{}, dict(keep='matmuls'), dict(budget=0.4)], ids=str)
@pytest.mark.parametrize('state', [State, SlottedState])
def test_objects_are_given_as_they_were(state, options):
    torch.manual_seed(0)
    model = Stack(state).double()
    plain = copy.deepcopy(model)
    checkpoint_activations(model, 'blocks.*', **options)
    for _ in range(3):
        x = torch.randn(3, 4, dtype=torch.float64)
        found, expected = gradients(model, x), gradients(plain, x)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, state):
        state.x.add_(1)
        return self.linear(state.x).tanh()


def test_a_tensor_of_such_an_object_that_is_written_to_is_refused():
    model = nn.Sequential(Writing())
    checkpoint_activations(model, '0')
    with pytest.raises(ValueError, match='State.x of 0 changes in its forward'):
        model(State(torch.ones(2, 4)))
