"""Repeated augmentation: which samples come how often, where, and on which rank."""

from collections import Counter

import pytest

from memengine.datasets import RepeatedAugmentation, samplers


def drawn(size=24, rank=0, ranks=1, epoch=0, monkeypatch=None, **settings):
    """What a rank draws in a pass: pairs of a sample and of how often it came before."""
    if monkeypatch:
        monkeypatch.setattr(samplers, 'get_dist_info', lambda: (rank, ranks))
    sampler = RepeatedAugmentation(range(size), seed=3, **settings)
    sampler.set_epoch(epoch)
    found = [(int(index), index.repetition) for index in sampler]
    assert len(found) == len(sampler)
    return found


def test_each_sample_comes_so_often_in_a_row_in_a_pass_of_usual_length():
    found = drawn()
    samples = [sample for sample, _ in found]
    assert len(found) == 24
    assert samples[::3] == samples[1::3] == samples[2::3]
    assert Counter(samples).most_common(1)[0][1] == 3 and len(set(samples)) == 8
    assert [repetition for _, repetition in found] == [0, 1, 2] * 8


def test_the_last_sample_comes_less_often_where_repeats_do_not_divide_the_pass():
    samples = [sample for sample, _ in drawn(size=23)]
    assert len(samples) == 23
    assert sorted(Counter(samples).values()) == [2, *[3] * 7]


def test_passes_and_seeds_have_orders_of_their_own_which_come_back():
    assert drawn(epoch=1) == drawn(epoch=1) != drawn(epoch=0)
    other = RepeatedAugmentation(range(24), seed=4)
    assert [int(index) for index in other] != [sample for sample, _ in drawn()]


def test_without_shuffling_or_repeats():
    assert [sample for sample, _ in drawn(shuffle=False)] == [i for i in range(8) for _ in range(3)]
    assert sorted(drawn(num_repeats=1)) == [(sample, 0) for sample in range(24)]


@pytest.mark.parametrize('ranks', [2, 3, 4])
@pytest.mark.parametrize('size', [24, 25])
def test_ranks_take_turns_in_the_order_of_one(size, ranks, monkeypatch):
    alone = drawn(size)
    shards = [drawn(size, rank, ranks, monkeypatch=monkeypatch) for rank in range(ranks)]
    assert {len(shard) for shard in shards} == {size // ranks}
    together = [draw for step in zip(*shards, strict=True) for draw in step]
    assert together == alone[: size // ranks * ranks]


@pytest.mark.parametrize('num_repeats', [0, -1, 1.5, True])
def test_impossible_numbers_are_refused(num_repeats):
    with pytest.raises(ValueError, match=f'num_repeats must .* got {num_repeats}'):
        RepeatedAugmentation(range(4), num_repeats)


def test_more_ranks_than_samples_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r'4 ranks share 3 sample\(s\)'):
        drawn(3, 0, 4, monkeypatch=monkeypatch)
