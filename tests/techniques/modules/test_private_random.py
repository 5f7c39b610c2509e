"""The generator beside torch's own: it follows their seed and leaves them alone."""

from __future__ import annotations

import pytest
import torch

from memengine.techniques.modules.private_random import (
    keep_private_generators,
    private_generator,
    restart_private_generators,
)
from memengine.techniques.modules.random_state import RandomState

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


def test_restoring_the_global_state_restores_the_seed():
    """As when a gradient cache replays a slice that was seeded otherwise."""
    torch.manual_seed(3)
    state, first = RandomState(), draw()
    torch.manual_seed(4)
    draw()
    state.restore()
    assert torch.equal(first, draw())


def test_private_generators_go_on_as_if_a_block_had_not_run():
    torch.manual_seed(3)
    draw()
    with keep_private_generators():
        first = draw()
        torch.manual_seed(4)
        draw()
    torch.manual_seed(3)
    assert torch.equal(first, draw())
