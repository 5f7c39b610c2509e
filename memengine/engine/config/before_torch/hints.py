"""What sources say of values: type hints of constructors, settings of techniques.

Hints become those of :mod:`typing`, so that values are compared with them, and errors put, as when
the classes are there. What a hint names that is no plain type may be anything here.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional, Union

from memengine.engine.config.before_torch.sources import (
    PREFIX,
    assigned_in_source,
    class_in_source,
    network_classes,
    techniques_in_source,
)
from memengine.technique import Settings, Technique, setting


@dataclass(frozen=True)
class Stated:
    """What is said of an argument: its type, if it is, and its defaults, in several classes."""

    hint: Any = None
    defaults: tuple[Any, ...] = ()


class Tensor:
    """Stands for torch's, by its name in errors."""


_EITHER: Any = Union
_KNOWN: dict[str, Any] = {
    **{it.__name__: it for it in (bool, bytes, dict, float, int, list, set, str, tuple, type)},
    **dict(List=list, Dict=dict, Tuple=tuple, Type=type),
    **dict(Callable=Callable, Collection=Collection, Iterable=Iterable, Mapping=Mapping),
    **dict(Annotated=Annotated, Literal=Literal, Optional=Optional, Union=Union),
    **dict(Sequence=Sequence, Tensor=Tensor),
}


def _hint(node: ast.expr | None) -> Any:
    """The type that an annotation stands for; Any where that is not known."""
    match node:
        case ast.Constant(value=None):
            return type(None)
        case ast.Constant(value=str(text)):
            return _hint(ast.parse(text, mode='eval').body)
        case ast.Name(id=name):
            return _KNOWN[name] if name in _KNOWN else _alias(name)
        case ast.Attribute(attr=name):
            return _KNOWN.get(name, Any)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _EITHER[_hint(left), _hint(right)]
        case ast.Subscript(value=value, slice=ast.Tuple(elts=entries)):
            return _subscripted(_hint(value), entries)
        case ast.Subscript(value=value, slice=entry):
            return _subscripted(_hint(value), [entry])
    return Any


def _subscripted(kind: Any, entries: list[ast.expr]) -> Any:
    if kind is Literal:
        return Literal[tuple(ast.literal_eval(entry) for entry in entries)]
    if kind is Annotated:
        return _hint(entries[0])
    if kind in (Any, Tensor):
        return kind
    parts = tuple(
        ... if isinstance(entry, ast.Constant) and entry.value is ...
        else [Any] if isinstance(entry, ast.List) else _hint(entry)
        for entry in entries
    )  # fmt: skip
    return kind[parts if len(parts) > 1 else parts[0]]


@functools.cache
def _alias(name: str) -> Any:
    return _hint(assigned_in_source(name))


def _default(node: ast.expr | None) -> tuple[bool, Any]:
    """Whether an expression's value is known, and that."""
    if isinstance(node, ast.Name):
        node = assigned_in_source(node.id)
    try:
        return node is not None, ast.literal_eval(node) if node is not None else None
    except ValueError:
        return False, None


@functools.cache
def stated_in_source(name: str, after: str = '') -> Mapping[str, Stated]:
    """What a class's constructor says, and those of its bases that it hands all others on to.

    Args:
        name: Of the class, as in a config.
        after: The place after which it is looked for.
    """
    found = class_in_source(name, after)
    # Of torchvision's transforms ours say more than their own hints (datasets/transforms).
    return _stated_by(*found) if found and not name.startswith(PREFIX) else {}


@functools.cache
def stated_of_network(name: str) -> Mapping[str, Stated]:
    """What the networks say of the file in which timm has a model."""
    together: dict[str, Stated] = {}
    for node in network_classes(name):
        for key, one in _stated_by(node).items():
            there = together.get(key, one)
            hint = _EITHER[there.hint, one.hint]
            together[key] = Stated(hint, (*there.defaults, *one.defaults))
    return together


def _stated_by(node: ast.ClassDef, place: str = '') -> dict[str, Stated]:
    if any('dataclass' in ast.unparse(decorator) for decorator in node.decorator_list):
        return {}
    own: dict[str, Stated] = {}
    for function in node.body:
        if isinstance(function, ast.FunctionDef) and function.name == '__init__':
            own = dict(_own_arguments(function.args))
            if not _reaches_bases(function):
                return own
    names = [ast.unparse(base).rpartition('.')[2] for base in node.bases]
    others = [
        # A class of the same name is one that this one builds on.
        stated_in_source(name.lstrip('_'), place if name.lstrip('_') == node.name else '')
        for name in names
    ]
    return {key: it for stated in others for key, it in stated.items()} | own


def _reaches_bases(function: ast.FunctionDef) -> bool:
    """Whether a constructor's other arguments go to its bases' as they are."""
    others = function.args.kwarg.arg if function.args.kwarg else ''
    handed_on = re.search(rf'super\(\)\.__init__\(.*\*\*{others}\)', text := ast.unparse(function))
    return bool(others and handed_on) and f'{others}.pop(' not in text


def _own_arguments(taken: ast.arguments) -> Iterator[tuple[str, Stated]]:
    lacking: list[ast.expr | None] = [None] * (len(taken.args) - len(taken.defaults))
    pairs = [*zip(taken.args, [*lacking, *taken.defaults], strict=True)]
    for one, node in [*pairs[1:], *zip(taken.kwonlyargs, taken.kw_defaults, strict=True)]:
        is_known, default = _default(node)
        yield one.arg, Stated(_hint_of(one, default), (default,) if is_known else ())


def _hint_of(argument: ast.arg, default: Any) -> Any:
    """The type that an argument states, or its default tells, as the whole check has it."""
    if argument.annotation is not None:
        return _hint(argument.annotation)
    kind = type(default)
    return kind if kind is bool else float if kind in (int, float) else Any


@functools.cache
def technique_of(key: str) -> Technique[Any] | None:
    """A technique that is switched on by its key, as far as reading a value for it goes."""
    said = techniques_in_source().get(key, {})
    found = class_in_source(said['settings']) if 'apply' in said else None
    if not found or [*map(ast.unparse, found[0].bases)] != ['Settings']:
        return None
    entries = [_field(it) for it in found[0].body if isinstance(it, ast.AnnAssign)]
    settings = dataclasses.make_dataclass(said['settings'], entries, bases=(Settings,), frozen=True)
    of_rows: Any = dict.fromkeys(('title', 'use_when', 'saves', 'price'), '')
    shorthand = said.get('shorthand', '').strip("'") or None
    return Technique(key=key, settings=settings, shorthand=shorthand, switch=key, **of_rows)


def _field(node: ast.AnnAssign) -> tuple[str, Any, Any]:
    """A field of a class of settings; one whose default is not known may be anything."""
    call = node.value
    assert isinstance(call, ast.Call)
    limits = {str(it.arg): it.value for it in call.keywords if it.arg in ('low', 'high', 'below')}
    stated = {key: ast.literal_eval(value) for key, value in limits.items()}
    hint = _hint(node.annotation)
    if call.args:
        is_known, default = _default(call.args[0])
        hint, stated = (hint, stated) if is_known else (Any, {})
        return ast.unparse(node.target), hint, setting(default, help='', **stated)
    return ast.unparse(node.target), hint, setting(help='', **stated)
