"""The search for a plan, on costs that follow from a formula."""

import math
from dataclasses import replace

import pytest

from memengine.memory.planning import Cost, Knob, Rates, largest, leanest, search

RATES = Rates('a machine', 60e9, 8e9, offloaded_bytes_per_s=1e9, operator_s=10e-6)
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


def test_a_cost_between_two_has_the_peak_of_a_phase_that_both_have():
    def cost(peak_bytes, **phases):
        return Cost(peak_bytes, 0, 0, 0, phases=phases)

    few, many = cost(50, forward=10, loss=50), cost(90, forward=90, loss=60)
    assert Cost.by_phase([(0.5, few), (0.5, many)]).peak_bytes == 55
    other = cost(130, forward=10, backward=130)
    between = Cost.by_phase([(0.5, few), (0.5, other)])
    assert between.peak_bytes == 90 and between.phases == {'forward': 10}
    assert Cost.by_phase([(2, between), (-1, few)]).peak_bytes == 130


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


def offloading(most=math.inf):
    """What one knob more leaves a quarter of, in little time."""
    step = Step(second_forward=False)

    def cost_of(plan):
        rest = {name: level for name, level in plan.items() if name != 'offload'}
        step.asked.clear()  # as it is asked again
        cost = step(rest)
        if 'offload' not in plan:
            return cost
        if cost.peak_bytes > most:
            return None
        return replace(cost, peak_bytes=cost.peak_bytes // 4, offloaded_bytes=1000)

    return cost_of


OFFLOAD = Knob('offload', (True,), least=Cost.without_activations, is_last_resort=True)


def test_the_last_resort_is_tried_where_nothing_else_fits():
    with_others = search([SLICES, OFFLOAD], offloading(), 500, RATES)
    assert with_others.chosen.plan == {'slices': 4}
    assert not any('offload' in one.plan for one in with_others.tried)
    little = replace(DEPTH, levels=(0.8,))
    alone = search([little, OFFLOAD], offloading(), 500, RATES)
    assert alone.chosen.plan == {'offload': True}
    beside_others = search([DEPTH, OFFLOAD], offloading(most=1000), 150, RATES)
    assert beside_others.chosen.plan.keys() == {'checkpointing', 'offload'}


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


def halfway(faster, leaner):
    return [((1.0 if faster is None else faster) + leaner) / 2]


@pytest.mark.parametrize('depth', [DEPTH, replace(DEPTH, between=halfway)])
@pytest.mark.parametrize('second_forward', [False, True])
def test_more_budget_is_never_slower_and_is_used(second_forward, depth):
    knobs = (SLICES, KEPT, depth) if second_forward else (SLICES, depth)
    chosen = [
        find(limit, *knobs, second_forward=second_forward).chosen for limit in range(60, 1700, 20)
    ]
    times, peaks = ([one.seconds for one in chosen], [one.cost.peak_bytes for one in chosen])
    assert times == sorted(times, reverse=True) and peaks == sorted(peaks)


def test_of_all_tried_plans_that_fit_the_fastest_is_chosen():
    depth = replace(DEPTH, levels=(0.9, 0.0), between=halfway)
    for limit in range(60, 1700, 10):
        found = find(limit, SLICES, KEPT, depth)
        fitting = [one.seconds for one in found.tried if one.cost.peak_bytes <= limit]
        assert found.chosen.seconds == min(fitting)


def test_what_follows_from_other_plans_is_not_tried():
    slices, depth = (replace(one, least=Cost.without_activations) for one in (SLICES, DEPTH))
    few = many = 0
    for limit in range(60, 1700, 20):
        found, by_trial = find(limit, slices, KEPT, depth), find(limit, SLICES, KEPT, DEPTH)
        assert found.chosen == by_trial.chosen
        few, many = few + len(found.tried), many + len(by_trial.tried)
    assert few < 0.85 * many


def test_what_is_left_of_a_budget_is_used_by_levels_between():
    def between(faster, leaner):
        assert (faster, leaner) in ((None, 0.8), (0.8, 0.6))
        return (0.95, 0.9, 0.85) if faster is None else (0.75, 0.7, 0.65)

    finely = replace(DEPTH, between=between)
    for limit, level in ((1600, 0.95), (1500, 0.9), (1430, 0.85), (1290, 0.75), (1140, 0.65)):
        chosen = find(limit, finely).chosen
        assert chosen.plan == {'checkpointing': level}
        assert chosen.seconds < find(limit, DEPTH).chosen.seconds


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


class InBlocks(Step):
    """Ten blocks, of which as many may be checkpointed at a price."""

    def __init__(self, price):
        super().__init__(second_forward=False)
        self.price = price

    def __call__(self, plan):
        if {'blocks', 'checkpointing'} <= plan.keys():
            return None
        blocks = plan.get('blocks', 0)
        cost = super().__call__(plan | ({'checkpointing': 1 - blocks / 10} if blocks else {}))
        return replace(cost, flops=cost.flops + self.price * blocks)


@pytest.mark.parametrize(('price', 'name'), [(-(10**7), 'blocks'), (10**7, 'checkpointing')])
def test_of_two_ways_to_do_the_same_the_better_one_is_tried(price, name):
    knobs = SLICES, Knob('blocks', range(1, 11)), replace(DEPTH, instead_of='blocks')
    step = InBlocks(price)
    found = search(knobs, step, 100, RATES)
    assert set(found.chosen.plan) == {'slices', name}
    budgets = [plan for plan in step.asked if 'checkpointing' in plan and 'blocks' not in plan]
    assert (budgets == [{'checkpointing': 0.4}]) == (name == 'blocks')


def test_the_leanest_plan_has_what_makes_it_smaller():
    useless = Knob('useless', (1,))
    assert leanest((SLICES, KEPT, useless, DEPTH), Step()) == {
        'slices': 16,
        'kept': 0.0,
        'checkpointing': 0.0,
    }


def test_what_lasts_is_not_made_smaller_by_less_of_what_does_not():
    slices = replace(SLICES, least=Cost.without_activations)
    depth = replace(DEPTH, least=Cost.without_activations)
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


class InParts(Step):
    """With 900 bytes more in the loss, of which tiles leave a third."""

    def __call__(self, plan):
        cost = super().__call__(plan)
        before, in_loss = cost.peak_bytes, 300 if 'tiles' in plan else 900
        return replace(
            cost,
            peak_bytes=before + in_loss,
            before_loss_bytes=before,
            in_loss_bytes=before + in_loss,
            elsewhere_bytes=before,
        )


def test_what_cannot_mend_it_is_not_asked():
    tiles = Knob('tiles', ('auto',), least=Cost.without_loss)
    slices = replace(SLICES, least=Cost.without_activations)
    step = InParts(second_forward=False)
    found = search((slices, tiles), step, 750, RATES)
    assert set(found.chosen.plan) == {'slices', 'tiles'}
    assert {'tiles': 'auto'} not in step.asked


def test_what_takes_longer_than_it_saves_is_not_asked():
    depth = replace(DEPTH, levels=(0.4, 0.0), least=Cost.without_activations)
    slices = replace(SLICES, least=Cost.without_activations)
    step = Step(second_forward=False)
    assert set(search((slices, depth), step, 600, RATES).chosen.plan) == {'slices'}
    assert not any(len(plan) > 1 for plan in step.asked)  # 16 slices take no fifth of the time


def test_what_fits_nowhere_is_tried_at_its_leanest_only():
    knobs = [replace(one, least=Cost.without_activations) for one in (SLICES, DEPTH)]

    class Large(Step):
        def __call__(self, plan):
            cost = super().__call__(plan)
            return replace(cost, peak_bytes=cost.peak_bytes + 900, by_category={'parameters': 450})

    step = Large(second_forward=False)
    nothing = search(knobs, step, 800, RATES)
    assert nothing.chosen is None and len(step.asked) == 3
    assert nothing.leanest.plan == {'slices': 16, 'checkpointing': 0.0}
