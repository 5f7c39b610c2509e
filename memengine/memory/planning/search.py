"""A bounded search for the least time within a budget of bytes.

Techniques are *knobs* with levels, from the fastest to the leanest. Along a knob bytes fall and
time rises, so that the fastest level that fits is found by doubling and halving, in as many
predictions as the number of levels has digits in base two. As few techniques as do it are
searched, and one more, which is taken if it makes the step faster; what is the last resort only
where nothing fits without it. What cannot fit, or cannot be faster, for all that is known of plans
with fewer techniques or less of them, is not predicted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import combinations
from typing import Any

from memengine.memory.planning.cost import Cost, Rates
from memengine.memory.planning.plans import Found, Knob, Plan, Tried, has_both, has_less, is_divided

_LEVELS_LEANER = (0, 2, 4)  # levels that a knob is set leaner than it need be, for its part's sake


def search(
    knobs: Sequence[Knob],
    cost_of: Callable[[Plan], Cost | None],
    limit_bytes: int,
    rates: Rates,
) -> Found:
    """Find the fastest plan within a limit.

    Args:
        knobs: What may be switched on, the cheapest first.
        cost_of: Predicts or measures a plan; None of one that cannot be. Asked once for each.
        limit_bytes: What the peak may be at most.
        rates: At which the counted work is turned into time.

    Returns:
        The plan, and all that were tried.

    Raises:
        ValueError: When the step as it is has no cost.
    """
    return _Search(knobs, cost_of, limit_bytes, rates).run()


def leanest(knobs: Sequence[Knob], cost_of: Callable[[Plan], Cost | None]) -> Plan:
    """The knobs that make the step smaller, one after another, each at its leanest level.

    Args:
        knobs: As of :func:`search`.
        cost_of: As of :func:`search`.
    """
    plan: Plan = {}
    cost = cost_of(plan)
    for knob in knobs:
        if knob.of:
            continue
        some = {one.name: one.levels[-1] for one in knobs if knob.name in (one.name, one.of)}
        beside = cost_of({**plan, **some})
        if cost and beside and beside.peak_bytes < cost.peak_bytes:
            plan, cost = {**plan, **some}, beside
    return plan


class _Search:
    def __init__(
        self,
        knobs: Sequence[Knob],
        cost_of: Callable[[Plan], Cost | None],
        limit_bytes: int,
        rates: Rates,
    ) -> None:
        self.all_knobs = knobs
        self.knobs = [knob for knob in knobs if not knob.of]
        self.parts = {knob.of: knob for knob in knobs if knob.of}
        self.cost_of, self.limit_bytes, self.rates = cost_of, limit_bytes, rates
        self.known: dict[tuple[tuple[str, Any], ...], Tried | None] = {}

    def run(self) -> Found:
        best = self.plain if self.fits(self.plain) else None
        if not best:
            self.knobs = [knob for knob in self.knobs if not self.is_beaten(knob)]
            best = self.best_of(self.combinations(False)) or self.best_of(self.combinations(True))
        if best is None:  # with what else would fit
            leanest(self.all_knobs, self.cost)
        self.use_what_is_left()
        return Found(self.limit_bytes, self.fastest, tuple(self.by_time()))

    def best_of(self, combinations: Iterator[tuple[Knob, ...]]) -> Tried | None:
        """The fastest plan that fits, of as few knobs as do it and one more."""
        best: Tried | None = None
        for some in combinations:
            if best and len(some) > self.count(best) + 1:
                break
            if any(map(self.is_refused, some)) or not self.may_fit(some):
                continue
            if best and not (self.may_be_faster(some, best) and self.saves(some, best)):
                continue
            for found in self.relaxed_in_turn(some, best):
                if best is None or found.seconds < best.seconds:
                    best = found
        return best

    @cached_property
    def plain(self) -> Tried:
        plain = self.tried({})
        if plain is None:
            raise ValueError('the step as it is can be neither predicted nor measured')
        return plain

    @property
    def fastest(self) -> Tried | None:
        """Of all plans that are known and fit, those included that were tried on the way."""
        return next(filter(self.fits, self.by_time()), None)

    def by_time(self) -> list[Tried]:
        return sorted(filter(None, self.known.values()), key=lambda one: one.seconds)

    def combinations(self, with_last_resort: bool) -> Iterator[tuple[Knob, ...]]:
        for count in range(1, len(self.knobs) + 1):
            for some in combinations(self.knobs, count):
                has_last_resort = any(knob.is_last_resort for knob in some)
                names = {knob.name for knob in some}
                if has_last_resort == with_last_resort and not has_both(some, names):
                    yield some

    def is_beaten(self, knob: Knob) -> bool:
        """Whether what does the same in another way is better half way."""
        other = next((one for one in self.knobs if one.name == knob.instead_of), None)
        half = self.tried({knob.name: knob.levels[len(knob.levels) // 2]}) if other else None
        if other is None or half is None:
            return False

        def saved(level: Any) -> int:
            tried = self.tried({other.name: level})
            return self.plain.cost.peak_bytes - tried.cost.peak_bytes if tried else 0

        enough = self.plain.cost.peak_bytes - half.cost.peak_bytes
        index = bisect_left(other.levels, enough, key=saved)
        found = self.tried({other.name: other.levels[index]}) if index < len(other.levels) else None
        return found is not None and found.seconds <= half.seconds

    def is_refused(self, knob: Knob) -> bool:
        """Whether it has been found that it cannot be switched on."""
        alone = _key(self.at_leanest([knob]))
        return not knob.is_last_resort and alone in self.known and self.known[alone] is None

    def count(self, tried: Tried) -> int:
        """How many techniques are on."""
        return sum(knob.name in tried.plan for knob in self.knobs)

    def may_fit(self, some: Sequence[Knob]) -> bool:
        """Whether some of them, of which the leanest is known, leave what the others may mend."""
        for count in range(len(some)):
            for few in combinations(some, count):
                known = self.known.get(_key(self.at_leanest(few)))
                if known and not self.fits(known, [knob for knob in some if knob not in few]):
                    return False
        return True

    def may_be_faster(self, some: Sequence[Knob], best: Tried) -> bool:
        """Whether no knob takes the more time for the room that it leaves to the others."""
        for knob in some if len(some) > 1 else ():
            others = tuple(one for one in some if one is not knob)
            if knob.least is None or _key(self.at_leanest(others)) not in self.known:
                continue
            relaxed = self.relaxed_in_turn(others, best, [knob])
            fastest = min((found.seconds for found in relaxed), default=best.seconds)
            if fastest >= best.seconds or fastest + self.extra_seconds(knob) >= best.seconds:
                return False
        return self.plain.seconds + sum(map(self.extra_seconds, some)) < best.seconds

    def extra_seconds(self, knob: Knob) -> float:
        """What it adds to the plain step at its fastest level, and to others no less."""
        alone = self.tried({one.name: one.levels[0] for one in self.with_parts([knob])})
        return alone.seconds - self.plain.seconds if alone else float('inf')

    def saves(self, some: Sequence[Knob], best: Tried) -> bool:
        """Whether each of them, beside what is on or by itself, makes the step smaller."""

        def is_smaller(knob: Knob, plan: Plan) -> bool:
            without, beside = self.cost(plan), self.cost({**plan, **self.at_leanest([knob])})
            return bool(without and beside and beside.peak_bytes < without.peak_bytes)

        others = [knob for knob in some if len(some) > 1 and knob.name not in best.plan]
        return all(any(is_smaller(knob, plan) for plan in (best.plan, {})) for knob in others)

    def relaxed_in_turn(
        self, some: tuple[Knob, ...], best: Tried | None, beside: Sequence[Knob] = ()
    ) -> Iterator[Tried]:
        """Plans that differ in which knob takes what room there is, and how much of it."""
        has_parts = any(knob.name in self.parts for knob in some)
        for order in (some, some[::-1])[: len(some)]:
            for leaner in _LEVELS_LEANER if has_parts else (0,):
                found = self.relaxed(order, leaner, best, beside)
                if found is not None:
                    yield found

    def relaxed(
        self, some: Sequence[Knob], leaner: int, best: Tried | None, beside: Sequence[Knob]
    ) -> Tried | None:
        """The fastest levels that fit, one knob after another; None when not even the leanest do.

        A knob with a part is set so many levels leaner, which leaves room to its part. None, too,
        when it is seen on the way that no plan so found is faster than the best.
        """
        order = self.with_parts(some)
        plan = self.at_leanest(some)
        if not self.plan_fits(plan, beside):
            return None
        at_fastest = {knob.name: knob.levels[0] for knob in order}
        for knob in order:
            level = self.fastest_level(knob, plan, at_fastest, best, beside)
            if level is None:
                return None
            if leaner and knob.name in self.parts:
                index = min(knob.levels.index(level) + leaner, len(knob.levels) - 1)
                level = knob.levels[index]
            plan[knob.name] = at_fastest[knob.name] = level
        found = self.tried(plan)
        return found if self.fits(found, beside) else None

    def at_leanest(self, some: Sequence[Knob]) -> dict[str, Any]:
        return {knob.name: knob.levels[-1] for knob in self.with_parts(some)}

    def with_parts(self, some: Sequence[Knob]) -> list[Knob]:
        return [
            one for knob in some for one in (knob, self.parts.get(knob.name)) if one is not None
        ]

    def fastest_level(
        self,
        knob: Knob,
        plan: Plan,
        at_fastest: Plan,
        best: Tried | None,
        beside: Sequence[Knob] = (),
    ) -> Any:
        """The first level that fits, as the last does: by doubling the step, then halving it.

        None when no level that fits is faster than the best, with other knobs at their fastest.
        """

        def fits(index: int) -> bool:
            return self.plan_fits({**plan, knob.name: knob.levels[index]}, beside)

        def is_late(index: int) -> bool:
            least = self.least_seconds({**at_fastest, knob.name: knob.levels[index]})
            return best is not None and least >= best.seconds

        below, fitting = -1, len(knob.levels) - 1
        while fitting - below > 1 and not is_late(below + 1):
            index = max(0, min(2 * below + 1, (below + fitting) // 2))
            below, fitting = (below, index) if fits(index) else (index, fitting)
        return None if is_late(below + 1) else knob.levels[fitting]

    def use_what_is_left(self) -> None:
        """Try levels between those that were tried, of each plan that fits."""
        finer = [knob for knob in self.knobs if knob.between is not None]
        for one in filter(self.fits, self.by_time()):
            for knob in finer:
                self.try_a_level_between(knob, one)

    def try_a_level_between(self, knob: Knob, one: Tried) -> None:
        """Make a plan that fits faster, if the next faster level would beat the fastest."""
        if knob.name not in one.plan or knob.between is None:
            return
        fastest = self.fastest or one
        level = one.plan[knob.name]
        index = knob.levels.index(level)
        faster = {knob.name: knob.levels[index - 1]} if index else {}
        others = {name: one.plan[name] for name in one.plan if name != knob.name}
        if self.least_seconds({**others, **faster}) >= fastest.seconds:
            return
        bound = self.tried({**others, **faster})
        if bound and bound.seconds < fastest.seconds and not self.fits(bound):
            levels = [*knob.between(faster.get(knob.name), level), level]
            finest = self.fastest_level(replace(knob, levels=levels), one.plan, one.plan, None)
            self.tried({**others, knob.name: finest})

    def least_seconds(self, plan: Plan) -> float:
        """What a plan takes at least, for what is known of plans with less of each technique."""
        less = [
            one for one in self.known.values() if one and has_less(self.all_knobs, one.plan, plan)
        ]
        return max(
            (o.seconds for o in less if not is_divided(self.knobs, o.plan, plan)), default=0.0
        )

    def plan_fits(self, plan: Plan, beside: Sequence[Knob]) -> bool:
        """As :meth:`fits`; for what is known of plans with more or less of it, if that says it."""
        if _key(plan) not in self.known:
            for one in filter(None, self.known.values()):
                if has_less(self.all_knobs, one.plan, plan) and self.fits(one, beside):
                    return True
                if has_less(self.all_knobs, plan, one.plan) and not self.fits(one, beside):
                    return False
        return self.fits(self.tried(plan), beside)

    def fits(self, tried: Tried | None, beside: Sequence[Knob] = ()) -> bool:
        """Whether it is within the limit; with other knobs, whether they may bring it there."""
        if tried is None:
            return False
        cost = tried.cost
        for knob in beside:
            if knob.least is None:
                return True
            cost = knob.least(cost)
        return cost.peak_bytes <= self.limit_bytes

    def cost(self, plan: Plan) -> Cost | None:
        tried = self.tried(plan)
        return tried.cost if tried else None

    def tried(self, plan: Plan) -> Tried | None:
        key = _key(plan)
        if key not in self.known:
            cost = self.cost_of(plan)
            seconds = cost.seconds(self.rates) if cost else 0
            self.known[key] = Tried(dict(plan), cost, seconds) if cost else None
        return self.known[key]


def _key(plan: Plan) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(plan.items()))
