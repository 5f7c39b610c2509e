"""Whatever happens between steps and in them, those that follow a plan are the plain ones."""

import copy
import pickle
import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memengine.memory import SavedBytes
from memengine.techniques import offload_activations, recompute_activations

STEPS = 8


class Network(nn.Module):
    """Operations of all kinds; a block that runs several times, in one of two ways, tied layers."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(6), nn.ReLU(inplace=True))
        self.block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.times, self.gated, self.fails = 2, False, False

    def forward(self, x):
        x = self.stem(x)
        for _ in range(self.times):
            x = x + self.block(x)
        if self.fails:
            raise KeyError
        y = F.silu(self.first(x))
        y = y * self.last(y).sigmoid() if self.gated else self.last(F.dropout(y, 0.2))
        return y


def fail(model, i):
    model.fails = True
    with pytest.raises(KeyError):
        model(batch(i))
    model.fails = False


def evaluate(model, i):
    with torch.no_grad():
        model(batch(i))
    model.stem[1].train(i % 3 > 0)


def run_a_part(model, i):
    model.block(batch(i)).sum().backward()


def freeze(model, i):
    model.block.requires_grad_(i not in (3, 4))


def repeat(model, i):
    model.times = 1 + (i in (2, 5)) + (i > 3)


def take_the_other_way(model, i):
    model.gated = i in (2, 5, 6)


def keep_two_graphs(model, i):
    first, second = model(batch(i)), model(batch(i, rows=2 + i % 2))
    second.sum().backward()
    first.sum().backward()


BETWEEN = [fail, evaluate, run_a_part, freeze, repeat, take_the_other_way, keep_two_graphs]


def batch(i, rows=4):
    return torch.randn(rows, 6, 8, generator=torch.Generator().manual_seed(i))


def gradients(run, model, i, amp=False):
    model.zero_grad()
    torch.manual_seed(i)
    with torch.autocast('cpu', torch.bfloat16, enabled=amp):
        run(batch(i).requires_grad_()).float().square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def pair(*offload):
    torch.manual_seed(0)
    plain = Network().train()
    model = copy.deepcopy(plain)
    recompute_activations(model)
    if offload:
        offload_activations(model, min_bytes=1)
    return plain, model


@pytest.mark.parametrize('amp', [False, True], ids=['', 'bf16'])
@pytest.mark.parametrize('offload', [(), ('offload',)], ids=['', 'offload'])
@pytest.mark.parametrize('between', BETWEEN)
def test_what_happens_between_steps(between, offload, amp):
    plain, model = pair(*offload)
    for i in range(STEPS):
        for one in (plain, model):
            torch.manual_seed(i)
            between(one, i)
        assert all(
            map(torch.equal, gradients(model, model, i, amp), gradients(plain, plain, i, amp))
        )
    assert all(map(torch.equal, model.buffers(), plain.buffers()))


def test_as_much_is_held_as_without_a_plan():
    _, model = pair()
    for i in range(STEPS):
        held = []
        for one in (model, copy.deepcopy(model)):  # which has no plan
            with SavedBytes(one) as meter:
                output = one(batch(i))
                held.append(meter.live_bytes)
            del output
        assert held[0] == held[1]


@pytest.mark.parametrize('use_reentrant', [False, True])
def test_checkpointed_in_some_steps(use_reentrant):
    plain, model = pair()
    for i in range(STEPS):
        around = partial(checkpoint, model, use_reentrant=use_reentrant)
        run = around if i in (2, 3, 5) else model
        assert all(map(torch.equal, gradients(run, model, i), gradients(plain, plain, i)))


def test_copied_pickled_undone_and_differentiated_twice():
    plain, model = pair()
    model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    for i in range(STEPS):
        found = []
        for one in (plain, model):
            torch.manual_seed(i)
            x = batch(i).requires_grad_()
            (grad,) = torch.autograd.grad(one(x).square().sum(), x, create_graph=True)
            found.append(
                torch.autograd.grad(grad.square().sum(), [*one.parameters()], allow_unused=True)
            )
        assert all(map(torch.equal, *found))
        if i == 3:
            model = copy.deepcopy(model)


def test_threads_share_a_model():
    plain, model = pair()
    for one in (plain, model):
        one.stem[1].eval()
        one.gated = True  # without dropout, whose generator threads share
    found = {}

    def work(one, k):
        for i in range(STEPS):
            x = batch(10 * k + i, rows=1 + (k + i) % 5).to(one.first.weight.device)
            output = one(x).square().sum()
            found[one is model, k, i] = torch.autograd.grad(output, [*one.parameters()])

    for one in (plain, model):
        threads = [threading.Thread(target=work, args=(one, k)) for k in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 2 * 3 * STEPS
    for (is_model, k, i), grads in found.items():
        assert not is_model or all(map(torch.equal, grads, found[False, k, i]))
