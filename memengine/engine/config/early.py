"""Misspelt names in a config, seen in its text before torch and MMEngine are imported.

These take seconds, and a misspelt key is what a user wants to hear of at once. What the text does
not tell for sure is left to the check of the whole config (:mod:`memengine.engine.config.check`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memengine.engine.config.bases import (
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
    is_a_word,
    of_other_packages,
    registered_types,
    settings_in_source,
    top_keys,
)
from memengine.suggest import LOOSE, ONE_LETTER, STRICT, STRICTER, did_you_mean, similar

__all__ = ['check_names']

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
        unknown_option(key, top_keys()) for key in first if _misspelt(key) and key not in keys
    ]
    problems += [
        unknown_key(key, top_keys())
        for key, plain in keys.items()
        if plain and not is_written and _misspelt(key) and key not in used
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


def _problems_at(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _problems_at(entry, f'{path}.{index}')
    if not isinstance(value, dict):
        return
    kind = value.get('type', _default_type(path, value))
    known = arguments_in_source(kind) if isinstance(kind, str) else settings_in_source(path)
    taken, takes_others = known
    places = list(SEARCHED)
    if kind == 'TimmBackbone':  # which hands on what it does not know
        taken = {*taken, *arguments_of_network(str(value.get('model_name')))}
        places += TIMM
    cutoff = ONE_LETTER if takes_others else LOOSE
    if isinstance(kind, str) and (fault := _type_fault(kind)):
        yield f'{path}.type: {fault}'
    for key, entry in value.items():
        near = similar(key, taken, cutoff) if key not in taken else []
        if near and not is_a_word(key, *places):
            named = isinstance(kind, str) and kind != 'DataLoader'
            name = str(kind).rpartition('/')[2]
            fault = f"{name} takes no argument '{key}'" if named else 'there is no such setting'
            yield f'{path}.{key}: {fault}{did_you_mean(key, taken)}'
        yield from _problems_at(entry, f'{path}.{key}')


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


def _misspelt(key: str) -> bool:
    """Whether it looks like a key, and is none that an installed technique may go by."""
    if key in top_keys() or not similar(key, top_keys(), STRICT):
        return False
    return not is_a_word(key, *of_other_packages())
