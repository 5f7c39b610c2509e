"""What ``keep`` and a budget do in forward passes that differ from the one that was measured."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from memengine.techniques import checkpoint_activations


def gradients(model, *inputs):
    loss = model(*inputs).square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


class Recurrent(nn.Module):
    """A recurrent layer, whose gates are written to in place, part by part, at each time."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer(6, 6, 2, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.layer(x)[0]


@pytest.mark.edge(
    'activation_checkpointing',
    'exact',
    '`keep` and `budget` where a later forward does other calls than the first (sequences of '
    'another length, another branch): from the first such call on, all is computed again',
)
@pytest.mark.parametrize('options', [dict(keep='matmuls'), dict(budget=0.5)])
@pytest.mark.parametrize('layer', [nn.GRU, nn.LSTM, nn.RNN])
def test_sequences_of_another_length(layer, options):
    torch.manual_seed(0)
    model = Recurrent(layer).double()
    plain = copy.deepcopy(model)
    checkpoint_activations(model, ['layer'], **options)
    for length in (4, 4, 7, 3, 7, 7, 4, 5):
        x = torch.randn(2, length, 6, dtype=torch.float64)
        for found, expected in zip(gradients(model, x), gradients(plain, x), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


class WithTable(nn.Module):
    """Computes a table in its first forward, and keeps it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.ones(6, 6) @ torch.ones(6, 6)
        return self.second((self.first(x) + self.table[0]).tanh()).tanh()


def test_a_rank_does_not_measure_again_by_itself(monkeypatch):
    """A forward of its own would wait for what other ranks, which met no other calls, send."""
    ran, model, x = [], WithTable(), torch.randn(4, 6)
    model.first.register_forward_hook(lambda *_: ran.append(1))
    checkpoint_activations(model, '', keep='matmuls')
    monkeypatch.setattr(torch.distributed, 'is_initialized', lambda: True)
    monkeypatch.setattr(torch.distributed, 'get_world_size', lambda: 2)
    gradients(model, x)  # is measured
    ran.clear()
    for _ in range(3):
        gradients(model, x)
    assert len(ran) == 3 * 2, 'forward, and once more in backward'


def products(model, x):
    with FlopCounterMode(display=False) as counter:
        gradients(model, x)
    return counter.get_total_flops()


def test_what_most_steps_do_is_measured_once_the_first_was_another():
    torch.manual_seed(0)
    model, x = WithTable(), torch.randn(4, 6)
    plain = copy.deepcopy(model)
    checkpoint_activations(model, '', keep='matmuls')
    gradients(model, x)
    gradients(plain, x)
    other, _, measured = (products(model, x) for _ in range(3))
    assert measured == products(plain, x) < other


class WritesLater(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.writes = False

    def forward(self, x):
        halves = torch.unsafe_chunk(self.linear(x), 2, dim=1)  # which count writes for themselves
        if self.writes:
            halves[0].add_(1)
        return (halves[0] * halves[1]).sin()


def test_a_write_into_what_is_kept_is_refused():
    model, x = WritesLater(), torch.randn(4, 6)
    checkpoint_activations(model, '', keep='matmuls')
    gradients(model, x)
    model.writes = True
    with pytest.raises(ValueError, match='activation_checkpointing: the model writes into what '):
        gradients(model, x)
