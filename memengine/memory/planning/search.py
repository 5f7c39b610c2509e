"""A bounded search for the least time within a budget of bytes.

Techniques are *knobs* with levels, from the fastest to the leanest. Along a knob bytes fall and
time rises, so that the fastest level that fits is found by doubling and halving, in as many
predictions as the number of levels has digits in base two. As few techniques as do it are
searched, and one more, which is taken if it makes the step faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

from memengine.memory.planning.cost import Cost, Rates

__all__ = ['Found', 'Knob', 'Plan', 'Tried', 'leanest', 'search']

_LEVELS_LEANER = (0, 2, 4)  # levels that a knob is set leaner than it need be, for its part's sake

Plan: TypeAlias = Mapping[str, Any]
"""Levels by the names of the knobs that are on; empty is the step as it is."""


@dataclass(frozen=True)
class Knob:
    """A technique that may be on, and how much of it.

    Attributes:
        name: Its name in plans.
        levels: From the fastest to the leanest.
        of: The knob of which this one is a part, so that it is on if and only if that one is.
        of_activations: Whether it leaves what is there at every update as it is: parameters, their
            gradients, the optimiser's state.
    """

    name: str
    levels: Sequence[Any]
    of: str = ''
    of_activations: bool = False


@dataclass(frozen=True)
class Tried:
    """A plan and what it costs."""

    plan: Plan
    cost: Cost
    seconds: float


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        limit_bytes: What was allowed.
        chosen: The fastest plan within it; None when nothing fits.
        tried: All plans that were tried, the fastest first.
    """

    limit_bytes: int
    chosen: Tried | None
    tried: tuple[Tried, ...]

    @property
    def plain(self) -> Tried:
        """The step without any technique of the search."""
        return next(one for one in self.tried if not one.plan)

    @property
    def leanest(self) -> Tried:
        """The plan with the fewest bytes."""
        return min(self.tried, key=lambda one: one.cost.peak_bytes)

    @property
    def next_faster(self) -> Tried | None:
        """Of the faster plans that do not fit, the one that is the closest to it."""
        limit = self.chosen.seconds if self.chosen else float('inf')
        faster = [one for one in self.tried if one.seconds < limit]
        return min(faster, key=lambda one: one.cost.peak_bytes, default=None)

    @property
    def front(self) -> tuple[Tried, ...]:
        """The plans that no other beats in both bytes and time, the fastest first."""
        front: list[Tried] = []
        for one in self.tried:
            if not front or one.cost.peak_bytes < front[-1].cost.peak_bytes:
                front.append(one)
        return tuple(front)


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
        self.knobs = [knob for knob in knobs if not knob.of]
        self.parts = {knob.of: knob for knob in knobs if knob.of}
        self.cost_of, self.limit_bytes, self.rates = cost_of, limit_bytes, rates
        self.known: dict[tuple[tuple[str, Any], ...], Tried | None] = {}

    def run(self) -> Found:
        plain = self.tried({})
        if plain is None:
            raise ValueError('the step as it is can be neither predicted nor measured')
        best = plain if self.fits(plain) else None
        is_too_much = plain.cost.at_update_bytes > self.limit_bytes
        hopeless: list[tuple[Knob, ...]] = []
        for some in () if best else self.combinations():
            if is_too_much and all(knob.of_activations for knob in some):
                hopeless.append(some)
                continue
            if best and len(some) > self.count(best) + 1:
                break
            if any(map(self.is_refused, some)):
                continue
            if best and not (self.saves(some, best) and self.may_be_faster(some, best)):
                continue
            for found in self.relaxed_in_turn(some):
                if best is None or found.seconds < best.seconds:
                    best = found
        for some in () if best else hopeless:  # of which one may be the leanest there is
            self.relaxed(some, 0)
        tried = sorted(filter(None, self.known.values()), key=lambda one: one.seconds)
        return Found(self.limit_bytes, best, tuple(tried))

    def combinations(self) -> Iterator[tuple[Knob, ...]]:
        for count in range(1, len(self.knobs) + 1):
            yield from combinations(self.knobs, count)

    def is_refused(self, knob: Knob) -> bool:
        """Whether it has been found that it cannot be switched on."""
        alone = _key({one.name: one.levels[-1] for one in self.with_parts([knob])})
        return alone in self.known and self.known[alone] is None

    def count(self, tried: Tried) -> int:
        """How many techniques are on."""
        return sum(knob.name in tried.plan for knob in self.knobs)

    def may_be_faster(self, some: Sequence[Knob], best: Tried) -> bool:
        fastest = self.tried({knob.name: knob.levels[0] for knob in self.with_parts(some)})
        return fastest is not None and fastest.seconds < best.seconds

    def saves(self, some: Sequence[Knob], best: Tried) -> bool:
        """Whether each of them, beside what is on or by itself, makes the step smaller."""
        for knob in some if len(some) > 1 else ():
            if knob.name in best.plan:
                continue
            leanest = {one.name: one.levels[-1] for one in self.with_parts([knob])}
            pairs = [
                (self.tried(plan), self.tried({**plan, **leanest})) for plan in (best.plan, {})
            ]
            both = [(without, beside) for without, beside in pairs if without and beside]
            if all(beside.cost.peak_bytes >= without.cost.peak_bytes for without, beside in both):
                return False
        return True

    def relaxed_in_turn(self, some: tuple[Knob, ...]) -> Iterator[Tried]:
        """Plans that differ in which knob takes what room there is, and how much of it."""
        has_parts = any(knob.name in self.parts for knob in some)
        for order in (some, some[::-1])[: len(some)]:
            for leaner in _LEVELS_LEANER if has_parts else (0,):
                found = self.relaxed(order, leaner)
                if found is None:
                    return
                yield found

    def relaxed(self, some: Sequence[Knob], leaner: int) -> Tried | None:
        """The fastest levels that fit, one knob after another; None when not even the leanest do.

        A knob with a part is set so many levels leaner, which leaves room to its part.
        """
        order = self.with_parts(some)
        plan = {knob.name: knob.levels[-1] for knob in order}
        if not self.fits(self.tried(plan)):
            return None
        for knob in order:
            level = self.fastest_level(knob, plan)
            if leaner and knob.name in self.parts:
                index = min(knob.levels.index(level) + leaner, len(knob.levels) - 1)
                level = knob.levels[index]
            plan[knob.name] = level
        return self.tried(plan)

    def with_parts(self, some: Sequence[Knob]) -> list[Knob]:
        return [
            one for knob in some for one in (knob, self.parts.get(knob.name)) if one is not None
        ]

    def fastest_level(self, knob: Knob, plan: Plan) -> Any:
        """The first level that fits, as the last does: by doubling the step, then halving it."""

        def fits(index: int) -> bool:
            return self.fits(self.tried({**plan, knob.name: knob.levels[index]}))

        last, below, index = len(knob.levels) - 1, -1, 0
        while index < last and not fits(index):
            below, index = index, min(2 * index + 1, last)
        while index - below > 1:
            middle = (below + index) // 2
            below, index = (below, middle) if fits(middle) else (middle, index)
        return knob.levels[index]

    def fits(self, tried: Tried | None) -> bool:
        return tried is not None and tried.cost.peak_bytes <= self.limit_bytes

    def tried(self, plan: Plan) -> Tried | None:
        key = _key(plan)
        if key not in self.known:
            cost = self.cost_of(plan)
            seconds = cost.seconds(self.rates) if cost else 0
            self.known[key] = Tried(dict(plan), cost, seconds) if cost else None
        return self.known[key]


def _key(plan: Plan) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(plan.items()))
