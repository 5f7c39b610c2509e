"""What a part of a config may hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from memengine.engine.config.schema.bounds import Constraint
from memengine.engine.config.schema.types import Arguments, arguments_of

Config = Mapping[Any, Any]


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


def is_stated(schema: SchemaChoice) -> bool:
    """Whether the table says what a dict at this place holds."""
    if not isinstance(schema, Schema):
        return True
    return not schema.inferred and bool(schema.registry or schema.accepts or schema.entry)


def accepted_keys(schema: Schema) -> Arguments:
    """The keys of a dict without type: of given ones, or anything."""
    if schema.accepts is None:
        return Arguments(frozenset(), open=True)
    if callable(schema.accepts):
        return arguments_of(schema.accepts, schema.positional)
    if isinstance(schema.accepts, Arguments):
        return schema.accepts
    return Arguments(frozenset(schema.accepts))
