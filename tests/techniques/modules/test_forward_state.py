"""Random state: a block that is run again draws the same numbers, and leaves no trace."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from memengine._torch_private.distributed import pretended_ranks
from memengine.techniques.modules.forward_state import RandomState, accelerators_of

DEVICES = accelerators_of(nn.Identity(), [torch.empty(0)])  # where all is on a device, that one
DRAWS = {
    'torch': lambda: torch.rand(3).tolist(),
    'python': lambda: [random.gauss(0, 1) for _ in range(3)],
    'numpy': lambda: np.random.randn(3).tolist(),
}


@pytest.mark.parametrize('name', DRAWS)
def test_replay_draws_the_same_numbers(name):
    state = RandomState(DEVICES)
    first = DRAWS[name]()
    with state.replay():
        assert DRAWS[name]() == first
    assert DRAWS[name]() != first


@pytest.mark.parametrize('name', DRAWS)
def test_replay_leaves_no_trace(name):
    draw = DRAWS[name]
    state = RandomState(DEVICES)
    draw()
    follow_up = RandomState(DEVICES)
    expected = draw()
    follow_up.restore()
    with state.replay():
        draw(), draw(), draw()
    assert draw() == expected


def test_state_returns_after_an_error():
    state = RandomState(DEVICES)
    torch.rand(1)
    follow_up = RandomState(DEVICES)
    with pytest.raises(KeyError), state.replay():
        {}[torch.rand(1)]
    assert follow_up.unchanged()


@pytest.mark.parametrize('name', DRAWS)
def test_a_draw_is_noticed(name):
    state = RandomState(DEVICES)
    assert state.unchanged()
    DRAWS[name]()
    assert not state.unchanged()


def test_dropout_is_replayed_in_a_second_pass():
    dropout, x = nn.Dropout(0.5), torch.ones(4, 50)
    state = RandomState(DEVICES)
    first = dropout(x)
    dropout(x)
    with state.replay():
        assert torch.equal(dropout(x), first)


def test_modules_on_the_cpu_have_no_accelerators():
    assert accelerators_of(nn.Linear(2, 2), [torch.ones(1), torch.ones(1, device='meta')]) == ()


@pytest.mark.gpu
def test_replay_on_a_gpu():
    model = nn.Linear(2, 2).cuda()
    devices = accelerators_of(model)
    assert devices == (torch.device('cuda', 0),)
    state = RandomState(devices)
    first = torch.rand(100, device='cuda')
    following = RandomState(devices)
    with state.replay():
        assert torch.equal(torch.rand(100, device='cuda'), first)
    assert following.unchanged()


def test_shards_without_values_compute_nowhere_yet():
    with pretended_ranks(1):
        mesh = init_device_mesh('cpu', (1,))
        shard = DTensor.from_local(torch.empty(3, device='meta'), mesh, [Shard(0)])
        assert accelerators_of(nn.Identity(), [shard]) == ()
