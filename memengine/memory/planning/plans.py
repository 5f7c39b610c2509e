"""What a search for a plan is about: knobs, plans, what was tried and what is found."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from memengine.memory.planning.cost import Cost

Plan: TypeAlias = Mapping[str, Any]
"""Levels by the names of the knobs that are on; empty is the step as it is."""


@dataclass(frozen=True)
class Knob:
    """A technique that may be on, and how much of it.

    Attributes:
        name: Its name in plans.
        levels: From the fastest to the leanest.
        of: The knob of which this one is a part, so that it is on if and only if that one is.
        least: Makes of a step's cost the least bytes that are possible with the knob on, which then
            makes no step faster; None where nothing is known of either.
        instead_of: The knob that does the same in another way. Only one of both is ever on, and
            this one is left out if that one, half way, is as fast in no more bytes.
        between: Levels between one and the next faster, from the fastest, to use up a budget by;
            None is given for what is faster than the first.
        is_last_resort: Whether it is tried only where nothing fits without it. It may be refused by
            itself, and not beside others.
    """

    name: str
    levels: Sequence[Any]
    of: str = ''
    least: Callable[[Cost], Cost] | None = None
    instead_of: str = ''
    between: Callable[[Any, Any], Sequence[Any]] | None = None
    is_last_resort: bool = False


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


def has_both(knobs: Iterable[Knob], names: Container[str]) -> bool:
    """Whether two of these knobs are on that do the same, each in its own way."""
    return any(knob.name in names and knob.instead_of in names for knob in knobs)


def has_less(knobs: Iterable[Knob], one: Plan, other: Plan) -> bool:
    """Whether one plan has of each technique as much as another, or less.

    So it takes no more time, and no fewer bytes.
    """
    for knob in knobs:
        here, there = one.get(knob.name), other.get(knob.name)
        if here == there:
            continue
        levels = [None, *knob.levels]  # None is off
        is_lean = knob.of or knob.least is not None
        if not is_lean or here not in levels or there not in levels:
            return False
        if levels.index(here) > levels.index(there):
            return False
    return True


def is_divided(knobs: Iterable[Knob], one: Plan, other: Plan) -> bool:
    """Whether a technique has a part of the work in one plan, and all of it in another.

    The Python that divides the work is then saved.
    """
    finer = [knob for knob in knobs if knob.between is not None]
    return any(
        knob.name in one and one[knob.name] != knob.levels[-1] == other.get(knob.name)
        for knob in finer
    )
