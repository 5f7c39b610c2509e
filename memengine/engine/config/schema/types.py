"""What a config's ``type`` stands for, and which arguments that takes.

Names are looked up as MMEngine looks them up when it builds, without building anything.
Arguments are read from signatures; where a constructor hands its ``**kwargs`` on to its base
class and does nothing else with them, those of the base class count too.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Union, get_type_hints

from mmengine import registry as mmengine_registry
from mmengine.registry import Registry
from mmengine.utils import get_object_from_string

REGISTRIES = {key: it for key, it in vars(mmengine_registry).items() if isinstance(it, Registry)}
# Modules that register more types when they are imported.
_TYPE_MODULES = {'TRANSFORMS': 'mmcv.transforms'}


@dataclass(frozen=True)
class Arguments:
    """What a callable takes by keyword.

    Attributes:
        names: Arguments by name.
        required: Those without a default.
        open: Whether it takes others too (``**kwargs`` that go somewhere unknown).
        hints: Their types, of those that state one or have a default that tells it.
        defaults: Their defaults.
    """

    names: frozenset[str]
    required: frozenset[str] = frozenset()
    open: bool = False
    hints: Mapping[str, Any] = field(default_factory=dict, compare=False)
    defaults: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def joined(self, other: Arguments) -> Arguments:
        """With those that ``**kwargs`` may go to, whose own come second."""
        hints = dict(self.hints)
        for name, hint in other.hints.items():
            hints[name] = hint if name not in hints else Union[hints[name], hint]  # noqa: UP007
        return replace(
            self,
            names=self.names | other.names,
            hints=hints,
            defaults={**other.defaults, **self.defaults},
        )


def lookup_path(registry: str, scope: str) -> list[Registry]:
    """The registries in which a name is looked up: the scope's own, then its parents.

    Raises:
        ImportError: When a module that they get their types from cannot be imported.
    """
    root = REGISTRIES[registry]
    if scope != root.scope and scope not in root.children:
        try:
            importlib.import_module(f'{scope}.registry')
        except ImportError:  # no such package: MMEngine then looks in its own registry
            return [root]
    node: Registry | None = root.children.get(scope, root)
    path = []
    while node is not None:
        node.import_from_location()
        path.append(node)
        node = node.parent
    # MMEngine looks functions up in its own registry only; modules of the scope put theirs there.
    return path[-1:] if registry == 'FUNCTIONS' else path


def find_type(
    registry: str, name: str, scope: str, import_more: bool = False
) -> Callable[..., Any] | None:
    """What ``type=name`` builds from a registry.

    Args:
        registry: Name of the registry in ``mmengine.registry``, such as ``'MODELS'``.
        name: As in a config: ``'SGD'``, ``'mmengine.SGD'`` or ``'torch.optim.SGD'``.
        scope: The default scope.
        import_more: Whether to import what registers more types, too.

    Raises:
        ImportError: When a module that the registry gets its types from cannot be imported.
    """
    for node in lookup_path(registry, scope):
        if name in node.module_dict:
            return node.module_dict[name]
    prefix, _, tail = name.partition('.')
    if tail:
        own = lookup_path(registry, prefix)[0]
        if own.scope == prefix and tail in own.module_dict:
            return own.module_dict[tail]
        try:
            found = get_object_from_string(name)
        except Exception:  # whatever a module of that name does when imported, it holds no type
            return None
        return found if callable(found) else None
    if import_more and registry in _TYPE_MODULES:
        try:
            importlib.import_module(_TYPE_MODULES[registry])
        except ImportError:  # not installed
            return None
        return find_type(registry, name, scope)
    return None


def find_anywhere(name: str, scope: str) -> tuple[str, Callable[..., Any]] | None:
    """The first registry that knows ``name``, and what it stands for there."""
    for registry in REGISTRIES:
        try:
            found = find_type(registry, name, scope)
        except ImportError:  # of a registry that this may have nothing to do with
            continue
        if found is not None:
            return registry, found
    return None


@functools.cache
def arguments_of(target: Callable[..., Any], positional: int = 0) -> Arguments:
    """The arguments of a class or function.

    Args:
        target: A class, function or other callable.
        positional: How many leading arguments the caller supplies by position.
    """
    try:
        own = _parameters(target)
    except (ValueError, TypeError):  # some builtins have none
        return Arguments(frozenset(), open=True)
    by_position = [p for p in own if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    left = _keyword_parameters(p for p in own if p not in by_position[:positional])
    is_open = any(p.kind is p.VAR_KEYWORD for p in own)
    taken = {p.name: p for p in left}
    stated = inspect.isclass(target) and any('__signature__' in vars(c) for c in target.__mro__)
    if is_open and inspect.isclass(target) and not stated:
        cls: Any = target
        inherited, is_open = _inherited_arguments(cls)
        own_names = {p.name for p in own}
        taken |= {name: p for name, p in inherited.items() if name not in own_names}
    required = frozenset(p.name for p in left if p.default is p.empty)
    defaults = {name: p.default for name, p in taken.items() if p.default is not p.empty}
    hints = {name: hint for name, p in taken.items() if (hint := _hint_of(p)) is not None}
    return Arguments(frozenset(taken), required, is_open, hints, defaults)


def _keyword_parameters(parameters: Iterable[inspect.Parameter]) -> list[inspect.Parameter]:
    return [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _hint_of(parameter: inspect.Parameter) -> Any:
    """The type that a parameter states, or its default tells."""
    if parameter.annotation is not parameter.empty:
        return None if isinstance(parameter.annotation, str) else parameter.annotation
    kind = type(parameter.default)
    return kind if kind is bool else float if kind in (int, float) else None


def _parameters(target: Any) -> list[inspect.Parameter]:
    """Those of a signature; what hints that were written as text stand for, if it is there."""
    function = inspect.unwrap(target.__init__ if inspect.isclass(target) else target)
    names = getattr(function, '__globals__', {})
    return [
        p.replace(annotation=_resolve(p.annotation, names))
        for p in inspect.signature(target).parameters.values()
    ]


def _resolve(annotation: Any, names: dict[str, Any]) -> Any:
    if not isinstance(annotation, str):
        return annotation
    holder = SimpleNamespace(__annotations__={'it': annotation})
    try:
        return get_type_hints(holder, names, include_extras=True)['it']
    except Exception:  # it names what is not there at run time
        return annotation


@functools.cache
def _inherited_arguments(cls: Any) -> tuple[dict[str, inspect.Parameter], bool]:
    """Named arguments of the constructors that ``**kwargs`` go through, and whether of others."""
    names: dict[str, inspect.Parameter] = {}
    for constructor in [vars(base)['__init__'] for base in cls.__mro__ if '__init__' in vars(base)]:
        if not inspect.isfunction(constructor) or hasattr(constructor, '__wrapped__'):
            break
        parameters = _parameters(constructor)[1:]
        names = {p.name: p for p in _keyword_parameters(parameters)} | names
        rest = [p.name for p in parameters if p.kind is p.VAR_KEYWORD]
        if not rest:
            return names, False
        taken_out, only_handed_on = _kwargs_usage(constructor, rest[0])
        names |= {
            name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
            for name in taken_out - {*names}
        }
        if not only_handed_on:
            break
    return names, True


def _kwargs_usage(constructor: Callable[..., Any], kwargs: str) -> tuple[set[str], bool]:
    """The names taken out of ``**kwargs``, and whether the rest goes to the base class only."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(constructor)))
    except (OSError, TypeError, SyntaxError):  # no source, as for classes made by exec
        return set(), False
    taken_out, handed_on, uses = [], 0, 0
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) if name == kwargs:
                uses += 1
            case ast.Call(func=ast.Attribute(attr='__init__'), keywords=keywords):
                values = [keyword.value for keyword in keywords if keyword.arg is None]
                handed_on += sum(getattr(value, 'id', None) == kwargs for value in values)
            case (
                ast.Call(
                    func=ast.Attribute(value=ast.Name(id=name), attr='pop' | 'get' | 'setdefault'),
                    args=[ast.Constant(value=str(key)), *_],
                )
                | ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key)))
                | ast.Compare(
                    left=ast.Constant(value=str(key)),
                    ops=[ast.In() | ast.NotIn()],
                    comparators=[ast.Name(id=name)],
                )
            ) if name == kwargs:
                taken_out.append(key)
    return set(taken_out), handed_on > 0 and handed_on + len(taken_out) == uses


def source_has(target: Callable[..., Any], word: Any) -> bool:
    """Whether the source of a class or function, or of its bases, has ``word`` as a text."""
    modules = {base.__module__ for base in getattr(target, '__mro__', (target,))}
    sources = [_source_of(name) for name in modules if name.split('.')[0] != 'torch']
    return any(f"'{word}'" in source or f'"{word}"' in source for source in sources)


@functools.cache
def _source_of(module: str) -> str:
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):  # made at run time, or not in Python
        return ''
