"""Every pair of techniques composes or is refused, as the page says."""

import pytest
import torch

from tests.composition import PAGE, Row, optim, outcome, pairs, rows, table

BY_NAME = {row.name: row for row in rows()}


@pytest.mark.slow
def test_the_page_holds_what_is_found():
    """Each outcome is proved on the way: equal parameters, or an error that names both settings."""
    outcomes = {(first.name, second.name): outcome(first, second) for first, second in pairs()}
    assert table(outcomes) in PAGE.read_text(), 'run python -m tests.composition and look at it'


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


def test_a_refusal_that_names_one_setting_only_is_seen(monkeypatch):
    def refuse(*args, **kwargs):
        raise ValueError('activation_checkpointing cannot be')

    monkeypatch.setattr(torch.optim.SGD, 'step', refuse)
    with pytest.raises(AssertionError, match='refused without naming both'):
        outcome(BY_NAME['activation checkpointing'], BY_NAME['clipping'])
