"""What the other tests rely on: a wrong gradient is seen, and ranks that fail are named."""

import pytest
import torch

from memengine.testing import assert_same_step, run_ranks

PLAIN = {'a': torch.tensor([3.0, 4.0]), 'b': torch.tensor([1e-4]), 'c': None}


@pytest.mark.parametrize(
    'change',
    [
        {'a': 2 * PLAIN['a']},
        {'a': torch.zeros(2)},
        {'a': None},
        {'b': torch.zeros(1)},
        {'b': torch.tensor([float('nan')])},
        {'c': torch.zeros(1)},
    ],
)
def test_a_doubled_zero_missing_or_unexpected_gradient_is_seen(change):
    assert_same_step(PLAIN, PLAIN)
    with pytest.raises(AssertionError, match='differ'):
        assert_same_step({**PLAIN, **change}, PLAIN)


def test_rounding_of_what_is_zero_is_no_difference_and_more_is():
    bias = {**PLAIN, 'b': torch.tensor([1e-17], dtype=torch.float64)}
    assert_same_step({**bias, 'b': torch.tensor([2e-17], dtype=torch.float64)}, bias)
    with pytest.raises(AssertionError, match='b: relative error'):
        assert_same_step({**bias, 'b': torch.tensor([1e-13], dtype=torch.float64)}, bias)


def fail_on_the_last(rank, world_size):
    if rank == world_size - 1:
        raise KeyError('broken')
    return rank


def test_ranks_return_in_order():
    assert run_ranks(2, _own_rank) == [0, 1]


def test_a_failing_rank_is_named():
    with pytest.raises(RuntimeError, match='rank 1 of 2 failed(.|\n)*broken'):
        run_ranks(2, fail_on_the_last)


def _own_rank(rank, world_size):
    return rank
