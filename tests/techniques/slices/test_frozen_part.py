"""A frozen part runs once where that is exact, and again where it is not."""

import copy

import pytest
import torch
from torch import nn

from memengine.losses import NTXentLoss
from memengine.techniques.slices.frozen_part import FrozenPart
from memengine.techniques.slices.grad_cache import Tower, cached_step
from memengine.techniques.slices.slicing import split_batch
from memengine.testing import assert_same_step
from tests.techniques.toy import gradients, plain


class Probe(nn.Module):
    """A frozen backbone and a head with dropout that is trained."""

    def __init__(self, part=None):
        super().__init__()
        self.part = (part or nn.Linear(12, 8)).requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 6))

    def forward(self, x):
        return self.head(self.part(x))


class Pair(nn.Module):
    def forward(self, x):
        return (x[:, :8],)


class First(Probe):
    def forward(self, x):
        return self.head(self.part(x)[0])


def loss(z):
    return NTXentLoss()(*z.chunk(2))


def compare(model, slices_per_forward=1, **settings):
    """Rows that went through the part in each forward that ran it."""
    x = torch.randn(12, 12, dtype=torch.float64)
    expected = copy.deepcopy(model)
    torch.manual_seed(1)
    plain([expected], [x], loss, chunk=4)
    ran = []
    inner = model.part.forward
    model.part.forward = lambda x: (ran.append(len(x)), inner(x))[1]
    torch.manual_seed(1)
    tower = Tower(model, x.split(4), slices_per_forward=slices_per_forward, frozen=model.part)
    cached_step(tower, loss, **settings)
    assert_same_step(gradients(model), gradients(expected))
    assert 'forward' in vars(model.part)  # somebody else's is left in place
    return ran


@pytest.mark.parametrize(('keep_graph', 'ran'), [(0, [4, 4, 4]), (1, [4, 4, 4])])
def test_runs_once_for_each_slice(keep_graph, ran):
    torch.manual_seed(0)
    assert compare(Probe().double(), keep_graph=keep_graph) == ran


def test_runs_again_when_it_draws_random_numbers():
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.5))
    assert compare(Probe(part).double()) == [4] * 6


def test_runs_again_when_it_returns_something_else():
    torch.manual_seed(0)
    assert compare(First(Pair()).double()) == [4] * 6


@pytest.mark.edge(
    'grad_cache',
    'exact',
    'A head that writes to what a frozen backbone returns: the backbone runs again',
)
@pytest.mark.parametrize('slices_per_forward', [1, 3])
def test_runs_again_when_the_head_writes_to_its_output(slices_per_forward):
    torch.manual_seed(0)
    model = Probe().double()
    model.head = nn.Sequential(nn.SiLU(inplace=True), nn.Linear(8, 6)).double()
    ran = compare(model, slices_per_forward=slices_per_forward)
    assert sum(ran) == 24 and ran[-3:] == [4] * 3


def test_a_part_that_is_trained_is_refused():
    with pytest.raises(ValueError, match='Linear is not frozen: weight is trained'):
        FrozenPart(nn.Linear(2, 2))


def test_a_compiled_part_runs_once():
    torch._dynamo.reset()
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(12, 8), nn.Tanh()).requires_grad_(False)
    runs = []
    compiled = torch.compile(
        backbone, backend=lambda graph, _: lambda *args: runs.append(1) or graph(*args)
    )
    model, x = nn.Sequential(compiled, nn.Linear(8, 3)), torch.randn(6, 12)
    tower = Tower(model, split_batch(x, 2), frozen=compiled, part=model)
    loss = cached_step(tower, lambda z: z.square().sum())
    assert len(runs) == 3
    assert loss.item() == pytest.approx(model(x).square().sum().item(), rel=1e-5)
