"""Walks a config and compares what stands at each place with what may stand there."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args, get_type_hints, is_typeddict

from memengine.engine.config.place import Config, Place, PlaceOrChoice, Value
from memengine.engine.config.schema import PARAMETERS
from memengine.engine.config.types import (
    Arguments,
    arguments_of,
    find_anywhere,
    find_type,
    is_importable,
    mentions,
    registry_title,
    scopes_with,
    type_names,
)
from memengine.suggest import ALIKE, ONE_SLIP, STRICT, did_you_mean, near

__all__ = ['Checker']

_RESERVED = frozenset({'type', '_scope_', '_delete_'})
_ANY_TAKEN = Arguments(frozenset(), open=True)


class Checker:
    """Collects what is wrong with a config.

    Two kinds of places differ in strictness. Where the table says what stands there, every type
    and key that is not known is wrong. Where it is inferred (an argument of some constructor),
    only what looks like a misspelling is, and the rest is left to the build.

    Args:
        scope: The default scope, in which names are looked up first.

    Attributes:
        problems: One sentence each, beginning with the setting's dotted path.
    """

    def __init__(self, scope: str) -> None:
        self.scope = scope
        self.problems: list[str] = []
        self._parents: list[Callable[..., Any] | None] = []  # what is built around a place

    def say(self, path: str, problem: str) -> None:
        """Note a problem."""
        self.problems.append(f'{path}: {problem}')

    def check_value(self, value: Any, bound: Value, path: str) -> None:
        """Check a plain value."""
        if not bound.holds(value):
            self.say(path, f'must be {bound.wanted}, got {value!r}{bound.hint(value)}')

    def check(
        self, value: Any, place: PlaceOrChoice, path: str, scope: str, guess: bool = False
    ) -> None:
        """Check what stands at a place.

        Args:
            value: A dict, a list of them, or something that is built already.
            place: What is known about the place.
            path: Its dotted path.
            scope: The scope in which names are looked up.
            guess: Whether the place is inferred.
        """
        if isinstance(value, (list, tuple)):
            for index, entry in enumerate(value):
                self.check(entry, place, f'{path}.{index}', scope, guess)
            return
        if not isinstance(place, Place):
            place = place(value if isinstance(value, Mapping) else {})
        if not isinstance(value, Mapping):
            self._check_undict(value, place, path, scope, guess)
            return
        if '_delete_' in value:
            self.say(f'{path}._delete_', f'no base config sets {path}: remove this key')
        scope = value.get('_scope_') or scope
        if not isinstance(scope, str):
            self.say(f'{path}._scope_', f'must be the name of a scope, got {scope!r}')
            return
        kind = value.get('type', place.default)
        if 'type' not in value and place.default and self._lacks_type(value, path):
            return
        if kind is not None and (place.registry is not None or guess):
            self._check_typed(value, kind, place, path, scope, guess)
        elif place.registry is not None and place.complete and not guess:
            typo = near('type', filter(_is_text, value), STRICT)
            hint = f": did you mean 'type' instead of '{typo[0]}'?" if typo else ''
            self.say(path, f"needs a type, dict(type='...', ...){hint}")
        else:
            self._check_untyped(value, place, path, scope)

    def _check_undict(self, value: Any, place: Place, path: str, scope: str, guess: bool) -> None:
        """Something that is no dict: a type's name, an object that is built, or a mistake."""
        if place.by_name and isinstance(value, str):
            self._find(value, place, path, scope, guess)
        elif guess or not _is_plain(value) or (place.accepts_bool and isinstance(value, bool)):
            return
        elif place.registry or place.accepts or place.each:
            wanted = "a dict with a 'type'" if place.registry and not place.default else 'a dict'
            self.say(path, f'must be {wanted}, got {value!r}')

    def _check_untyped(self, config: Config, place: Place, path: str, scope: str) -> None:
        """A dict without type: of given keys, of names that the user chooses, or of anything."""
        arguments = _ANY_TAKEN
        if isinstance(place.accepts, frozenset):
            arguments = Arguments(place.accepts)
        elif place.accepts is not None:
            arguments = arguments_of(place.accepts, place.positional)
        self._check_keys(config, arguments, place, path, sure=not place.lenient)
        if place.accepts is None and self._lacks_type(config, path):
            return
        for key, value in config.items():
            below = f'{path}.{key}'
            if key in place.values or key in place.places:
                self._check_known(key, value, place, below, scope)
            elif place.each is not None:
                self._check_named(key, value, place.each, below, scope)
            else:
                self._check_inferred(key, value, place, below, scope)

    def _lacks_type(self, config: Config, path: str) -> bool:
        """Whether a key looks like a misspelt ``type``."""
        found = [key for key, value in config.items() if _is_misspelt_type(key, value)]
        for key in found:
            self.say(f'{path}.{key}', "did you mean 'type'?")
        return bool(found)

    def _check_known(self, key: str, value: Any, place: Place, path: str, scope: str) -> None:
        if key in place.values:
            self.check_value(value, place.values[key], path)
        else:
            self.check(value, place.places[key], path, scope)

    def _check_named(self, key: str, value: Any, place: Place, path: str, scope: str) -> None:
        """An entry whose name the user chooses."""
        if isinstance(value, (Mapping, list, tuple)):
            self.check(value, place, path, scope)
        elif _is_plain(value):
            self.say(path, f'must be a dict, got {value!r}')

    def _check_typed(
        self, config: Config, kind: Any, place: Place, path: str, scope: str, guess: bool
    ) -> None:
        """A dict from which something is built."""
        target, expected = None, False
        if isinstance(kind, str):
            target, expected = self._find(kind, place, f'{path}.type', scope, guess)
        elif callable(kind):
            target, expected = kind, True
        elif not guess:
            self.say(f'{path}.type', f'must be a name or a class, got {kind!r}')
        if target is not None:
            arguments = arguments_of(target, place.positional)
            name = getattr(target, '__name__', str(kind))
            sure = expected and not place.lenient and None not in self._parents
            self._check_keys(config, arguments, place, path, sure, name)
        self._parents.append(target)
        for key, value in config.items():
            below = f'{path}.{key}'
            if key in _RESERVED:
                continue
            if key in place.values or key in place.places:
                self._check_known(key, value, place, below, scope)
            else:
                stated = None if target is None else _stated_keys(target, key)
                self._check_inferred(key, value, place, below, scope, stated)
        self._parents.pop()

    def _check_inferred(
        self,
        key: Any,
        value: Any,
        parent: Place,
        path: str,
        scope: str,
        stated: Arguments | None = None,
    ) -> None:
        """A value below a type: known by its argument's name, or a part of the parent's kind.

        Args:
            key: The argument's name.
            value: What it is given.
            parent: The place that it is below.
            path: Its dotted path.
            scope: The scope in which names are looked up.
            stated: The keys of its dicts, when the constructor's annotation states them.
        """
        if not isinstance(value, (Mapping, list, tuple)):
            return
        if key in PARAMETERS and parent.registry != 'WEIGHT_INITIALIZERS':
            self.check(value, PARAMETERS[key], path, scope, guess=PARAMETERS[key].lenient)
            return
        # A dict that goes by such a name is often not built as it is.
        lenient = isinstance(key, str) and key.endswith(('cfg', 'cfgs'))
        part = Place(parent.registry, lenient=lenient, scoped=parent.scoped, late=parent.late)
        if stated is not None:
            entries = [value] if isinstance(value, Mapping) else value
            for index, entry in enumerate(entries):
                if isinstance(entry, Mapping) and 'type' not in entry:
                    where = path if isinstance(value, Mapping) else f'{path}.{index}'
                    self._check_keys(entry, stated, Place(complete=True), where, sure=True)
        self.check(value, part, path, scope, guess=True)

    def _check_keys(
        self,
        config: Config,
        arguments: Arguments,
        place: Place,
        path: str,
        sure: bool,
        name: str = '',
    ) -> None:
        """Compare a dict's keys with the arguments that there are.

        Args:
            config: The dict.
            arguments: What the constructor takes, or the keys that there are.
            place: Where the dict stands.
            path: Its dotted path.
            sure: Whether every other key is wrong, or only one that looks like a misspelling.
            name: What the arguments are of.
        """
        taken = arguments.names | place.extra | place.places.keys()
        offered = taken - place.supplied
        others = [key for key in config if key not in taken and (key not in _RESERVED or not name)]
        missing = {*place.needs, *arguments.required} - place.supplied - set(config)
        if arguments.open or place.each is not None:
            # These may mean something further on, unless a name is missed or is one letter off.
            long = [other for other in offered if len(other) > 3]
            others = [
                k for k in others if near(str(k), missing, STRICT) or near(str(k), long, ONE_SLIP)
            ]
        elif not sure:
            others = [key for key in others if near(str(key), offered, STRICT)]
        # What is built around may take a key out before it builds the dict.
        others = [k for k in others if not any(mentions(p, k) for p in self._parents if p)]
        for key in others:
            hint = did_you_mean(str(key), offered) or self._belongs_below(config, key, path)
            if not hint and len(offered) <= 15:
                hint = f' (it takes {", ".join(sorted(offered)) or "none"})'
            fault = f"{name} takes no argument '{key}'" if name else 'there is no such setting'
            self.say(f'{path}.{key}', f'{fault}{hint}')
        for key in sorted(missing):
            told = key in place.needs or (place.complete and sure)
            if told and not near(key, map(str, others), STRICT):
                self.say(f'{path}.{key}', 'is missing' + (f'; {name} needs it' if name else ''))
        for key, problem in place.rule(config) if place.rule is not None else ():
            self.say(f'{path}.{key}', problem)

    def _belongs_below(self, config: Config, key: Any, path: str) -> str:
        """A hint, when an entry of this dict has a type that takes the key."""
        for other, value in config.items():
            kind = value.get('type') if isinstance(value, Mapping) else None
            found = find_anywhere(kind, self.scope) if isinstance(kind, str) else None
            if found is not None and key in arguments_of(found[1]).names:
                return f": did you mean '{path}.{other}.{key}'?"
        return ''

    def _find(
        self, name: str, place: Place, path: str, scope: str, guess: bool
    ) -> tuple[Callable[..., Any] | None, bool]:
        """What a name stands for, and whether it was found where it is expected."""
        registry = place.registry
        try:
            if registry is not None:
                found = find_type(registry, name, scope, not place.scoped)
                if found is None and place.late is not None and _imports(place.late):
                    found = find_type(registry, name, scope, not place.scoped)
                if found is not None:
                    return found, True
        except ImportError as error:
            self.say(path, f"'{name}' cannot be looked up, because an import fails: {error}")
            return None, False
        elsewhere = find_anywhere(name, scope)
        if elsewhere is not None and guess:
            return elsewhere[1], False
        if registry is not None:
            self._say_unknown(name, registry, path, scope, guess, elsewhere)
        return None, False

    def _say_unknown(
        self,
        name: str,
        registry: str,
        path: str,
        scope: str,
        guess: bool,
        elsewhere: tuple[str, Any] | None,
    ) -> None:
        """Say that there is no such type; of an inferred place only when it looks misspelt."""
        names = type_names(registry, scope)
        if guess:
            like = near(name, names, ALIKE)
            names = {other for other in like if _may_be_slip(name, other)}
            if not names:
                return
        hint = did_you_mean(name, names)
        if scopes := scopes_with(registry, name):
            hint = f": it is of the scope '{scopes[0]}'; write type='{scopes[0]}.{name}'"
        elif elsewhere is not None:
            hint = f' (it is registered as {registry_title(elsewhere[0])}){hint}'
        elif '.' in name and not is_importable(name.partition('.')[0]):
            hint = f" (there is no package '{name.partition('.')[0]}'){hint}"
        elif not hint:
            known = f'known: {", ".join(sorted(names))}; ' if 0 < len(names) <= 12 else ''
            hint = f' ({known}import a module of your own with custom_imports)'
        self.say(path, f"there is no {registry_title(registry)} '{name}'{hint}")


def _is_plain(value: Any) -> bool:
    """Whether this is a value where a dict is expected, rather than an object built by hand."""
    return isinstance(value, (str, int, float))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _may_be_slip(name: str, real: str) -> bool:
    """Whether a name may be typed for another: not of another case, nor its ending (bi-linear)."""
    ending = real.lower().endswith(name.lower()) and len(real) > len(name) + 1
    return real[:1].isupper() == name[:1].isupper() and not ending


def _is_misspelt_type(key: Any, value: Any) -> bool:
    are_texts = _is_text(key) and _is_text(value)
    return are_texts and bool(near(key, ['type'], STRICT)) and not key.endswith('type')


def _imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _stated_keys(target: Callable[..., Any], argument: Any) -> Arguments | None:
    """The keys that an argument's dicts have, where it is annotated with one TypedDict."""
    function = target.__init__ if inspect.isclass(target) else target
    try:
        hint = get_type_hints(function).get(argument)
    except Exception:  # annotations that name what is not there at run time say nothing
        return None
    found = [part for part in _parts(hint) if is_typeddict(part)]
    if len(found) != 1:
        return None
    return Arguments(frozenset(found[0].__annotations__), found[0].__required_keys__)


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    for part in get_args(hint):
        yield from _parts(part)
