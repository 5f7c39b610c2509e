"""Misspelt names and wrong values of a config, seen in its text before torch is imported.

That takes seconds, and a misspelling is what a user wants to hear of at once. What the text does
not tell for sure is left to the check of the whole config (:mod:`memengine.engine.config.check`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from memengine.engine.config.base_files import (
    UNKNOWN,
    assigned,
    config_files,
    existing_config,
    merged,
    misplaced,
    used_names,
    values_in_text,
)
from memengine.engine.config.before_torch.hints import (
    Stated,
    stated_in_source,
    stated_of_network,
    technique_of,
)
from memengine.engine.config.before_torch.sources import (
    NOTHING_KNOWN,
    SEARCHED,
    TIMM,
    arguments_in_source,
    arguments_of_network,
    class_in_source,
    is_a_word,
    networks,
    of_other_packages,
    registered_types,
    top_keys,
)
from memengine.engine.config.error import FREE_KEYS, ConfigError, unknown_key, unknown_option
from memengine.engine.config.schema.bounds import Constraint
from memengine.engine.config.schema.bounds_of_settings import (
    BOUNDS_AT,
    DEFAULT_HOOK_TYPES,
    RULES_AT,
    TOP_BOUNDS,
    value_fault,
)
from memengine.suggest import LOOSE, ONE_LETTER, STRICT, STRICTER, did_you_mean, similar

_SUPPLIED = {'params', 'optimizer', 'runner', 'dataloader', 'evaluator'}  # by who builds
# Where the Runner, or a loader, builds what a dict describes.
_STATED = re.compile(
    r'model|optim_wrapper|train_cfg|(train|val|test)_dataloader(\.dataset|\.sampler)?|log_processor|'
    r'param_scheduler|custom_hooks|default_hooks\.\w+|(val|test)_evaluator'
)
_DEFAULT_TYPES = {
    'log_processor': 'LogProcessor',
    'optim_wrapper': 'OptimWrapper',
    'test_cfg': 'TestLoop',
    'val_cfg': 'ValLoop',
    **dict.fromkeys(('train_dataloader', 'val_dataloader', 'test_dataloader'), 'DataLoader'),
}
# Where the bounds name every key that there is.
_BOUND_WHOLLY = {'auto_scale_lr', 'env_cfg.mp_cfg', 'randomness', 'verify_exactness'}
_BY_BUILDER = {
    'optim_wrapper': {'constructor', 'paramwise_cfg'},
    'param_scheduler': {'convert_to_iter_based'},
    'train_cfg': {'by_epoch'},
    **dict.fromkeys(
        ('train_dataloader', 'val_dataloader', 'test_dataloader'),
        {'num_batch_per_epoch', 'disable_subprocess_warning'},
    ),
}
_KEYS_THAT_ADD_KEYS = {'custom_imports', 'runner_type'}


def check_text(config: str | Path, options: Mapping[str, Any] | None) -> None:
    """Refuse a config that is not there, and keys, types and values that are wrong for sure.

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
    """What is wrong with what the top's keys stand for."""
    values = values_in_text(file)
    if values is None or values.get('default_scope', 'memengine') != 'memengine':
        return
    wrong = [it for path, value in options.items() if (it := misplaced(values, path, value))]
    if wrong:
        yield from wrong
        return
    for path, value in options.items():
        *above, last = path.split('.')
        change = {last: value}
        for key in reversed(above):
            change = {key: change}
        values = merged(values, change)
    for key, value in values.items():
        if key not in FREE_KEYS and key in top_keys():
            yield from _problems_of(key, _with_lists(value))


def _problems_of(key: str, value: Any) -> Iterator[str]:
    """What is wrong at a key of the top, and below it."""
    technique = technique_of(key)
    if technique and _is_told(value):
        try:
            technique.read(value)
        except ValueError as error:
            yield from str(error).splitlines()
        return
    said = stated_in_source('Runner').get(key)
    hint = said.hint if said and key not in BOUNDS_AT else None
    fault = value_fault(key, value, TOP_BOUNDS, hint) if _is_told(value) else None
    if fault:
        yield f'{key}: {fault}'
    else:
        yield from _problems_at(value, key)


def _problems_at(value: Any, path: str, known_above: bool = True) -> Iterator[str]:
    """What is wrong at a path and below; an unknown class above it may take any key out."""
    if isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _problems_at(entry, f'{path}.{index}', known_above)
    if not isinstance(value, dict) or '_scope_' in value:
        return
    kind = value.get('type', _default_type(path, value))
    is_named = isinstance(kind, str)
    taken, takes_others = arguments_in_source(kind) if is_named else NOTHING_KNOWN
    if kind == 'TimmBackbone':  # which hands on what it does not know
        further = frozenset(value.keys() - {*taken, 'type'})
        of_network, takes_others = arguments_of_network(str(value.get('model_name')), further)
        taken = {*taken, *of_network}
    known_below = known_above and (bool(taken) or not is_named)
    place = re.sub(r'\.\d+\b', '', path)
    bounds = BOUNDS_AT.get(place, {})
    taken = {*taken, *_by_builder(place)} if taken else {*bounds}
    is_whole, is_stated = known_above and not takes_others, bool(_STATED.fullmatch(place))
    if place in _BOUND_WHOLLY:
        is_whole = is_stated = True
    elif place == 'default_hooks':
        taken = DEFAULT_HOOK_TYPES.keys()  # or a name of the user's own, that is not like these
    faults = _key_faults(value, kind, taken, is_whole, is_stated and 'constructor' not in value)
    if place == 'default_hooks':
        lacking = {key for key, it in value.items() if isinstance(it, dict) and 'type' not in it}
        faults |= dict.fromkeys(lacking - taken - {*faults}, "needs a type, dict(type='...', ...)")
    if place in RULES_AT and _is_told(value):
        faults |= dict(RULES_AT[place](value))
    faults |= _value_faults(value, str(kind) if is_named else '', bounds)
    yield from (f'{path}.{key}: {fault}' for key, fault in sorted(faults.items()))
    for key, entry in value.items():
        yield from _problems_at(entry, f'{path}.{key}', known_below)


def _key_faults(
    value: Mapping[str, Any], kind: Any, taken: Collection[str], is_whole: bool, is_stated: bool
) -> dict[str, str]:
    """What is wrong with the keys of a dict.

    Args:
        value: The dict.
        kind: Its type.
        taken: What that takes.
        is_whole: Whether it takes nothing else.
        is_stated: Whether nothing is built around it, which might take keys out by their names.
    """
    faults = {}
    places: tuple[str, ...] = SEARCHED
    if kind == 'TimmBackbone':  # timm's words have been asked where its networks take no others
        places = ('memengine', 'mmengine') if is_whole else (*SEARCHED, *TIMM)
    for key in value.keys() - {*taken, 'type'} if taken else ():
        near = similar(key, taken, LOOSE if is_whole else ONE_LETTER)
        is_alone = is_whole and is_stated
        if is_alone or (near or is_whole) and not is_a_word(key, *places, only_quoted=is_whole):
            name = kind.rpartition('/')[2] if isinstance(kind, str) and kind != 'DataLoader' else ''
            faults[key] = _argument_fault(key, taken, name)
    return faults


def _value_faults(
    value: Mapping[str, Any], kind: str, bounds: Mapping[str, Constraint]
) -> dict[str, str]:
    """What is wrong with a type's name, a model's, and the values of arguments."""
    faults = {}
    stated = stated_in_source(kind)
    if kind == 'TimmBackbone':
        stated = {**stated_of_network(str(value.get('model_name'))), **stated}
    ours = class_in_source(kind) is not None
    for key, entry in value.items():
        if _is_told(entry) and (key in bounds or key not in ('type', '_delete_', '_scope_')):
            said = stated.get(key, Stated())
            if fault := value_fault(key, entry, bounds, said.hint, said.defaults, ours):
                faults[key] = fault
    if kind and (fault := _type_fault(kind)):
        faults['type'] = fault
    if kind == 'TimmBackbone' and (fault := _network_fault(value.get('model_name'))):
        faults['model_name'] = fault
    return faults


def _with_lists(value: Any) -> Any:
    """The same with lists for tuples, as the whole check has them."""
    if isinstance(value, dict):
        return {key: _with_lists(entry) for key, entry in value.items()}
    return [*map(_with_lists, value)] if isinstance(value, (list, tuple)) else value


def _is_told(value: Any) -> bool:
    """Whether all of a value is in the text."""
    if isinstance(value, dict):
        return all(map(_is_told, value.values()))
    return all(map(_is_told, value)) if isinstance(value, list) else value is not UNKNOWN


def _by_builder(place: str) -> set[str]:
    """Keys of a dict at a place that are taken out before its class sees the others."""
    is_hook = place.startswith(('custom_hooks', 'default_hooks.'))
    return {'priority'} if is_hook else _BY_BUILDER.get(place, set())


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
    above, _, name = path.rpartition('.')
    return DEFAULT_HOOK_TYPES.get(name) if above == 'default_hooks' else _DEFAULT_TYPES.get(path)


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
