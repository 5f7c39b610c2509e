"""Settings whose fields carry type, range, unit and help, and which check themselves."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from numbers import Integral, Real
from operator import ge, le, lt
from typing import (
    Annotated,
    Any,
    ForwardRef,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)


def setting(
    default: Any = MISSING,
    *,
    help: str,
    unit: str = '',
    low: float | None = None,
    high: float | None = None,
    below: float | None = None,
) -> Any:
    """A field of :class:`Settings`.

    Args:
        default: Its value when it is left out; without one it has to be given.
        help: One line: what it does.
        unit: What a number counts.
        low: The least number, or number in a dict, that it may be.
        high: The greatest.
        below: What it must stay below.
    """
    metadata = dict(help=help, unit=unit, low=low, high=high, below=below)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """What a technique is set to: its fields, made by :func:`setting`, are checked when it is made.

    A technique that can find nothing to do offers ``strict: bool = setting(True, ...)``.

    Raises:
        ValueError: For a value of another type or out of range, naming the field.
    """

    strict = True

    def __post_init__(self) -> None:
        for name, one in settings_of(type(self)).items():
            value = getattr(self, name)
            if not one.allows(value):
                raise ValueError(f'{name} is {one.wanted}, got {value!r}')


_LIMITS = {'low': ('at least', ge), 'high': ('at most', le), 'below': ('below', lt)}


@dataclass(frozen=True)
class Setting:
    """What a field of a class of settings may be."""

    field: Field[Any]
    hint: Any

    @property
    def is_required(self) -> bool:
        """Whether it has no default."""
        return self.field.default is MISSING

    @property
    def wanted(self) -> str:
        """Its type and range, in words."""
        said = [f'{word} {limit:g}' for word, _, limit in self._limits()]
        return f'{in_words(self.hint)}{", " if said else ""}{" and ".join(said)}'

    def allows(self, value: Any) -> bool:
        """Whether it may have this value."""
        inner = value.values() if isinstance(value, Mapping) else [value]
        numbers = [one for one in inner if isinstance(one, Real) and not isinstance(one, bool)]
        return is_of(value, self.hint) and all(
            holds(number, limit) for number in numbers for _, holds, limit in self._limits()
        )

    def _limits(self) -> list[tuple[str, Callable[[Any, Any], bool], float]]:
        stated = self.field.metadata
        return [(*_LIMITS[key], stated[key]) for key in _LIMITS if stated[key] is not None]


def settings_of(kind: type[Settings]) -> dict[str, Setting]:
    """The fields of a class of settings, by name."""
    hints = get_type_hints(kind)
    return {one.name: Setting(one, hints[one.name]) for one in fields(kind)}


def is_of(value: Any, hint: Any, is_instance: Callable[[Any, Any], bool] = isinstance) -> bool:
    """Whether a value is of a type; a list may stand for a tuple, as configs write either.

    Args:
        value: Any value.
        hint: A class or what :mod:`typing` makes of classes.
        is_instance: Decides about classes that are no numbers.
    """
    origin, parts = _taken_apart(hint)
    hint = hint if origin else get_origin(hint) or hint
    if hint is Any or isinstance(hint, (TypeVar, ForwardRef)):
        return True
    if origin is Annotated:
        return is_of(value, parts[0], is_instance)
    if origin in (Union, types.UnionType):
        return any(is_of(value, part, is_instance) for part in parts)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if hint in (int, float):
        number = Integral if hint is int else Real
        return isinstance(value, number) and not isinstance(value, bool)
    if origin is tuple and Ellipsis not in parts:
        is_pair = isinstance(value, (list, tuple)) and len(value) == len(parts)
        return is_pair and all(is_of(*pair, is_instance) for pair in zip(value, parts, strict=True))
    if origin is not None and issubclass(origin, Sequence):
        return isinstance(value, (list, tuple)) and all(
            is_of(one, parts[0], is_instance) for one in value
        )
    if is_typeddict(hint):
        return isinstance(value, Mapping)
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(
            is_of(one, parts[1], is_instance) for one in value.values()
        )
    if hint in (list, tuple, Sequence):
        return isinstance(value, (list, tuple))
    return is_instance(value, origin or hint)


def _taken_apart(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Origin and arguments; a bare ``typing.Dict`` is no more than its class."""
    parts = get_args(hint)
    return (get_origin(hint) if parts else None), parts


_IN_WORDS = {
    bool: 'True or False',
    int: 'a whole number',
    float: 'a number',
    str: 'text',
    dict: 'a dict',
    list: 'a list',
    tuple: 'a list',
    type(None): 'None',
    Any: 'anything',
    'Tensor': 'a tensor',  # by its name, as torch may not be there yet
}


def in_words(hint: Any) -> str:
    """What a hint asks for, as an error says it."""
    origin, parts = _taken_apart(hint)
    if origin is Annotated:
        return in_words(parts[0])
    if origin in (Union, types.UnionType):
        *others, last = dict.fromkeys(map(in_words, parts))
        return f'{", ".join(others)} or {last}' if others else last
    if origin is Literal:
        *others, last = map(repr, parts)
        return f'{", ".join(others)} or {last}' if others else last
    if origin is tuple and Ellipsis not in parts:
        return f'({", ".join(map(in_words, parts))})'
    if origin in (type, Callable):
        return 'a class' if origin is type else 'a function'
    if origin is not None and issubclass(origin, (Sequence, Mapping)):
        is_dict = issubclass(origin, Mapping)
        inner = in_words(parts[1 if is_dict else 0])
        kind = 'dict' if is_dict else 'list'
        return f'a {kind}' if inner == 'anything' else f'a {kind} of ({inner})'
    hint = get_origin(hint) or hint
    name = getattr(hint, '__name__', str(hint))
    return 'a dict' if is_typeddict(hint) else _IN_WORDS.get(hint) or _IN_WORDS.get(name, name)
