"""What a part of a config may hold, and bounds on plain values."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from memengine.engine.config.types import Arguments
from memengine.suggest import did_you_mean

__all__ = [
    'BOOL',
    'NON_NEGATIVE_INT',
    'NON_NEGATIVE_NUMBER',
    'POSITIVE_INT',
    'POSITIVE_NUMBER',
    'SEED',
    'Config',
    'Constraint',
    'Schema',
    'SchemaChoice',
    'one_of',
]

Config = Mapping[Any, Any]


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


@dataclass(frozen=True)
class Schema:
    """What a part of the config may hold.

    Attributes:
        registry: Name in ``mmengine.registry`` of what is built here; None builds nothing.
        default: The type when none is written.
        accepts: A callable whose arguments a dict without type may have; or these, or their names.
        builder_keys: Keys that whoever builds takes out before the constructor sees them.
        positional: Leading arguments that are supplied by position.
        supplied: Arguments that are supplied by name.
        required: Keys that must be there although no signature says so.
        complete: Whether every other argument comes from the config, so that one that is missing
            can be told now.
        entry: For a dict of free names: what each value is.
        bare_type: Whether a type may stand here without a dict around it.
        inferred: Whether it follows from the name of an argument, or from what is around it.
        lenient: Only keys that look like a misspelling are refused.
        children: Schemas below some keys.
        constraints: Bounds by key.
        rule: Further problems of the dict, as (key, sentence).
    """

    registry: str | None = None
    default: str | None = None
    accepts: Callable[..., Any] | Arguments | Collection[str] | None = None
    builder_keys: Collection[str] = ()
    positional: int = 0
    supplied: Collection[str] = ()
    required: Collection[str] = ()
    complete: bool = False
    entry: Schema | None = None
    bare_type: bool = False
    inferred: bool = False
    lenient: bool = False
    children: Mapping[str, SchemaChoice] = field(default_factory=dict)
    constraints: Mapping[str, Constraint] = field(default_factory=dict)
    rule: Callable[[Config], Iterator[tuple[str, str]]] = lambda config: iter(())


SchemaChoice = Schema | Callable[[Any], Schema]


def _is_int(value: Any, least: int) -> bool:
    is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_int and int(value) >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, (numbers.Real, torch.Tensor)) and not isinstance(value, bool)


def one_of(*choices: Any) -> Constraint:
    """The bound to be one of a few values."""
    wanted = f'one of {", ".join(map(repr, choices))}'
    return Constraint(wanted, lambda value: value in choices, choices)


POSITIVE_INT = Constraint('a positive integer', lambda value: _is_int(value, 1))
NON_NEGATIVE_INT = Constraint('an integer of 0 or more', lambda value: _is_int(value, 0))
POSITIVE_NUMBER = Constraint(
    'a positive number', lambda value: _is_number(value) and bool(value > 0)
)
NON_NEGATIVE_NUMBER = Constraint(
    'a number of 0 or more', lambda value: _is_number(value) and bool(value >= 0)
)
BOOL = Constraint('True or False', lambda value: isinstance(value, bool))
SEED = Constraint('an integer or None', lambda value: value is None or _is_int(value, 0))
