"""What a budget keeps: the cheapest mix that fits, as trying all of them finds it."""

import itertools
import random

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import _disable_current_modes

from memengine.memory.ledger import Block, blocks_of
from memengine.techniques.activation_checkpointing import budget as recompute_plan
from memengine.techniques.activation_checkpointing.budget import (
    Trace,
    _MeasuredOp,
    measure,
    plan_by_budget,
)

MANY = 1000  # FLOPs for each byte, as products have


def trace(generator, products):
    ops = [
        _MeasuredOp((f'op {index}', 0), MANY * nbytes + generator.randrange(MANY), nbytes, True)
        for index, nbytes in enumerate(generator.choices(range(1, 9), k=products))
    ]
    ops.append(_MeasuredOp(('dropout', 0), 5, 5, False))
    return Trace(ops, sum(op.nbytes for op in ops), generator.randrange(1, 6), 0)


def ways(one):
    """All that a module can do: bytes kept, FLOPs, what is kept."""
    yield one.plain_bytes, 0, None
    may_be_kept = [op for op in one.ops if op.may_be_kept]
    for number in range(len(may_be_kept) + 1):
        for kept in itertools.combinations(may_be_kept, number):
            nbytes = one.input_bytes + sum(op.nbytes for op in kept)
            cost = sum(op.cost for op in one.ops) - sum(op.cost for op in kept)
            yield nbytes, cost, frozenset(op.call for op in kept)


def peak(traces, sizes):
    """Bytes when the neediest module is computed again and those before it wait."""
    return max(
        sum(sizes[:index]) + max(sizes[index], one.plain_bytes) for index, one in enumerate(traces)
    )


def facts(traces, plans):
    taken = [
        next((nbytes, cost) for nbytes, cost, kept in ways(one) if kept == plan)
        for one, plan in zip(traces, plans, strict=True)
    ]
    return peak(traces, [nbytes for nbytes, _ in taken]), sum(cost for _, cost in taken)


@pytest.mark.parametrize('seed', range(8))
@pytest.mark.parametrize('budget', [0.05, 0.4, 0.6, 0.85])
def test_no_other_mix_that_fits_is_cheaper(seed, budget):
    generator = random.Random(seed)
    traces = [trace(generator, generator.randrange(1, 4)) for _ in range(3)]
    every = list(itertools.product(*(list(ways(one)) for one in traces)))
    peaks = [peak(traces, [nbytes for nbytes, *_ in mix]) for mix in every]
    plain = sum(one.plain_bytes for one in traces)
    limit = max(int(budget * plain), min(peaks))
    cheapest = min(
        sum(cost for _, cost, _ in mix)
        for mix, nbytes in zip(every, peaks, strict=True)
        if nbytes <= limit
    )
    nbytes, cost = facts(traces, plan_by_budget(traces, budget))
    assert nbytes <= limit
    assert cheapest <= cost <= cheapest + 1e-3 * sum(one.cost for one in traces)


def test_many_ways_are_thinned_and_the_budget_is_still_used(monkeypatch):
    generator = random.Random(0)
    traces = [trace(generator, 6) for _ in range(12)]
    best = facts(traces, plan_by_budget(traces, 0.6))
    monkeypatch.setattr(recompute_plan, '_MOST_PLANS', 32)
    fewer = facts(traces, plan_by_budget(traces, 0.6))
    limit = 0.6 * sum(one.plain_bytes for one in traces)
    assert fewer[0] <= limit
    assert best[1] <= fewer[1] < 1.05 * best[1]


def test_what_costs_next_to_nothing_is_not_kept():
    """An op without products: the bytes are for what follows the modules."""
    traces = [
        Trace(
            [_MeasuredOp(('mm', 0), 10**6, 4, True), _MeasuredOp(('gelu', 0), 4, 4, True)], 8, 1, 1
        )
    ]
    assert plan_by_budget(traces, 0.9) == [frozenset({('mm', 0)})]
    assert plan_by_budget(traces, 1) == [None]
    assert plan_by_budget(traces, 0) == [frozenset()]


def test_weights_that_come_to_where_an_output_was_are_none(monkeypatch):
    """As ranks gather them out of sight: where they come to differs from rank to rank."""

    def known_by_size(tensor):  # an address may be used again or not
        return (Block(block.nbytes, block.nbytes, block.owner) for block in blocks_of(tensor))

    class Gathering(nn.Module):
        def forward(self, x):
            hidden = x[:8] * 2
            shape = hidden.shape
            del hidden
            with _disable_current_modes():
                weight = torch.ones(shape)
            return linear(x, weight)

    monkeypatch.setattr(recompute_plan, 'blocks_of', known_by_size)
    x = torch.randn(32, 64, requires_grad=True)
    module = Gathering()
    assert measure(module, lambda: module(x), [x]).saved_bytes == 0
