"""Checking a config before anything is built from it.

Every key and every type is compared with what MMEngine's registries and the constructors'
signatures say; a misspelt one is an error that names the nearest real ones. What only the build
can know (the keys of a dict that some constructor takes as it is) is left to it.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmengine.config import Config

from memengine.engine.config.base_files import used_names
from memengine.engine.config.error import FREE_KEYS, ConfigError, unknown_key
from memengine.engine.config.schema.runner import (
    KEYS_SET_TOGETHER,
    TOP_CONSTRAINTS,
    TOP_KEYS,
    TOP_SCHEMAS,
)
from memengine.engine.config.schema.types import arguments_of, find_type
from memengine.engine.config.schema.walk import Checker
from memengine.engine.hooks.technique import register_hooks
from memengine.engine.techniques_of_config import refusals, wrong_settings
from memengine.suggest import ONE_LETTER, STRICT, similar
from memengine.technique import Technique, techniques

__all__ = ['ConfigError', 'check_config', 'import_custom_modules', 'known_keys']

DEFAULT_SCOPE = 'memengine'


def check_config(cfg: Config | Mapping[str, Any]) -> None:
    """Check a whole config; nothing is built, but the modules that hold the types are imported.

    A key of one's own is possible below ``vars`` and ``custom``, which are left alone. So is a
    name at the top of a config file that the file itself uses further down
    (``train_pipeline = [...]``, then ``pipeline=train_pipeline``).

    Args:
        cfg: The config, MMEngine's ``Config`` or a dict.

    Raises:
        ConfigError: With all problems, one a line.
    """
    import_custom_modules(cfg)
    checker = Checker(_scope_of(cfg))
    entries = _plain_dicts(cfg, '', checker)
    if checker.problems:
        raise ConfigError(checker.problems)
    known = known_keys(cfg)
    unknown = _unknown_keys(cfg, entries, known)
    for key in unknown:
        checker.problems.append(unknown_key(key, known))
    for key, value in entries.items():
        if key in known:
            _check_entry(checker, key, value)
    _check_missing(checker, entries, unknown)
    if not checker.problems:
        checker.problems += wrong_settings(entries) or _refused_pairs(entries)
    if checker.problems:
        raise ConfigError(checker.problems)


def import_custom_modules(cfg: Config | Mapping[str, Any]) -> None:
    """Import what ``custom_imports`` names, as MMEngine does, so that it can register itself.

    Raises:
        ConfigError: When a module cannot be imported and ``allow_failed_imports`` is not set.
    """
    custom = cfg.get('custom_imports')
    if not custom:
        return
    modules = custom.get('imports') if isinstance(custom, Mapping) else None
    modules = [modules] if isinstance(modules, str) else modules
    if not isinstance(modules, (list, tuple)) or not all(isinstance(name, str) for name in modules):
        raise ConfigError(
            "custom_imports must be dict(imports=['module', ...], allow_failed_imports=False), "
            f'got {custom!r}'
        )
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            problem = f"custom_imports: '{name}' cannot be imported: {error}"
            if isinstance(error, ModuleNotFoundError) and f'{name}.'.startswith(f'{error.name}.'):
                problem = (
                    f"custom_imports: there is no module '{name}' in the current folder, in the "
                    "config's, or on PYTHONPATH"
                )
            if not custom.get('allow_failed_imports', False):
                raise ConfigError(problem) from error
            warnings.warn(problem, stacklevel=2)
    register_hooks()  # of techniques that are new


def known_keys(cfg: Config | Mapping[str, Any]) -> set[str]:
    """The keys that mean something at the top of a config."""
    keys = {*TOP_KEYS, *FREE_KEYS, *_keyed_techniques()}
    runner = cfg.get('runner_type')
    if isinstance(runner, str):
        runner = find_type('RUNNERS', runner, _scope_of(cfg))
    return keys | (set(arguments_of(runner).names) if runner is not None else set())


def _keyed_techniques() -> dict[str, Technique[Any]]:
    """The techniques that a key of the config is for."""
    return {key: technique for key, technique in techniques().items() if technique.apply}


def _plain_dicts(value: Any, path: str, checker: Checker) -> Any:
    """The same in plain dicts; a config of MMEngine's new style imports what it names on access."""
    if isinstance(value, (list, tuple)):
        return [
            _plain_dicts(entry, f'{path}.{index}', checker) for index, entry in enumerate(value)
        ]
    if not isinstance(value, (Mapping, Config)):
        return value
    entries = {}
    imported = getattr(value, '_imported_names', ()) if isinstance(value, Config) else ()
    for key in [key for key in value if key not in imported]:
        below = f'{path}.{key}' if path else str(key)
        try:
            entries[key] = _plain_dicts(value[key], below, checker)
        except ImportError as error:
            checker.report(below, str(error))
    return entries


def _scope_of(cfg: Config | Mapping[str, Any]) -> str:
    scope = cfg.get('default_scope')
    if scope is None:
        return DEFAULT_SCOPE
    if not isinstance(scope, str) or not scope:
        raise ConfigError(f'default_scope: must be the name of a scope, got {scope!r}')
    return scope


def _unknown_keys(
    cfg: Config | Mapping[str, Any], entries: Mapping[str, Any], known: set[str]
) -> list[str]:
    """Keys at the top that nothing reads, and that are no name of the config file's own."""
    filename = getattr(cfg, 'filename', None)
    own = used_names(Path(filename)) if filename else set()
    unknown = [
        str(key)
        for key, value in entries.items()
        if not (key in known or key in own or callable(value))
    ]
    if own == {'dict'} and _is_dumped_config(str(getattr(cfg, 'text', ''))):
        unknown = [key for key in unknown if similar(key, known, ONE_LETTER)]
    return unknown


def _is_dumped_config(text: str) -> bool:
    """Whether a run wrote this config, so that the values of its names stand where they are used.

    MMEngine writes keys in the order of the alphabet.
    """
    keys = re.findall(r'^(\w+) ?=', text, re.MULTILINE)
    return 'work_dir' in keys and keys == sorted(keys)


def _check_entry(checker: Checker, key: str, value: Any) -> None:
    if key in FREE_KEYS:
        if not isinstance(value, Mapping):
            checker.report(key, f'must be a dict of keys of your own, got {value!r}')
    elif key in (keyed := _keyed_techniques()):
        try:
            keyed[key].read(value)
        except ValueError as error:
            checker.problems += str(error).splitlines()
    elif fault := TOP_CONSTRAINTS[key].fault(value) if key in TOP_CONSTRAINTS else None:
        checker.report(key, fault)
    elif key in TOP_SCHEMAS:
        checker.check(value, TOP_SCHEMAS[key], key)


def _refused_pairs(entries: Mapping[str, Any]) -> list[str]:
    try:
        return refusals(entries)
    except ValueError as error:  # a setting of a technique's hook
        return [f'custom_hooks: {error}']


def _check_missing(checker: Checker, entries: Mapping[str, Any], unknown: list[str]) -> None:
    """The model, and what is needed together; a misspelt one has been reported already."""
    lacking = {
        key
        for key in ('model', *(key for triplet in KEYS_SET_TOGETHER for key in triplet))
        if entries.get(key) is None and not similar(key, unknown, STRICT)
    }
    if 'model' in lacking:
        checker.report('model', "is missing: model=dict(type='...', ...)")
    for triplet in KEYS_SET_TOGETHER:
        there = [key for key in triplet if entries.get(key) is not None]
        missing = [key for key in triplet if key in lacking]
        if there and missing:
            checker.report(
                ' and '.join(missing),
                f'missing beside {" and ".join(there)}: the three go together, or none is there',
            )
    alone = not any(entries.get(key) is not None for key in KEYS_SET_TOGETHER[0])
    if entries.get('param_scheduler') is not None and alone and 'optim_wrapper' in lacking:
        checker.report('param_scheduler', 'needs optim_wrapper, which is missing')
