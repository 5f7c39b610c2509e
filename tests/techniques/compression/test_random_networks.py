"""Forwards that follow a plan beside a copy that has none: random networks, changed between steps.

Where the network is as it was when its plan was noted, results, gradients (and so the noise) and
the bytes that are held are the same. Where it has changed since, what is exact is the same.
"""

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memengine.memory import SavedBytes
from memengine.techniques import drop_activations, quantize_activations, recompute_activations
from memengine.techniques.compression.hooks.compressed_forward import CompressedForward
from memengine.techniques.compression.replay import ForwardPlans
from memengine.techniques.modules.private_random import restart_private_generators
from memengine.techniques.modules.wrapped_forward import wrapper_of

WIDTH, STEPS, NETWORKS = 32, 14, 6


def attention(x):
    heads = x.unflatten(-1, (4, 8)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


FUNCTIONS = {
    'gate': lambda f, x: x * x.sigmoid(),
    'twice': lambda f, x: F.gelu(F.gelu(x)),
    'softmax': lambda f, x: F.softmax(x, -1) * x,
    'attention': lambda f, x: attention(x),
    'products': lambda f, x: F.softmax(x @ x.mT / 6, -1) @ x,
    'relu in place': lambda f, x: (x + 1).relu_(),
    'silu in place': lambda f, x: F.silu(x * 1.5, inplace=True),
    'buffer': lambda f, x: x * f.scale,
    'buffer given': lambda f, x: x * f.layer(f.table).mean(),
    'layer twice': lambda f, x: f.layer(F.silu(f.layer(x))),
    'norm': lambda f, x: F.layer_norm(x, (WIDTH,), f.scale),
    'dropout': lambda f, x: F.dropout(x, 0.3),
    'two layers': lambda f, x: f.layer(x) * f.layer(x).tanh(),
    'halves': lambda f, x: torch.cat([x[..., :16] * x[..., 16:]] * 2, -1),
    'result': lambda f, x: x.tanh().exp(),
    'detached': lambda f, x: x * x.detach().abs(),
    'many': lambda f, x: ((x.sin() * x.cos()).exp().tanh() * x).sigmoid() * x.relu() + F.gelu(x),
}


class Function(nn.Module):
    """One of them, by name; which one may be changed."""

    def __init__(self, name):
        super().__init__()
        self.name, self.layer = name, nn.Linear(WIDTH, WIDTH)
        self.register_buffer('scale', torch.rand(WIDTH))
        self.register_buffer('table', torch.rand(64, WIDTH))

    def forward(self, x):
        return FUNCTIONS[self.name](self, x)


class Sum(nn.Module):
    """Of two branches, or of one and what it is given."""

    def __init__(self, *branches):
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x):
        results = [branch(x) for branch in self.branches]
        return results[0] + (results[1] if results[1:] else x)


def part(draw, depth):
    kind = draw.choice(
        ['leaf'] * 4 + ['branches', 'residual', 'sequence', 'repeated'] * bool(depth)
    )
    if kind == 'leaf':
        modules = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.2)
        functions = [Function(draw.choice([*FUNCTIONS])) for _ in modules]
        return draw.choice([*modules, *functions])
    within = [part(draw, depth - 1) for _ in range(draw.randint(2, 4))]
    if kind == 'branches':
        return Sum(*within[:2])
    if kind == 'residual':
        return Sum(nn.Sequential(nn.LayerNorm(WIDTH), within[0]))
    return nn.Sequential(*within, *within[:1] * (kind == 'repeated'))


def network(draw):
    parts = [part(draw, 3) for _ in range(draw.randint(1, 3))]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *parts, nn.Linear(WIDTH, WIDTH)).train()


RULES = {
    '8 bits': lambda model: quantize_activations(model, min_numel=1),
    '2 bits': lambda model: quantize_activations(model, 2, min_numel=1),
    'recomputed': recompute_activations,
    'dropped': lambda model: drop_activations(model, gamma=0.5),
    'recomputed, 8 bits': lambda model: (recompute_activations(model), quantize_activations(model)),
    'recomputed, dropped': lambda model: (recompute_activations(model), drop_activations(model)),
    'dropped, 8 bits': lambda model: (drop_activations(model), quantize_activations(model)),
    'a part recomputed': lambda model: (
        recompute_activations(model[1]),
        quantize_activations(model),
    ),
    'a part in 8 bits': lambda model: (
        quantize_activations(model[1]),
        recompute_activations(model),
    ),
}


def forwards(model):
    return filter(None, (wrapper_of(module, CompressedForward) for module in model.modules()))


def plans(model):
    """All that there are, each for inputs of one kind to one module."""
    return [plan for forward in forwards(model) for plan in forward._plans._plans.values()]


def step(model, x, seed):
    """What it gives, its gradients, and the bytes that are held in between."""
    torch.manual_seed(seed)
    restart_private_generators()
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    with SavedBytes(model, x) as saved:
        result = model(x)
        held = saved.live_bytes
        result.sum().backward()
    return [result.detach(), x.grad, *(p.grad for p in model.parameters())], held


def same(some, others):
    pairs = zip(some, others, strict=True)
    return all(a is b or torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in pairs)


@pytest.mark.parametrize('rules', RULES)
@pytest.mark.parametrize('seed', range(NETWORKS))
def test_steps_by_plan_are_those_without(rules, seed):
    draw = random.Random(f'{rules} {seed}')
    torch.manual_seed(seed)
    model = network(draw)
    copies = [model, copy.deepcopy(model)]
    for one in copies:
        RULES[rules](one)
    functions = [name for name, one in model.named_modules() if isinstance(one, Function)]
    as_noted = {}
    for number in range(STEPS):
        if functions and draw.random() < 0.25:
            where, name = draw.choice(functions), draw.choice([*FUNCTIONS])
            for one in copies:
                one.get_submodule(where).name = name
        size = draw.choice([4, 4, 6])
        x = torch.randn(size, 8, WIDTH, generator=torch.Generator().manual_seed(number))
        is_now = [model.get_submodule(where).name for where in functions]
        before = {id(plan): plan for plan in plans(model)}
        for forward in forwards(copies[1]):
            forward._plans = ForwardPlans()
        (by_plan, held), (without, held_without) = (step(one, x, number) for one in copies)
        if as_noted.get(size) == is_now:
            assert held == held_without
        if as_noted.get(size) == is_now or rules == 'recomputed':
            assert same(by_plan, without)
        if any(id(plan) not in before for plan in plans(model)):
            as_noted[size] = is_now
