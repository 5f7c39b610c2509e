"""What stands below an argument of a constructor, where no table says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_type_hints, is_typeddict

from mmengine.registry import Registry

from memengine.engine.config.schema.runner import PARAMETER_SCHEMAS
from memengine.engine.config.schema.schema import Schema
from memengine.engine.config.schema.types import REGISTRIES, Arguments


def infer_schema(key: Any, parent: Schema, arguments: Arguments) -> Schema:
    """What stands below an argument: stated by its hint, known by its name, or as its parent.

    Args:
        key: The argument's name.
        parent: The schema of the dict that has it.
        arguments: What takes the argument.
    """
    parts = list(_nested_hints(arguments.hints.get(key)))
    for registry in (part for part in parts if isinstance(part, Registry)):
        root = next(name for name, it in REGISTRIES.items() if it in (registry, registry.parent))
        default = next((part for part in parts if isinstance(part, str)), None)
        return Schema(
            root,
            default=default,
            supplied=next((part for part in parts if isinstance(part, tuple)), ()),
            required=() if default else ('type',),
            complete=True,
            bare_type=str in parts,
        )
    if key in PARAMETER_SCHEMAS and parent.registry != 'WEIGHT_INITIALIZERS':
        return PARAMETER_SCHEMAS[key]
    typed = [part for part in parts if is_typeddict(part)]
    # A dict that goes by such a name is often not built as it is.
    lenient = isinstance(key, str) and key.endswith(('cfg', 'cfgs'))
    return Schema(
        parent.registry,
        accepts=_typed_keys(typed[0]) if len(typed) == 1 else None,
        complete=len(typed) == 1,
        inferred=True,
        lenient=lenient and not typed,
    )


def _typed_keys(kind: Any) -> Arguments:
    """The keys of a TypedDict."""
    hints = get_type_hints(kind, include_extras=True)
    return Arguments(frozenset(hints), kind.__required_keys__, hints=hints)


def _nested_hints(hint: Any) -> Iterator[Any]:
    """A hint, all that it is made of, and what an Annotated one says besides."""
    yield hint
    for part in (*get_args(hint), *getattr(hint, '__metadata__', ())):
        yield from _nested_hints(part)
