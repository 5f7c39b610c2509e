"""The description of a technique, and all that there are."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from memengine.suggest import did_you_mean
from memengine.technique.handle import Handle
from memengine.technique.settings import Settings, is_of, settings_of

if TYPE_CHECKING:  # settings are looked at before torch is imported
    from torch import nn

S = TypeVar('S', bound='Settings')
_ROOMS = ('memengine.techniques', 'memengine.losses')
_GROUP = 'memengine.techniques'  # of entry points


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
