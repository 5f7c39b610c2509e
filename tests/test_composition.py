"""Every pair of techniques composes or is refused, as the page says."""

import itertools

import pytest
import torch

from memengine.testing import relative_error
from tests.composition import (
    DRAWS,
    DRAWS_ALONE,
    ITERATIONS,
    PAGE,
    SIGNS,
    SPREAD,
    Row,
    _plain,
    _rms,
    _start,
    margin,
    optim,
    outcome,
    pairs,
    rows,
    table,
    train,
)

BY_NAME = {row.name: row for row in rows()}
PARTS, SEEDS = 4, 24


@pytest.mark.slow
def test_the_page_holds_what_is_found():
    """Each outcome is proved on the way: equal parameters, or an error that names both settings."""
    outcomes = {(first.name, second.name): outcome(first, second) for first, second in pairs()}
    assert table(outcomes) in PAGE.read_text(), 'run python -m tests.composition and look at it'


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize('part', range(PARTS))
def test_on_a_gpu_pairs_do_what_the_page_says(part):
    """Where there is one, the Runner trains there."""
    names = [row.name for row in rows()]
    page = {}
    for line in PAGE.read_text().splitlines():
        first, *signs = (cell.strip() for cell in line.strip('|').split('|'))
        page.update({(first, second): sign for second, sign in zip(names[1:], signs, strict=False)})
    for first, second in list(itertools.combinations(BY_NAME.values(), 2))[part::PARTS]:
        assert SIGNS[outcome(first, second)] == page[first.name, second.name]


@pytest.mark.parametrize(
    ('first', 'second', 'found'),
    [
        ('gradient cache', 'activation checkpointing', 'exact'),
        ('accumulation within an iteration', 'Conv-BN in eval mode', 'exact'),
        ('optimiser step in backward', 'clipping', 'refused'),
        ('gradient cache', 'recomputed activations', 'exact'),
        ('recomputed activations', 'activation offload', 'exact'),
        ('recomputed activations', 'dropped activations (DropIT)', 'lossy'),
        ('recomputed activations', 'compiled blocks', 'refused'),
        ('accumulation within an iteration', 'dropped activations (DropIT)', 'lossy'),
        ('quantised activations', 'activation offload', 'lossy'),
        ('quantised activations', 'compiled blocks', 'refused'),
        ('accumulation within an iteration', 'gradient cache', 'one of them'),
        ('accumulation within an iteration', 'contrastive losses in tiles', '-'),
    ],
)
def test_some_pairs(first, second, found):
    assert outcome(BY_NAME[first], BY_NAME[second]) == found


def test_a_pair_that_trains_something_else_is_seen():
    wrong = Row('another rate', optim(optimizer=dict(type='SGD', lr=0.2)))
    with pytest.raises(AssertionError, match='another rate: error'):
        outcome(BY_NAME['activation checkpointing'], wrong)


def test_a_gradient_that_is_a_fifth_off_is_seen_beside_noise():
    """The least that is not taken for noise, as eight bits err by two hundredths at most."""
    wrong = Row('another rate', optim(optimizer=dict(type='SGD', lr=0.12)))
    with pytest.raises(AssertionError, match='quantised activations and another rate'):
        outcome(BY_NAME['quantised activations'], wrong)


@pytest.mark.slow
def test_noise_is_no_wider_than_its_bound_says():
    """Any four seeds of a pair that draws, against any eight alone: within noise's own margin."""
    lossy, exact = BY_NAME['quantised activations'], BY_NAME['recomputed activations']
    start, plain = _start('SimCLR'), _plain('SimCLR', (), ITERATIONS)

    def errors(rows):
        runs = [train('SimCLR', rows, seed=seed) for seed in range(SEEDS)]
        return torch.tensor([relative_error(run - start, plain - start) for run in runs])

    alone, pair = errors([lossy]), errors([lossy, exact])
    assert max(alone.log().std(), pair.log().std()) < 1.5 * SPREAD
    groups = [[(n + k) % SEEDS for k in range(max(DRAWS, DRAWS_ALONE))] for n in range(SEEDS)]
    most = max(_rms(pair[group[:DRAWS]].tolist()) for group in groups)
    least = min(_rms(alone[group[:DRAWS_ALONE]].tolist()) for group in groups)
    assert most / least < margin(draws=True) / 1.5


def test_a_refusal_that_names_one_setting_only_is_seen(monkeypatch):
    def refuse(*args, **kwargs):
        raise ValueError('activation_checkpointing cannot be')

    monkeypatch.setattr(torch.optim.SGD, 'step', refuse)
    with pytest.raises(AssertionError, match='refused without naming both'):
        outcome(BY_NAME['activation checkpointing'], BY_NAME['clipping'])
