"""Misspelt names in a config, seen in its text before torch and MMEngine are imported.

These take seconds, and a misspelt key is what a user wants to hear of at once. What the text does
not tell for sure is left to the check of the whole config (:mod:`memengine.engine.config.check`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from memengine.engine.config.bases import (
    UNKNOWN,
    assigned,
    config_files,
    existing_config,
    merged,
    used_names,
    values_in_text,
)
from memengine.engine.config.error import FREE_KEYS, ConfigError, unknown_key, unknown_option
from memengine.engine.config.sources import (
    SEARCHED,
    TIMM,
    arguments_in_source,
    arguments_of_network,
    choices_in_source,
    is_a_word,
    networks,
    of_other_packages,
    registered_types,
    settings_in_source,
    top_keys,
)
from memengine.suggest import LOOSE, ONE_LETTER, STRICT, STRICTER, did_you_mean, similar

__all__ = ['check_names']

_SUPPLIED = {'params', 'optimizer', 'runner', 'dataloader', 'evaluator'}  # by who builds
_KEYS_THAT_ADD_KEYS = {'custom_imports', 'runner_type'}


def check_names(config: str | Path, options: Mapping[str, Any] | None) -> None:
    """Refuse a config that is not there, and keys and types that are misspelt for sure.

    Args:
        config: As on the command line.
        options: Dotted path to value, as ``--cfg-options`` gives them.

    Raises:
        ConfigError: With one sentence for each.
    """
    file = existing_config(config)
    try:
        files = [path for path, _ in config_files(file) if path.is_file()]
        keys = dict(key for path in files for key in assigned(path))
        used = used_names(file)
    except (SyntaxError, ValueError):
        return  # which reading the config explains
    first = [path.partition('.')[0] for path in options or ()]
    if _KEYS_THAT_ADD_KEYS & {*keys, *first}:
        return
    # What a run has written holds the names that its config used, without their use.
    is_written = 'work_dir' in keys and used <= {'dict'}
    problems = [
        unknown_option(key, top_keys()) for key in first if _is_unknown(key) and key not in keys
    ]
    problems += [
        unknown_key(key, top_keys())
        for key, plain in keys.items()
        if plain and not is_written and _is_unknown(key) and key not in used
    ]
    problems += _nested_problems(file, options or {}) if not problems else []
    if problems:
        raise ConfigError(problems)


def _nested_problems(file: Path, options: Mapping[str, Any]) -> Iterator[str]:
    """What is misspelt below the top."""
    values = values_in_text(file)
    if values is None or values.get('default_scope', 'memengine') != 'memengine':
        return
    for path, value in options.items():
        *above, last = path.split('.')
        change = {last: value}
        for key in reversed(above):
            change = {key: change}
        values = merged(values, change)
    for key, value in values.items():
        if key not in FREE_KEYS and key in top_keys():
            yield from _problems_at(value, key)


def _problems_at(value: Any, path: str, known_above: bool = True) -> Iterator[str]:
    """What is misspelt at a path and below; an unknown class above it may take any key out."""
    if isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _problems_at(entry, f'{path}.{index}', known_above)
    if not isinstance(value, dict):
        return
    kind = value.get('type', _default_type(path, value))
    is_named = isinstance(kind, str)
    taken, takes_others = arguments_in_source(kind) if is_named else settings_in_source(path)
    if kind == 'TimmBackbone':  # which hands on what it does not know
        taken = {*taken, *arguments_of_network(str(value.get('model_name')))}
    faults = _key_faults(value, kind, taken, is_whole=known_above and not takes_others)
    if isinstance(kind, str):
        faults |= _value_faults(value, kind)
    yield from (f'{path}.{key}: {fault}' for key, fault in sorted(faults.items()))
    known_above = known_above and (bool(taken) or not is_named)
    for key, entry in value.items():
        yield from _problems_at(entry, f'{path}.{key}', known_above)


def _key_faults(
    value: Mapping[str, Any], kind: Any, taken: Collection[str], is_whole: bool
) -> dict[str, str]:
    """What is wrong with the keys of a dict; those that are taken are all where that is whole."""
    faults = {}
    places = [*SEARCHED, *(TIMM if kind == 'TimmBackbone' else ())]
    for key in value.keys() - {*taken, 'type'} if taken else ():
        near = similar(key, taken, LOOSE if is_whole else ONE_LETTER)
        # Beside a whole list there may only be what somebody takes out by its name.
        if (near or is_whole) and not is_a_word(key, *places, only_quoted=is_whole):
            name = kind.rpartition('/')[2] if isinstance(kind, str) and kind != 'DataLoader' else ''
            faults[key] = _argument_fault(key, taken, name)
    return faults


def _value_faults(value: Mapping[str, Any], kind: str) -> dict[str, str]:
    """What is wrong with a type's name, a model's, and words of which there are a few only."""
    faults = {}
    if fault := _type_fault(kind):
        faults['type'] = fault
    if kind == 'TimmBackbone' and (fault := _network_fault(value.get('model_name'))):
        faults['model_name'] = fault
    for key, entry in value.items():
        choices = choices_in_source(kind, key)
        if choices and isinstance(entry, str) and entry not in choices:
            faults[key] = _choice_fault(entry, choices)
    return faults


def _argument_fault(key: str, taken: Collection[str], name: str) -> str:
    offered = sorted({*taken} - _SUPPLIED)
    few = f' (it takes {", ".join(offered)})' if len(offered) <= 15 else ''
    fault = f"{name} takes no argument '{key}'" if name else 'there is no such setting'
    return fault + (did_you_mean(key, taken) or few)


def _default_type(path: str, value: Mapping[str, Any]) -> str | None:
    """What takes the keys of a dict that names no type."""
    if path == 'train_cfg':
        by_epoch = value.get('by_epoch', 'max_iters' not in value)
        return 'EpochBasedTrainLoop' if by_epoch else 'IterBasedTrainLoop'
    if path in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        return 'DataLoader'
    return 'OptimWrapper' if path == 'optim_wrapper' else None


def _type_fault(kind: str) -> str | None:
    """What is wrong with a type's name, if it is one letter or two beside a real one."""
    if not kind.removeprefix('torchvision/').isidentifier() or is_a_word(
        kind.rpartition('/')[2], *SEARCHED
    ):
        return None
    near = similar(kind, registered_types(), STRICTER)
    if not near:
        return None
    return f"there is no {registered_types()[near[0]]} '{kind}'{did_you_mean(kind, near)}"


def _choice_fault(entry: str, choices: Collection[object]) -> str:
    *others, last = map(repr, choices)
    wanted = f'{", ".join(others)} or {last}' if others else last
    return f'must be {wanted}, got {entry!r}{did_you_mean(entry, map(str, choices))}'


def _network_fault(name: Any) -> str | None:
    """What is wrong with a model's name in timm; what follows a dot names its weights."""
    bare = str(name).partition('.')[0]
    if name is None or name is UNKNOWN or bare in networks() or is_a_word(bare, *TIMM):
        return None
    return f'timm has no model {name!r}{did_you_mean(name, networks(), after=";")}'


def _is_unknown(key: str) -> bool:
    """Whether no run reads it, and no installed technique of others may go by it."""
    others = of_other_packages()
    may_be_others = bool(others) and (
        not similar(key, top_keys(), STRICT) or is_a_word(key, *others)
    )
    return key not in top_keys() and not may_be_others
