"""Walks a config and compares what stands at each key with its schema."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

from memengine.engine.config.schema.bounds_of_settings import value_fault
from memengine.engine.config.schema.inferred import infer_schema
from memengine.engine.config.schema.schema import (
    Config,
    Schema,
    SchemaChoice,
    accepted_keys,
    is_stated,
)
from memengine.engine.config.schema.types import (
    REGISTRIES,
    Arguments,
    arguments_of,
    find_anywhere,
    find_type,
    lookup_path,
    source_has,
)
from memengine.suggest import ONE_LETTER, STRICT, STRICTER, did_you_mean, similar

_ResolvedType = tuple[Callable[..., Any] | None, bool]  # a type, and whether it is where it belongs
_RESERVED = frozenset({'type', '_scope_', '_delete_'})
# Whose type hints are exact, and whose names mean what they mean here.
_EXACT_PACKAGES = ('memengine', 'mmengine', 'torch', 'torchvision')


class Checker:
    """Collects what is wrong with a config.

    Where the table states a schema, every type and key that is not known is wrong. Where it is
    inferred (an argument of some constructor), only what looks like a misspelling is, and the rest
    is left to the build.

    Args:
        scope: The scope in which names are looked up first.

    Attributes:
        problems: One sentence each, beginning with the setting's dotted path.
    """

    def __init__(self, scope: str) -> None:
        self.scope = scope
        self.problems: list[str] = []
        self._enclosing: list[Callable[..., Any] | None] = []  # the constructors around it

    def report(self, path: str, problem: str) -> None:
        """Note a problem."""
        self.problems.append(f'{path}: {problem}')

    def check(self, value: Any, schema: SchemaChoice, path: str) -> None:
        """Compare a part of the config with its schema.

        Args:
            value: A dict, a list of them, or something that is built already.
            schema: What may stand there.
            path: Its dotted path.
        """
        if isinstance(value, (list, tuple)):
            for index, entry in enumerate(value):
                below = f'{path}.{index}'
                if entry is None and is_stated(schema):
                    self.report(below, 'must be a dict, got None')
                self.check(entry, schema, below)
            return
        if not isinstance(schema, Schema):
            schema = schema(value if isinstance(value, Mapping) else {})
        if not isinstance(value, Mapping):
            self._check_not_a_dict(value, schema, path)
            return
        if '_delete_' in value:
            self.report(f'{path}._delete_', f'no base config sets {path}: remove this key')
        outer, scope = self.scope, value.get('_scope_') or self.scope
        if not isinstance(scope, str):
            self.report(f'{path}._scope_', f'must be the name of a scope, got {scope!r}')
            return
        self.scope = scope
        self._check_dict(value, schema, path)
        self.scope = outer

    def _check_not_a_dict(self, value: Any, schema: Schema, path: str) -> None:
        """Something that is no dict: a type's name, an object that is built, or a mistake."""
        if schema.bare_type and isinstance(value, str):
            self._lookup(value, schema, path)
            return
        if is_stated(schema) and isinstance(value, (str, int, float)):
            wanted = "a dict with a 'type'" if schema.registry and not schema.default else 'a dict'
            self.report(path, f'must be {wanted}, got {value!r}')

    def _check_dict(self, config: Config, schema: Schema, path: str) -> None:
        kind = config.get('type', schema.default)
        if kind is None and 'type' in config and schema.registry and not schema.inferred:
            self.report(f'{path}.type', 'must be a name or a class, got None')
            return
        is_typed = kind is not None and (schema.registry is not None or schema.inferred)
        if not is_typed and schema.registry and schema.complete and not schema.inferred:
            typo = similar('type', (key for key in config if isinstance(key, str)), STRICT)
            hint = f": did you mean 'type' instead of '{typo[0]}'?" if typo else ''
            self.report(path, f"needs a type, dict(type='...', ...){hint}")
            return
        may_lack_type = schema.default or schema.accepts is None
        if 'type' not in config and may_lack_type and self._has_misspelt_type(config, path):
            return
        target: Callable[..., Any] | None = None
        before = len(self.problems)
        if is_typed:
            target, is_expected = self._resolve_type(kind, schema, f'{path}.type')
            arguments = Arguments(frozenset(), open=True)
            if target is not None:
                sure = is_expected and not schema.lenient and None not in self._enclosing
                name = getattr(target, '__name__', str(kind))
                arguments = arguments_of(target, schema.positional)
                for further in getattr(target, 'further_arguments', lambda _: ())(config):
                    arguments = arguments.joined(arguments_of(further))
                self._check_keys(config, arguments, schema, path, sure, name)
            self._enclosing.append(target)
        else:
            arguments = accepted_keys(schema)
            self._check_keys(config, arguments, schema, path, sure=not schema.lenient)
        ours = _is_ours(target or schema.accepts)
        for key, value in config.items():
            below = f'{path}.{key}'
            if is_typed and key in _RESERVED:
                continue
            default = [arguments.defaults[key]] if key in arguments.defaults else []
            if fault := value_fault(
                key, value, schema.constraints, arguments.hints.get(key), default, ours
            ):
                self.report(below, fault)
            elif key in schema.children:
                self.check(value, schema.children[key], below)
            elif schema.entry is not None:
                self.check(value, schema.entry, below)
            elif isinstance(value, (Mapping, list, tuple, str)):
                self.check(value, infer_schema(key, schema, arguments), below)
        if is_typed:
            self._enclosing.pop()
            self._ask_target(target, config, path, before)

    def _ask_target(self, target: Any, config: Config, path: str, before: int) -> None:
        """Let a class that knows more of its arguments than its signature says look at them."""
        if len(self.problems) == before and hasattr(target, 'config_problem'):
            arguments = {key: value for key, value in config.items() if key not in _RESERVED}
            if problem := target.config_problem(arguments):
                self.report(f'{path}.{problem[0]}', problem[1])

    def _has_misspelt_type(self, config: Config, path: str) -> bool:
        """Whether a key looks like a misspelt ``type``."""
        texts = [key for key, value in config.items() if isinstance(value, str)]
        found = [key for key in texts if isinstance(key, str) and similar(key, ['type'], STRICT)]
        found = [key for key in found if not key.endswith('type')]
        for key in found:
            self.report(f'{path}.{key}', "did you mean 'type'?")
        return bool(found)

    def _check_keys(
        self,
        config: Config,
        arguments: Arguments,
        schema: Schema,
        path: str,
        sure: bool,
        name: str = '',
    ) -> None:
        """Compare a dict's keys with the arguments that there are.

        Args:
            config: The dict.
            arguments: What the constructor takes, or the keys that there are.
            schema: What the dict may hold.
            path: Its dotted path.
            sure: Whether every other key is wrong, or only one that looks like a misspelling.
            name: What the arguments are of.
        """
        taken = {*arguments.names, *schema.builder_keys, *schema.children}
        offered = taken - {*schema.supplied}
        others = [key for key in config if key not in taken and (key not in _RESERVED or not name)]
        missing = {*schema.required, *arguments.required} - {*schema.supplied, *config}
        if arguments.open or schema.entry is not None:
            # These may mean something further on, unless a name is missed or is one letter off.
            long = [other for other in offered if len(other) > 3]
            others = [
                k
                for k in others
                if similar(str(k), missing, STRICT) or similar(str(k), long, ONE_LETTER)
            ]
        elif not sure:
            others = [key for key in others if similar(str(key), offered, STRICT)]
        # What is built around may take a key out before it builds the dict.
        others = [k for k in others if not any(source_has(it, k) for it in self._enclosing if it)]
        for key in others:
            hint = did_you_mean(str(key), offered) or self._suggest_nested_key(config, key, path)
            if not hint and len(offered) <= 15:
                hint = f' (it takes {", ".join(sorted(offered)) or "none"})'
            fault = f"{name} takes no argument '{key}'" if name else 'there is no such setting'
            self.report(f'{path}.{key}', f'{fault}{hint}')
        for key in sorted(missing):
            told = key in schema.required or (schema.complete and sure)
            if told and not similar(key, map(str, others), STRICT):
                self.report(f'{path}.{key}', 'is missing' + (f'; {name} needs it' if name else ''))
        for key, problem in schema.rule(config):
            self.report(f'{path}.{key}', problem)

    def _suggest_nested_key(self, config: Config, key: Any, path: str) -> str:
        """A hint, when an entry of this dict has a type that takes the key."""
        for other, value in config.items():
            kind = value.get('type') if isinstance(value, Mapping) else None
            found = find_anywhere(kind, self.scope) if isinstance(kind, str) else None
            if found is not None and key in arguments_of(found[1]).names:
                return f": did you mean '{path}.{other}.{key}'?"
        return ''

    def _resolve_type(self, kind: Any, schema: Schema, path: str) -> _ResolvedType:
        if isinstance(kind, str):
            return self._lookup(kind, schema, path)
        if callable(kind):
            return kind, True
        if not schema.inferred:
            self.report(path, f'must be a name or a class, got {kind!r}')
        return None, False

    def _lookup(self, name: str, schema: Schema, path: str) -> _ResolvedType:
        try:
            if schema.registry is not None:
                found = find_type(schema.registry, name, self.scope, import_more=True)
                if found is not None:
                    return found, True
        except ImportError as error:
            self.report(path, f"'{name}' cannot be looked up, because an import fails: {error}")
            return None, False
        elsewhere = find_anywhere(name, self.scope)
        if elsewhere is not None and schema.inferred:
            return elsewhere[1], False
        if schema.registry is not None:
            title = REGISTRIES[schema.registry].name.replace('_', ' ')
            fault = self._hint_for(name, schema.registry, elsewhere, schema.inferred)
            if fault is not None:
                self.report(path, f"there is no {title} '{name}'{fault}")
        return None, False

    def _hint_for(
        self, name: str, registry: str, elsewhere: tuple[str, Any] | None, inferred: bool
    ) -> str | None:
        """What may be meant instead; None when an inferred schema may mean something else."""
        names = {key for node in lookup_path(registry, self.scope) for key in node.module_dict}
        if inferred:
            names = {
                other for other in similar(name, names, STRICTER) if _is_likely_typo(name, other)
            }
            if not names:
                return None
        hint, package = did_you_mean(name, names), name.partition('.')[0]
        root = REGISTRIES[registry]
        for node in (root, *root.children.values()):
            if name in node.module_dict:
                return f": it is of the scope '{node.scope}'; write type='{node.scope}.{name}'"
        if elsewhere is not None:
            title = REGISTRIES[elsewhere[0]].name.replace('_', ' ')
            return f' (it is registered as {title}){hint}'
        if package != name and not _is_installed(package):
            return f" (there is no package '{package}'){hint}"
        known = f'known: {", ".join(sorted(names))}; ' if 0 < len(names) <= 12 else ''
        return hint or f' ({known}import a module of your own with custom_imports)'


def _is_ours(target: Any) -> bool:
    """Whether the types that a callable states are what it takes, and names mean what they do."""
    return str(getattr(target, '__module__', '')).partition('.')[0] in _EXACT_PACKAGES


def _is_installed(package: str) -> bool:
    return package in sys.modules or bool(package and importlib.util.find_spec(package))


def _is_likely_typo(name: str, real: str) -> bool:
    """Whether a name may be typed for another: not of another case, nor its ending (bi-linear)."""
    ending = real.lower().endswith(name.lower()) and len(real) > len(name) + 1
    return real[:1].isupper() == name[:1].isupper() and not ending
