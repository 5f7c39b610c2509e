"""How a place of a config is described, and bounds on plain values."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from memengine.suggest import did_you_mean

__all__ = [
    'BOOL',
    'NON_NEGATIVE_INT',
    'NON_NEGATIVE_NUMBER',
    'POSITIVE_INT',
    'POSITIVE_NUMBER',
    'SEED',
    'Config',
    'Place',
    'PlaceOrChoice',
    'Value',
    'one_of',
]

Config = Mapping[Any, Any]


@dataclass(frozen=True)
class Value:
    """A bound on a plain value.

    Attributes:
        wanted: What it must be, for the error.
        holds: Whether a value is that.
        hint: What to add to the error for a value, if anything.
    """

    wanted: str
    holds: Callable[[Any], bool]
    hint: Callable[[Any], str] = lambda value: ''


@dataclass(frozen=True)
class Place:
    """What may stand at a place of the config.

    Attributes:
        registry: Name in ``mmengine.registry`` of what is built here; None builds nothing.
        default: The type when none is written.
        accepts: A callable whose arguments, or the very names, that a dict without type may have.
        extra: Keys that whoever builds takes out before the constructor sees them.
        positional: Leading arguments that are supplied by position.
        supplied: Arguments that are supplied by name.
        needs: Keys that must be there although no signature says so.
        complete: Whether every other argument comes from the config, so that one that is missing
            can be told now.
        scoped: Whether a name is looked up in the default scope first (MMEngine looks functions
            up in its own registry only).
        each: For a dict of free names: what each value is.
        by_name: Whether a type may stand here without a dict around it.
        accepts_bool: Whether True and False may stand here instead of a dict.
        lenient: Only keys that look like a misspelling are refused.
        late: A module that registers more types when imported.
        places: What stands below some keys.
        values: Bounds by key.
        rule: Further problems of the dict, as (key, sentence).
    """

    registry: str | None = None
    default: str | None = None
    accepts: Callable[..., Any] | frozenset[str] | None = None
    extra: frozenset[str] = frozenset()
    positional: int = 0
    supplied: frozenset[str] = frozenset()
    needs: tuple[str, ...] = ()
    complete: bool = False
    scoped: bool = True
    each: Place | None = None
    by_name: bool = False
    accepts_bool: bool = False
    lenient: bool = False
    late: str | None = None
    places: Mapping[str, PlaceOrChoice] = field(default_factory=dict)
    values: Mapping[str, Value] = field(default_factory=dict)
    rule: Callable[[Config], Iterator[tuple[str, str]]] | None = None


PlaceOrChoice = Place | Callable[[Any], Place]


def _whole(value: Any, least: int) -> bool:
    return (
        isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least
    )


def _is_positive_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool((value > 0).all())
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and float(value) > 0


def _number_as_text(value: Any) -> str:
    try:
        return (
            f' (text; write it without quotes, as {float(value)!r})'
            if isinstance(value, str)
            else ''
        )
    except ValueError:
        return ''


def one_of(*choices: Any) -> Value:
    """The bound to be one of a few values."""
    return Value(
        f'one of {", ".join(map(repr, choices))}',
        lambda value: value in choices,
        lambda value: did_you_mean(str(value), [str(choice) for choice in choices]),
    )


POSITIVE_INT = Value('a positive integer', lambda value: _whole(value, 1), _number_as_text)
NON_NEGATIVE_INT = Value('an integer of 0 or more', lambda value: _whole(value, 0), _number_as_text)
POSITIVE_NUMBER = Value('a positive number', _is_positive_number, _number_as_text)
NON_NEGATIVE_NUMBER = Value(
    'a number of 0 or more', lambda value: value == 0 or _is_positive_number(value), _number_as_text
)
BOOL = Value('True or False', lambda value: isinstance(value, bool))
SEED = Value('an integer or None', lambda value: value is None or _whole(value, 0))
