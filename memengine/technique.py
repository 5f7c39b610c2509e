"""One description per technique: its settings, how it is applied, what it goes with, its row.

The config's check, ``memengine techniques``, the hook, the order of application, refusals of pairs,
the tables of README and docs and the test of all pairs follow from it. A description stands in the
technique's own file; :func:`techniques` finds those in the rooms of this package, of installed
packages (entry points of the group ``memengine.techniques``) and those that were handed to
:func:`register`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import entry_points
from numbers import Integral, Real
from operator import ge, le, lt
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ForwardRef,
    Generic,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from memengine.suggest import did_you_mean

if TYPE_CHECKING:  # settings are looked at before torch is imported
    from torch import Tensor, nn

__all__ = [
    'Handle',
    'PausableHandle',
    'Report',
    'Settings',
    'StepInfo',
    'Technique',
    'in_order',
    'in_words',
    'is_of',
    'register',
    'setting',
    'techniques',
    'with_settings',
]

S = TypeVar('S', bound='Settings')
_ROOMS = ('memengine.techniques', 'memengine.losses')
_GROUP = 'memengine.techniques'  # of entry points


# ------------------------------------------------------------------ settings


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
    return _IN_WORDS.get(hint) or ('a dict' if is_typeddict(hint) else _name(hint))


def _name(hint: Any) -> str:
    return getattr(hint, '__name__', str(hint))


# ------------------------------------------------------------------ what it does


@dataclass(frozen=True)
class StepInfo:
    """What a technique may want to know before a training step.

    Attributes:
        iteration: Iterations done.
        loss: Computes the loss of the step's batch, with graph.
        log: Takes a sentence for the run's log.
    """

    iteration: int
    loss: Callable[[], Tensor]
    log: Callable[[str], Any]


@dataclass(frozen=True)
class Report:
    """What a technique has done in the first step.

    Attributes:
        done: A sentence on what was done; empty when nothing was, which is an error unless the
            settings say ``strict=False``.
        left: A sentence on what was left as it was, and what to do about it.
    """

    done: str = ''
    left: str = ''


class Handle:
    """A technique at work on a model: what ``apply`` returns.

    Attributes:
        is_settled: Whether it does in the first step what it does in those that follow.
    """

    is_settled = False

    def before_step(self, step: StepInfo) -> None:
        """Called before each training step, for what changes while training goes on."""

    def report(self) -> Report | None:
        """What has been done; None while that is not known. Asked after each step until it is."""
        return None

    def undo(self) -> None:
        """Leave the model as it was."""
        raise NotImplementedError

    def paused(self) -> AbstractContextManager[Any]:
        """A context in which the model runs as if the technique had not been applied.

        Raises:
            NotImplementedError: Where there is no such way; ``verify_exactness`` is refused then.
        """
        raise NotImplementedError


class PausableHandle(Handle):
    """A handle whose technique looks at ``is_paused`` in each forward pass."""

    is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which the model runs as if the technique had not been applied."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False


# ------------------------------------------------------------------ the description


@dataclass(frozen=True, kw_only=True)
class Technique(Generic[S]):
    """The description of a technique.

    Attributes:
        key: Its name: on the command line, in errors, and in a config if it is applied to a model.
        title: Its name in tables.
        settings: Their class.
        apply: Applies it to a model; None for what acts on the step, the loss, as a wrapper or
            optimiser, and is set where ``switch`` says.
        switch: What one types for it, as ``--cfg-options`` takes it, by default ``KEY=True``. Of
            what is not applied to a model the first word is what switches it on; types that do so
            as well follow after bars.
        call: Its name in plain PyTorch.
        shorthand: The setting that ``key=VALUE`` sets. A list of modules goes to ``modules`` in
            any case.
        stage: ``'before_wrap'`` for what replaces modules or parameters, which DDP and FSDP must
            see; else after the weights are initialised and before a checkpoint is loaded.
        after: Techniques that are applied before it.
        before: Techniques that are applied after it.
        conflicts: What it cannot go with: why, and what to use instead. By a technique's key, or
            a place of the config, also with a value or several (``'optim_wrapper.precision=fp16'``,
            ``'...clip_grad.type=norm|None'``, where None is a key that is not there).
        exactness: Whether gradients are those of the plain step: up to the order of sums, but for
            ``'rounding'`` to another precision, or not (``'lossy'``).
        loss: The kind of loss that it is for: ``'coupled'`` where samples meet.
        needs_ranks: Whether it does nothing in one process.
        use_when, saves, price: The sentences of its row in README and docs.
        page: Its page below ``docs/techniques``, if that is not named by its key.
        example: Settings for a small model, with which it is tried with every other; None for what
            one process cannot show, and for what has a part in what is learned.
    """

    key: str
    title: str
    settings: type[S]
    use_when: str
    saves: str
    price: str
    apply: Callable[[nn.Module, S], Handle] | None = None
    switch: str = ''
    call: str = ''
    shorthand: str | None = None
    stage: Literal['before_wrap', 'after_init'] = 'after_init'
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    conflicts: Mapping[str, str] = field(default_factory=dict)
    exactness: Literal['exact', 'rounding', 'lossy'] = 'exact'
    loss: Literal['any', 'additive', 'coupled'] = 'any'
    needs_ranks: bool = False
    page: str = ''
    example: S | None = None

    def __post_init__(self) -> None:
        if not self.switch:
            if self.apply is None:
                raise ValueError(f'technique {self.key}: needs apply, or switch: where it is set')
            object.__setattr__(self, 'switch', f'{self.key}=True')

    @property
    def name(self) -> str:
        """What errors call it: its key, or the place where it is set, with the type there."""
        place, _, kind = self.switch.split()[0].partition('=')
        if self.apply:
            return self.key
        return f'{place}={kind.partition("|")[0]}' if place.endswith('.type') else place

    @property
    def typed(self) -> str:
        """What one types for it."""
        return re.sub(r'\|\S+', '', self.switch)

    @property
    def hook_name(self) -> str:
        """The type of its hook in ``custom_hooks``: ``DropITHook`` for ``DropITSettings``."""
        return self.settings.__name__.removesuffix('Settings') + 'Hook'

    def read(self, value: Any) -> S | None:
        """The settings that a value of the config stands for; None when it is off.

        Raises:
            ValueError: Naming the key, the value and what is possible; a line for each problem.
        """
        if isinstance(value, self.settings):
            return value
        if isinstance(value, str) and value[:1] == '[':  # as a shell may pass a list
            value = [name.strip(' \'"') for name in value.strip('[]').split(',')]
        if value is None or value is False or (isinstance(value, (list, tuple)) and not value):
            return None
        if not isinstance(value, Mapping):
            value = {} if value is True else {self._field_for(value): value}
        return self.set_to(value)

    def set_to(self, given: Mapping[str, Any]) -> S:
        """The settings of these values by name.

        Raises:
            ValueError: As :meth:`read`.
        """
        known = settings_of(self.settings)
        problems = [
            f'{self.key}.{name}: there is no such setting'
            f'{did_you_mean(str(name), known) or f" (it takes {self._setting_names()})"}'
            for name in given
            if name not in known
        ]
        problems += [
            f'{self.key}: {name} is missing, which is {one.wanted}'
            for name, one in known.items()
            if one.is_required and name not in given
        ]
        if problems:
            raise ValueError('\n'.join(problems))
        try:
            return self.settings(**given)
        except ValueError as error:
            raise ValueError(f'{self.key}: {error}') from error

    def _field_for(self, value: Any) -> str:
        """The setting that a bare value is for."""
        known = settings_of(self.settings)
        possible = [name for name in (self.shorthand, 'modules') if name in known]
        for name in possible:
            if name is not None and is_of(value, known[name].hint):
                return name
        said = [f'{known[name].wanted} for {name}' for name in dict.fromkeys(possible) if name]
        raise ValueError(
            f'{self.key}: got {value!r}, which is none of: {"; ".join(["True", *said])}; a dict of '
            f'{self._setting_names()}'
        )

    def _setting_names(self) -> str:
        return ', '.join(settings_of(self.settings)) or 'none'

    def refusal(self, other: str, where: str = '') -> ValueError:
        """The error that refuses it beside another setting, one of ``conflicts``."""
        theirs = _known[other].name if other in _known else other.partition('|')[0]
        one, two = sorted([self.name, theirs])
        place = f' ({where})' if where else ''
        return ValueError(f'{one} and {two} do not go together{place}: {self.conflicts[other]}')


def with_settings(function: Callable[..., Handle]) -> Callable[[nn.Module, Any], Handle]:
    """``apply`` of a technique by a function of a model that takes settings under their names."""
    taken = inspect.signature(function).parameters

    def apply(model: nn.Module, settings: Settings) -> Handle:
        named = {name: value for name, value in vars(settings).items() if name in taken}
        return function(model, **named)

    return apply


# ------------------------------------------------------------------ all of them

_known: dict[str, Technique[Any]] = {}


def register(technique: Technique[S]) -> Technique[S]:
    """Make a technique known, e.g. from a module that a config names in ``custom_imports``.

    Raises:
        ValueError: When its key is another's.
    """
    there = _known.setdefault(technique.key, technique)
    if there is not technique:
        raise ValueError(
            f"two techniques have the key '{technique.key}': {there.settings.__module__}."
            f'{there.settings.__name__} and {technique.settings.__module__}.'
            f'{technique.settings.__name__}; rename one of them'
        )
    return technique


def techniques() -> dict[str, Technique[Any]]:
    """All techniques by key: of this package, of installed ones, and registered ones.

    Raises:
        ImportError: When an entry point cannot be imported, naming it.
    """
    _find()
    return dict(sorted(_known.items()))


@functools.cache
def _find() -> None:
    for room in map(importlib.import_module, _ROOMS):
        for info in pkgutil.walk_packages(room.__path__, f'{room.__name__}.'):
            _register_all(importlib.import_module(info.name))
    for entry in entry_points(group=_GROUP):
        try:
            found = entry.load()
        except ImportError as error:
            raise ImportError(f'entry point {entry.name} of {_GROUP}: {error}') from error
        _register_all(found) if isinstance(found, types.ModuleType) else register(found)


def _register_all(module: types.ModuleType) -> None:
    for value in vars(module).values():
        if isinstance(value, Technique):
            register(value)


def in_order(some: Iterable[Technique[Any]]) -> Iterator[Technique[Any]]:
    """Techniques that are applied to a model, in the one order in which that is done.

    Raises:
        ValueError: When ``after`` and ``before`` lead in a circle.
    """
    by_key = {technique.key: technique for technique in some if technique.apply}
    earlier = {key: {*technique.after} & by_key.keys() for key, technique in by_key.items()}
    for key, technique in by_key.items():
        for later in by_key.keys() & {*technique.before}:
            earlier[later].add(key)
        if technique.stage == 'after_init':
            earlier[key] |= {other for other in by_key if by_key[other].stage == 'before_wrap'}
    sorter = TopologicalSorter(earlier)
    try:
        sorter.prepare()
    except CycleError as error:
        raise ValueError(f'techniques wait for each other: {" → ".join(error.args[1])}') from error
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        yield from (by_key[key] for key in ready)
        sorter.done(*ready)
