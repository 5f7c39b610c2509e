"""The search for a plan, on costs that follow from a formula."""

from dataclasses import replace

import pytest

from memengine.memory.planning import (
    Cost,
    Knob,
    largest,
    leanest,
    parse_bytes,
    parse_fit,
    rates_of,
    search,
)

RATES = rates_of('cpu')
SLICES = Knob('slices', (2, 3, 4, 5, 6, 8, 12, 16))
KEPT = Knob('kept', (1.0, 0.75, 0.5, 0.25, 0.0), of='slices')
DEPTH = Knob('checkpointing', (0.8, 0.6, 0.4, 0.2, 0.0))


class Step:
    """A step of 16 samples of 100 bytes on 40 that stay, in which a second forward is a third."""

    def __init__(self, second_forward=True, refused=()):
        self.second_forward, self.refused = second_forward, refused
        self.asked = []

    def __call__(self, plan):
        assert plan not in self.asked
        self.asked.append(plan)
        if set(plan) & set(self.refused):
            return None
        slices, kept = plan.get('slices', 1), plan.get('kept', 1.0)
        share = 1 / slices if not self.second_forward else 1 / slices + (1 - 1 / slices) * kept
        depth = plan.get('checkpointing', 1.0)
        extra = (1 - kept) / 3 + (1 - depth) / 3
        return Cost(
            peak_bytes=40 + int(1600 * share * (0.1 + 0.9 * depth)),
            flops=int(3e9 * (1 + extra)),
            moved_bytes=0,
            operators=100 * slices,
        )


def find(limit, *knobs, **kwargs):
    step = Step(**kwargs)
    found = search(knobs, step, limit, RATES)
    assert len(found.tried) <= len(step.asked)
    return found


def test_a_step_that_fits_is_left_as_it_is():
    found = find(1640, SLICES, KEPT, DEPTH)
    assert found.chosen == found.plain and not found.chosen.plan
    assert len(found.tried) == 1


def test_the_fewest_slices_that_fit_are_chosen():
    found = find(40 + 1600 // 5, SLICES, second_forward=False)
    assert found.chosen.plan == {'slices': 5}
    assert found.next_faster.plan == {'slices': 4}


def test_as_many_graphs_are_kept_as_there_is_room_for():
    found = find(40 + 1600 // 2, SLICES, KEPT)
    assert found.chosen.plan == {'slices': 4, 'kept': 0.25}


def test_what_is_cheaper_is_preferred():
    assert find(600, SLICES, DEPTH, second_forward=False).chosen.plan == {'slices': 3}
    assert 'slices' not in find(1400, SLICES, KEPT, DEPTH).chosen.plan  # 0.8 costs a fifteenth


def test_several_are_combined_where_one_does_not_do_it():
    found = find(60, SLICES, DEPTH, second_forward=False)
    assert set(found.chosen.plan) == {'slices', 'checkpointing'}


def test_what_is_refused_is_no_plan():
    found = find(600, SLICES, DEPTH, second_forward=False, refused=('slices',))
    assert set(found.chosen.plan) == {'checkpointing'}


def test_nothing_fits():
    found = find(41, SLICES, DEPTH, second_forward=False)
    assert found.chosen is None
    assert found.leanest.cost.peak_bytes == min(one.cost.peak_bytes for one in found.tried)
    assert found.leanest.plan == {'slices': 16, 'checkpointing': 0.0}


@pytest.mark.parametrize('second_forward', [False, True])
def test_more_budget_is_never_slower_and_is_used(second_forward):
    knobs = (SLICES, KEPT, DEPTH) if second_forward else (SLICES, DEPTH)
    chosen = [
        find(limit, *knobs, second_forward=second_forward).chosen for limit in range(60, 1700, 20)
    ]
    times, peaks = ([one.seconds for one in chosen], [one.cost.peak_bytes for one in chosen])
    assert times == sorted(times, reverse=True) and peaks == sorted(peaks)


def test_the_front_falls_in_bytes_and_rises_in_time():
    front = find(60, SLICES, DEPTH, second_forward=False).front
    assert not front[0].plan
    pairs = list(zip(front, front[1:], strict=False))
    assert len(pairs) > 3
    for one, other in pairs:
        assert one.seconds <= other.seconds
        assert one.cost.peak_bytes > other.cost.peak_bytes


def test_few_are_tried():
    assert len(find(40 + 1600 // 12, SLICES, second_forward=False).tried) <= 7


def test_sizes():
    assert parse_bytes('24GiB') == 24 * 2**30
    assert parse_bytes('1.5 MiB') == 3 * 2**19
    assert parse_bytes('16GB') == 16 * 10**9


@pytest.mark.parametrize('text', ['24', 'GiB', '-1GiB', '0MiB', '24gigs', ''])
def test_other_sizes_are_refused(text):
    with pytest.raises(ValueError, match='GiB'):
        parse_bytes(text)


@pytest.mark.parametrize('start', [1, 32, 5000])
@pytest.mark.parametrize('limit', [99, 140, 10_000, 123_456])
def test_the_largest_size_that_fits(limit, start):
    asked = []

    def bytes_of(size):
        assert size not in asked
        asked.append(size)
        return 100 + 3 * size + size * size // 1000

    size = largest(bytes_of, limit, start)
    fitting = max((one for one in range(40_000) if bytes_of_all(one) <= limit), default=0)
    assert fitting * 31 / 32 - 1 < size <= fitting
    assert len(asked) <= 24
    assert largest(bytes_of_all, limit, start, most=7) == min(size, 7)


def bytes_of_all(size):
    return 100 + 3 * size + size * size // 1000 if size else 0


def test_the_leanest_plan_has_what_makes_it_smaller():
    useless = Knob('useless', (1,))
    assert leanest((SLICES, KEPT, useless, DEPTH), Step()) == {
        'slices': 16,
        'kept': 0.0,
        'checkpointing': 0.0,
    }


def test_the_dial():
    assert [parse_fit(one) for one in ('least', 'balanced', 'fastest', '0.3', 1)] == [
        0,
        0.5,
        1,
        0.3,
        1,
    ]
    for wrong in ('fast', -0.1, 1.1, True, [0.5], 'nan'):
        with pytest.raises(ValueError, match='least, balanced, fastest'):
            parse_fit(wrong)


def test_what_lasts_is_not_made_smaller_by_less_of_what_does_not():
    slices = replace(SLICES, of_activations=True)
    depth = replace(DEPTH, of_activations=True)
    shards = Knob('sharding', ('all',))

    class Sharded(Step):
        def __call__(self, plan):
            lasting = 1000 if 'sharding' in plan else 4000
            cost = super().__call__(plan)
            lasts = {'parameters': lasting // 4, 'optimiser state': lasting // 2}
            return replace(cost, peak_bytes=cost.peak_bytes + lasting, by_category=lasts)

    step = Sharded(second_forward=False)
    found = search((slices, depth, shards), step, 1800, RATES)
    assert set(found.chosen.plan) == {'slices', 'sharding'}
    assert all('sharding' in plan for plan in step.asked if len(plan) > 1)
    nothing = search((slices, depth, shards), Sharded(second_forward=False), 900, RATES)
    assert nothing.chosen is None and len(nothing.leanest.plan) == 3
    assert search((slices, depth), Sharded(second_forward=False), 900, RATES).leanest.plan
