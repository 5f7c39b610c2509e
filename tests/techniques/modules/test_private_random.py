"""The generator beside torch's own: it follows their seed and leaves them alone."""

from __future__ import annotations

import pytest
import torch

from memengine.techniques.modules.forward_state import PrivateRandomState, RandomState
from memengine.techniques.modules.private_random import (
    private_generator,
    private_seed,
    restart_private_generators,
)

CPU = torch.device('cpu')


@pytest.fixture(autouse=True)
def start():
    restart_private_generators()


def draw(count=100):
    return torch.rand(count, generator=private_generator(CPU))


@pytest.mark.parametrize('seed', [0, 7, -1, 2**63 + 5, 2**64 - 1])
def test_one_stream_for_one_seed(seed):
    torch.manual_seed(seed)
    first = draw(), draw()
    torch.manual_seed(seed ^ 1)
    other = draw()
    torch.manual_seed(seed)
    again = draw(), draw()
    assert not torch.equal(*first)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], other)


def test_the_global_generator_is_neither_used_nor_repeated():
    torch.manual_seed(3)
    before = RandomState()
    drawn = draw()
    assert before.unchanged()
    assert not torch.equal(drawn, torch.rand(100))


def test_a_restart_repeats_what_the_same_seed_drew():
    torch.manual_seed(3)
    first = draw()
    torch.manual_seed(3)
    goes_on = draw()
    restart_private_generators()
    assert torch.equal(first, draw())
    assert not torch.equal(first, goes_on)


def test_seeds_are_of_the_stream_too_and_of_one_type_of_integer():
    torch.manual_seed(3)
    state = PrivateRandomState()
    seeds = [private_seed(CPU) for _ in range(100)]
    assert len(set(seeds)) == 100 and all(2**62 <= seed < 2**63 for seed in seeds)
    state.restore()
    restart_private_generators()
    assert [private_seed(CPU) for _ in range(100)] == seeds


def test_restoring_the_global_state_restores_the_seed():
    """As when a gradient cache replays a slice that was seeded otherwise."""
    torch.manual_seed(3)
    state, first = RandomState(), draw()
    torch.manual_seed(4)
    draw()
    state.restore()
    assert torch.equal(first, draw())


@pytest.mark.parametrize('used_before', [False, True])
def test_the_state_is_put_back(used_before):
    if used_before:
        draw()
    state = PrivateRandomState()
    first = draw()
    torch.manual_seed(torch.initial_seed() + 1)
    draw()
    torch.manual_seed(torch.initial_seed() - 1)
    state.restore()
    assert torch.equal(draw(), first)


@pytest.mark.parametrize('draw', [private_seed, private_generator])
def test_a_cuda_graph_would_repeat_the_same_numbers(monkeypatch, draw):
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: True)
    with pytest.raises(RuntimeError, match='while a CUDA graph is captured'):
        draw(torch.device('cuda'))
    draw(CPU)
