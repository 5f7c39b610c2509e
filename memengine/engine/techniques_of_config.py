"""Which techniques a config asks for, which of them cannot go together, and in which order they go.

All of it follows from their descriptions (:mod:`memengine.technique`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from logging import Logger
from typing import Any

from mmengine.hooks import Hook
from torch import nn

from memengine.engine.hooks.technique import TechniqueHook, apply_in_order, register_hooks
from memengine.technique import Technique, in_order, settings_of, techniques


def hooks_of_keys(cfg: Mapping[str, Any]) -> dict[str, TechniqueHook]:
    """The hooks that keys of the config are short for, by key."""
    hooks = {hook.technique.key: hook for hook in register_hooks().values()}
    read = {key: hook.technique.read(cfg.get(key)) for key, hook in hooks.items()}
    return {key: hooks[key](**vars(value)) for key, value in read.items() if value is not None}


def apply_before_wrapping(model: nn.Module, cfg: Mapping[str, Any]) -> None:
    """Apply what replaces modules or parameters, which DDP and FSDP must see."""
    for technique in in_order(techniques().values()):
        settings = technique.read(cfg.get(technique.key))
        if technique.stage == 'before_wrap' and technique.apply and settings is not None:
            technique.apply(model, settings)


def apply_to_model(model: nn.Module, logger: Logger, hooks: Iterable[Hook]) -> None:
    """Apply the techniques of hooks to the bare model, in order, and say so."""
    if begun := apply_in_order(model, hooks):
        logger.info(f'Techniques, in their order: {", ".join(map(_description, begun))}')


def _description(hook: TechniqueHook) -> str:
    known = settings_of(hook.technique.settings)
    stated = [
        f'{name}={value!r}'
        for name, value in vars(hook.settings).items()
        if value != known[name].field.default
    ]
    return f'{hook.technique.key}({", ".join(stated)})' if stated else hook.technique.key


# ------------------------------------------------------------------ what does not go together

_HOOK_KEYS = ('type', '_scope_', 'priority')  # keys of a hook's config


def refusals(cfg: Mapping[str, Any], hooks: Iterable[Any] | None = None) -> list[str]:
    """A sentence for each two settings that do not go together.

    Args:
        cfg: The run's config.
        hooks: The run's hooks, if they are built; else the config's ``custom_hooks`` count.
    """
    stated = _with_settings(cfg, hooks)
    known = techniques()
    return [
        str(technique.refusal(other))
        for technique in known.values()
        if is_on(technique, stated)
        for other in technique.conflicts
        if (is_on(known[other], stated) if other in known else _is_set(stated, other))
    ]


def refuse(cfg: Mapping[str, Any], hooks: Iterable[Any]) -> None:
    """Refuse a run of which two settings do not go together, before any hook has begun.

    Raises:
        ValueError: As :func:`refusals` says, a line for each two.
    """
    if problems := refusals(cfg, hooks):
        raise ValueError('\n'.join(problems))


def wrong_settings(cfg: Mapping[str, Any]) -> list[str]:
    """A sentence for each value that a setting of a wrapper, an optimiser or a loss cannot have."""
    problems = []
    for technique in techniques().values():
        place, _, kinds = technique.switch.split()[0].partition('=')
        path, _, name = place.rpartition('.')
        for node in [] if technique.apply else _values_at(cfg, path.split('.')):
            given = node if isinstance(node, Mapping) else {}
            is_meant = name != 'type' or _type_names(given.get('type')) & {*kinds.split('|')}
            problems += [
                f'{path}.{key} is {one.wanted}, got {given[key]!r}'
                for key, one in settings_of(technique.settings).items()
                if is_meant and key in given and not one.allows(given[key])
            ]
    return problems


def is_on(technique: Technique[Any], cfg: Mapping[str, Any]) -> bool:
    """Whether a config asks for a technique by its key, or where its ``switch`` says."""
    if technique.needs_ranks and cfg.get('launcher', 'none') == 'none':
        return False
    if technique.apply:
        return cfg.get(technique.key) not in (None, False)
    setting = technique.switch.split()[0]
    path = setting.partition('=')[0].split('.')
    if path[-1] == 'type':
        return _is_set(cfg, setting)
    default = settings_of(technique.settings)[path[-1]].field.default
    return any(value not in (None, default) for value in _values_at(cfg, path))


def _with_settings(cfg: Mapping[str, Any], hooks: Iterable[Any] | None) -> dict[str, Any]:
    """The config with all settings of each technique that a key or a hook asks for, by its key.

    Hooks that are built hold what keys ask for.
    """
    listed = cfg.get('custom_hooks') if hooks is None else hooks
    stated = {**cfg, 'custom_hooks': list(listed or ())}
    applied = [technique for technique in techniques().values() if technique.apply]
    by_hook = {technique.hook_name: technique for technique in applied}
    for technique in applied:
        is_read = hooks is None or technique.stage == 'before_wrap'
        settings = technique.read(cfg.get(technique.key)) if is_read else None
        stated[technique.key] = None if settings is None else vars(settings)
    for hook in stated['custom_hooks']:
        if isinstance(hook, TechniqueHook):
            stated[hook.technique.key] = vars(hook.settings)
        elif isinstance(hook, Mapping):
            given = {name: hook[name] for name in hook if name not in _HOOK_KEYS}
            for kind in _type_names(hook.get('type')) & by_hook.keys():
                stated[by_hook[kind].key] = vars(by_hook[kind].set_to(given))
    return stated


def _is_set(cfg: Mapping[str, Any], setting: str) -> bool:
    """Whether a place is set; or, if ``place`` ends in ``=x|y``, to one of these."""
    path, _, wanted = setting.partition('=')
    values = _values_at(cfg, path.split('.'))
    return any(_type_names(value) & {*wanted.split('|')} if wanted else value for value in values)


def _values_at(node: Any, path: list[str]) -> list[Any]:
    """What stands at a path, in every entry of a list on the way; of an object its type."""
    if not path:
        return [node]
    if isinstance(node, (list, tuple)):
        return [value for entry in node for value in _values_at(entry, path)]
    if isinstance(node, Mapping):
        return _values_at(node.get(path[0]), path[1:])
    return [type(node)] if isinstance(node, Hook) and path == ['type'] else []


def _type_names(value: Any) -> set[str]:
    """What a value may be called: a class also by its bases, a name also without its scope."""
    if isinstance(value, type):
        return {base.__name__ for base in value.__mro__}
    return {str(value), str(value).rpartition('.')[2]}
