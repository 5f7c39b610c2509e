"""Bounds on plain values.

Neither torch nor MMEngine is imported here, so that a number that is out of bounds can be refused
before they are.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args, get_origin

from memengine.suggest import did_you_mean
from memengine.technique import in_words, is_of


@dataclass(frozen=True)
class Constraint:
    """A bound on a plain value.

    Attributes:
        wanted: What it must be, for the error.
        holds: Whether a value is that.
        choices: All that it may be, where these are few.
    """

    wanted: str
    holds: Callable[[Any], bool]
    choices: tuple[Any, ...] = ()

    def fault(self, value: Any) -> str | None:
        """What is wrong with a value, if anything."""
        if self.holds(value):
            return None
        hint = did_you_mean(str(value), map(str, self.choices))
        if isinstance(value, str) and not self.choices:
            with suppress(ValueError):  # of a text that is no number
                hint = f' (text; write it without quotes, as {float(value)!r})'
        return f'must be {self.wanted}, got {value!r}{hint}'


def one_of(*choices: Any) -> Constraint:
    """The bound to be one of a few values."""
    wanted = f'one of {", ".join(map(repr, choices))}'
    return Constraint(wanted, lambda value: value in choices, choices)


def whole_number(least: int, wanted: str) -> Constraint:
    """The bound of a whole number."""
    return Constraint(wanted, lambda value: is_of(value, int) and value >= least)


def number_within(wanted: str, holds: Callable[[Any], bool]) -> Constraint:
    """The bound of a number that is neither infinite nor NaN; a tensor of one may stand for it."""

    def is_within(value: Any) -> bool:
        is_number = isinstance(value, (numbers.Real, _tensors())) and not isinstance(value, bool)
        return is_number and math.isfinite(value) and bool(holds(value))

    return Constraint(wanted, is_within)


def each(bound: Constraint) -> Constraint:
    """The bound of a number, or of those in a list or dict; text and None are left to the hint."""

    def holds(value: Any) -> bool:
        if isinstance(value, (Mapping, list, tuple)):
            return all(map(holds, value.values() if isinstance(value, Mapping) else value))
        return not isinstance(value, numbers.Real) or isinstance(value, bool) or bound.holds(value)

    return Constraint(bound.wanted, holds)


def of_hint(hint: Any, strict: bool) -> Constraint:
    """What a constructor's type hint asks for, of a value that may be built before it gets there.

    Args:
        hint: The hint.
        strict: Whether its word is taken for it. Otherwise only text is refused that reads as a
            number, or stands for True or False, where no text is meant.
    """
    literals = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]

    def holds(value: Any) -> bool:
        if not isinstance(value, _PLAIN) or (isinstance(value, Mapping) and 'type' in value):
            return True  # built, or about to be
        if not strict and not (isinstance(value, str) and (hint is bool or _is_quoted(value))):
            return True
        return is_of(value, hint, _may_become) and value == value  # NaN is meant nowhere

    return Constraint(in_words(hint), holds, tuple(c for part in literals for c in get_args(part)))


_PLAIN = (bool, int, float, str, list, tuple, Mapping, type(None))


def _may_become(value: Any, kind: Any) -> bool:
    """Whether a plain value is of a class, or may be the name or description of what is."""
    if not isinstance(kind, type) or Protocol in kind.__mro__:
        return True
    if issubclass(kind, (*_PLAIN, _tensors())):
        return isinstance(value, kind)
    if isinstance(value, Mapping):
        return 'type' in value
    return isinstance(value, (str, kind)) and not isinstance(value, bool)


def _tensors() -> Any:
    """What :func:`isinstance` tells tensors by: nothing is one before torch is imported."""
    return getattr(sys.modules.get('torch'), 'Tensor', ())


def _is_quoted(text: str) -> bool:
    """Whether a text reads as a number, True or False."""
    with suppress(ValueError):
        return math.isfinite(float(text))
    return text in ('True', 'False')


POSITIVE_INT = whole_number(1, 'a positive integer')
NON_NEGATIVE_INT = whole_number(0, 'an integer of 0 or more')
POSITIVE_NUMBER = number_within('a positive number', lambda value: value > 0)
NON_NEGATIVE_NUMBER = number_within('a number of 0 or more', lambda value: value >= 0)
FINITE = number_within('a finite number', lambda value: True)
FRACTION = number_within('a number from 0 to 1', lambda value: 0 <= value <= 1)
BOOL = Constraint('True or False', lambda value: isinstance(value, bool))
