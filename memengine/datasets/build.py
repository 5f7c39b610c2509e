"""Building what a data config names, with errors that say which setting is wrong."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mmengine.registry import Registry

from memengine.suggest import did_you_mean


def one_line(error: BaseException) -> str:
    """What ``error`` says, on one line, so that it can end the sentence of another error."""
    text = ' '.join(str(error).split())
    says_what = text and not isinstance(error, KeyError)
    return text if says_what else f'{type(error).__name__} {text}'.strip()


def build(
    registry: Registry, cfg: Any, setting: str, on_missing: Callable[[str], str] | None = None
) -> Any:
    """Build ``cfg`` from ``registry``; an object that is built already is returned as it is.

    Args:
        registry: Where ``cfg['type']`` is looked up (then in its parents).
        cfg: ``dict(type=..., **arguments)``; ``type`` is a name, or the class itself.
        setting: What the user calls this place of the config, for errors: ``'pipeline[2]'``.
        on_missing: Called with a name that is not found; may register more, and returns a hint for
            the error that is raised when the name is still not there.

    Raises:
        TypeError: When ``cfg`` is no dict with a ``type``.
        ValueError: When the type or an argument is unknown (with the nearest real names), or when
            the constructor refuses an argument.
    """
    if not isinstance(cfg, Mapping):
        if isinstance(cfg, (str, bytes, int, float, list, tuple, type(None))):
            raise TypeError(f"{setting} must be a dict with the key 'type', got {cfg!r}")
        return cfg
    arguments = dict(cfg)
    if 'type' not in arguments:
        raise TypeError(f"{setting} lacks the key 'type', which names what to build: {cfg!r}")
    kind = arguments.pop('type')
    factory = _find(registry, kind, setting, on_missing) if isinstance(kind, str) else kind
    name = kind if isinstance(kind, str) else getattr(kind, '__name__', repr(kind))
    _check_arguments(factory, arguments, f'{setting} ({name})')
    try:
        return factory(**arguments)
    except (TypeError, ValueError, ImportError, AssertionError) as error:  # mmcv asserts
        raise ValueError(f'{setting} ({name}): {one_line(error)}') from error


def _lookup(registry: Registry, kind: str) -> Callable[..., Any] | None:
    try:
        found = registry.get(kind)
    except RuntimeError:  # how MMEngine reports a name that it cannot even split into modules
        return None
    return found if callable(found) else None


def _find(
    registry: Registry, kind: str, setting: str, on_missing: Callable[[str], str] | None
) -> Callable[..., Any]:
    if (found := _lookup(registry, kind)) is not None:
        return found
    hint = on_missing(kind) if on_missing is not None else ''
    if (found := _lookup(registry, kind)) is not None:
        return found
    names: list[str] = []
    node: Registry | None = registry
    while node is not None:
        names += node.module_dict
        node = node.parent
    near = did_you_mean(kind, names, after=';')
    raise ValueError(f'{setting}: there is no {registry.name} named {kind!r}{near}{hint}')


def _check_arguments(factory: Callable[..., Any], arguments: Mapping[str, Any], where: str) -> None:
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:  # builtins without a signature check their arguments themselves
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in arguments:
        if name not in parameters:
            known = ', '.join(parameters) or 'none'
            hint = did_you_mean(name, parameters, after=';')
            raise ValueError(f'{where} has no setting {name!r}{hint} (known: {known})')
    for name, parameter in parameters.items():
        required = parameter.default is parameter.empty and parameter.kind is not (
            parameter.VAR_POSITIONAL
        )
        if required and name not in arguments:
            raise ValueError(f'{where} needs the setting {name!r}')
