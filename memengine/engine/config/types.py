"""What a config's ``type`` stands for, and which arguments that takes.

Names are looked up as MMEngine looks them up when it builds, without building anything.
Arguments are read from signatures; where a constructor hands its ``**kwargs`` on to its base
class and does nothing else with them, those of the base class count too.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mmengine import registry as mmengine_registry
from mmengine.registry import Registry
from mmengine.utils import get_object_from_string

__all__ = [
    'Arguments',
    'arguments_of',
    'find_anywhere',
    'find_type',
    'is_importable',
    'mentions',
    'registry_title',
    'scopes_with',
    'type_names',
]


@dataclass(frozen=True)
class Arguments:
    """What a callable takes by keyword.

    Attributes:
        names: Arguments by name.
        required: Those without a default.
        open: Whether it takes others too (``**kwargs`` that go somewhere unknown).
    """

    names: frozenset[str]
    required: frozenset[str] = frozenset()
    open: bool = False


def _lookup_path(registry: str, scope: str) -> list[Registry]:
    """The registries in which a name is looked up: the scope's own, then its parents."""
    root: Registry = getattr(mmengine_registry, registry)
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
    return path


def find_type(
    registry: str, name: str, scope: str, root_only: bool = False
) -> Callable[..., Any] | None:
    """What ``type=name`` builds from a registry.

    Args:
        registry: Name of the registry in ``mmengine.registry``, such as ``'MODELS'``.
        name: As in a config: ``'SGD'``, ``'mmengine.SGD'`` or ``'torch.optim.SGD'``.
        scope: The default scope.
        root_only: Whether MMEngine looks in its own registry only, in which modules of the scope
            may have put it.

    Raises:
        ImportError: When a module that the registry gets its types from cannot be imported.
    """
    path = _lookup_path(registry, scope)
    for node in path[-1:] if root_only else path:
        if name in node.module_dict:
            return node.module_dict[name]
    prefix, _, tail = name.partition('.')
    if not tail:
        return None
    own = _lookup_path(registry, prefix)[0]
    if own.scope == prefix and tail in own.module_dict:
        return own.module_dict[tail]
    try:
        found = get_object_from_string(name)
    except Exception:  # whatever a module of that name does when imported, it holds no type
        return None
    return found if callable(found) else None


def _all_registries() -> Iterator[str]:
    for name, value in vars(mmengine_registry).items():
        if isinstance(value, Registry):
            yield name


def find_anywhere(name: str, scope: str) -> tuple[str, Callable[..., Any]] | None:
    """The first registry that knows ``name``, and what it stands for there."""
    for registry in _all_registries():
        try:
            found = find_type(registry, name, scope)
        except ImportError:  # of a registry that this may have nothing to do with
            continue
        if found is not None:
            return registry, found
    return None


def scopes_with(registry: str, name: str) -> list[str]:
    """Scopes whose own registry of this kind holds ``name``, of those that are imported."""
    root: Registry = getattr(mmengine_registry, registry)
    return [node.scope for node in (root, *root.children.values()) if name in node.module_dict]


def registry_title(registry: str) -> str:
    """What a registry holds, in words: ``'data sampler'``."""
    root: Registry = getattr(mmengine_registry, registry)
    return root.name.replace('_', ' ')


def type_names(registry: str, scope: str) -> set[str]:
    """All names that a registry knows."""
    return {name for node in _lookup_path(registry, scope) for name in node.module_dict}


def is_importable(package: str) -> bool:
    """Whether a package of this name is installed."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def mentions(target: Callable[..., Any], word: Any) -> bool:
    """Whether the source of a class or function, or of its bases, has ``word`` as a text.

    Args:
        target: A class or function.
        word: Usually a key that ``target`` may take out of a dict before it builds it.
    """
    modules = {base.__module__ for base in getattr(target, '__mro__', (target,))}
    quoted = (f"'{word}'", f'"{word}"')
    return any(
        quote in _source_of(module)
        for module in modules
        if module.partition('.')[0] not in ('builtins', 'torch')
        for quote in quoted
    )


@functools.cache
def _source_of(module: str) -> str:
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):  # made at run time, or not in Python
        return ''


def arguments_of(target: Callable[..., Any], positional: int = 0) -> Arguments:
    """The arguments of a class or function.

    Args:
        target: A class, function or other callable.
        positional: How many leading arguments the caller supplies by position.
    """
    try:
        own = inspect.signature(target)
    except (ValueError, TypeError):  # some builtins have none
        return Arguments(frozenset(), open=True)
    every = list(own.parameters.values())
    by_position = [p for p in every if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    left = [p for p in every if p not in by_position[:positional]]
    names = {p.name for p in left if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = {p.name for p in left if p.name in names and p.default is p.empty}
    is_open = any(p.kind is p.VAR_KEYWORD for p in left)
    if is_open and inspect.isclass(target) and not _states_signature(target):
        cls: Any = target
        inherited = _arguments_of_constructors(cls)
        left_out = {p.name for p in every} - names
        names, is_open = names | (inherited.names - left_out), inherited.open
    return Arguments(frozenset(names), frozenset(required), is_open)


def _states_signature(cls: type) -> bool:
    return any('__signature__' in vars(base) for base in cls.__mro__)


@functools.cache
def _arguments_of_constructors(cls: Any) -> Arguments:
    """Union of the named arguments along the classes whose constructors hand ``**kwargs`` on."""
    names: set[str] = set()
    for base in cls.__mro__:
        constructor = vars(base).get('__init__')
        if constructor is None:
            continue
        if (
            base is object
            or not inspect.isfunction(constructor)
            or hasattr(constructor, '__wrapped__')
        ):
            return Arguments(frozenset(names), open=True)
        parameters = list(inspect.signature(constructor).parameters.values())[1:]
        names |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        rest = [p.name for p in parameters if p.kind is p.VAR_KEYWORD]
        if not rest:
            return Arguments(frozenset(names))
        handed_on, taken_out = _use_of_kwargs(constructor, rest[0])
        names |= taken_out
        if not handed_on:
            return Arguments(frozenset(names), open=True)
    return Arguments(frozenset(names), open=True)


def _use_of_kwargs(constructor: Callable[..., Any], kwargs: str) -> tuple[bool, set[str]]:
    """Whether ``**kwargs`` go to the base class only, and the names that are taken out before."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(constructor)))
    except (OSError, TypeError, SyntaxError):  # no source, as for classes made by exec
        return False, set()
    handed_on, taken_out, explained = False, set(), set[ast.AST]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _calls_base_constructor(node.func):
            for keyword in node.keywords:
                if keyword.arg is None and _is_name(keyword.value, kwargs):
                    handed_on = True
                    explained.add(keyword.value)
        key = _key_taken(node, kwargs)
        if key is not None:
            taken_out.add(key[0])
            explained.add(key[1])
    uses = {node for node in ast.walk(tree) if _is_name(node, kwargs)}
    return handed_on and uses <= explained, taken_out


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _calls_base_constructor(function: ast.expr) -> bool:
    """Whether this is ``super().__init__`` or ``Base.__init__``."""
    return isinstance(function, ast.Attribute) and function.attr == '__init__'


def _key_taken(node: ast.AST, kwargs: str) -> tuple[str, ast.AST] | None:
    """``'x'`` of ``kwargs.pop('x')`` (or get, setdefault), ``kwargs['x']``, ``'x' in kwargs``."""
    holder: ast.AST | None = None
    key: ast.AST | None = None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        if node.func.attr in ('pop', 'get', 'setdefault'):
            holder, key = node.func.value, node.args[0]
    elif isinstance(node, ast.Subscript):
        holder, key = node.value, node.slice
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        holder, key = node.comparators[0], node.left
    if holder is None or not _is_name(holder, kwargs):
        return None
    return (
        (key.value, holder)
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
        else None
    )
