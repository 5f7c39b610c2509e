"""A resumed run whose config has changed the optimiser's settings, or its schedules: they hold."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from memengine.engine.config.base_files import values_in_dump
from memengine.engine.faults.finite_state import each_optim_wrapper

_CLASSES = ('type', 'optimizer_class')
_TAKES_STATE_OF = {  # by their `load_state_dict`
    'AdamW': 'AdamWBf16',
    'AdamWBf16': 'AdamW',
    'AdamW8bit': 'AdamW',
    'AdamW4bit': 'AdamW',
}
_GROUPING: dict[str, Any] = {'constructor': 'DefaultOptimWrapperConstructor', 'paramwise_cfg': {}}
_COUNTS = 'accumulative_counts'
# An optimiser keeps more, or keeps it elsewhere, where these are switched on.
_SHAPES_STATE = ('amsgrad', 'capturable', 'centered', 'fused', 'momentum')


def param_groups(runner: Any) -> list[dict[str, Any]]:
    """The parameter groups of all optimisers of a run."""
    return [g for w in each_optim_wrapper(runner.optim_wrapper) for g in w.param_groups]


def settings_of_groups(runner: Any) -> list[dict[str, Any]]:
    """What holds now for each parameter group: learning rate, weight decay and so on."""
    return [{k: v for k, v in group.items() if k != 'params'} for group in param_groups(runner)]


def changed_settings(
    runner: Any, checkpoint: Mapping[str, Any], filename: str
) -> Callable[[], None]:
    """Find which settings a config has changed since its run has written a checkpoint.

    Where there are any, the schedules are followed from the beginning of training to the place of
    the checkpoint, so that they go on as if the config had been this one all along.

    Args:
        runner: The run that goes on; its optimisers and schedules are as they were built.
        checkpoint: Its ``meta`` has the config of the run that wrote it. Where that does not tell
            the settings, they are taken to be the same.
        filename: The checkpoint's.

    Returns:
        What makes the changed settings hold, once the state of optimisers and schedules is loaded.

    Raises:
        ValueError: For a change that the optimiser's state does not go with, naming the setting.
    """
    meta = checkpoint['meta']
    before, now = _settings(str(meta.get('cfg'))), _settings(runner.cfg.pretty_text)
    names = sorted(before.keys() | now.keys()) if before and now else []
    changed = [name for name in names if before.get(name) != now.get(name)]
    if not changed:
        return lambda: None
    changes = '; '.join(
        name
        if name == 'param_scheduler'
        else f'{name} from {before.get(name, "its default")} to {now.get(name, "its default")}'
        for name in changed
    )
    of_state = [name for name in changed if _key(name) != _COUNTS]
    if reason := _why_not(runner, checkpoint['optimizer'], of_state, before, now):
        raise ValueError(
            f'{filename} was written with other settings ({changes}), but {reason}: set this back '
            'to go on, or load_from without resume to begin another training from its weights'
        )
    said = f'{filename} was written with other settings; from here on the config holds: {changes}'
    if not of_state:
        return lambda: runner.logger.warning(said)
    _follow_schedules(runner, meta['iter'], meta['epoch'])
    held = settings_of_groups(runner)
    states = [dict(schedule.state_dict()) for schedule in _schedules(runner)]

    def hold() -> None:
        for group, values in zip(param_groups(runner), held, strict=True):
            for key in {*_held(of_state), *_scheduled(group), *_scheduled(values)}:
                for entry in (key, f'initial_{key}'):
                    group.pop(entry, None)
                    group.update({entry: values[entry]} if entry in values else {})
        for schedule, state in zip(_schedules(runner), states, strict=True):
            schedule.load_state_dict(state)
        runner.logger.warning(said)

    return hold


def _settings(config: str) -> dict[str, Any]:
    """The settings of optimisers and schedules by their paths; none where the config tells none."""
    values = values_in_dump(config)
    found = dict(_of_optimizers(values.get('optim_wrapper'), 'optim_wrapper'))
    return {**found, 'param_scheduler': values.get('param_scheduler')} if found else {}


def _of_optimizers(config: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(config, dict):
        return
    if isinstance(config.get('optimizer'), dict):
        for key, value in config['optimizer'].items():
            is_class = key in _CLASSES and isinstance(value, str)
            yield f'{path}.optimizer.{key}', value.rpartition('.')[2] if is_class else value
        yield from ((f'{path}.{key}', config.get(key) or none) for key, none in _GROUPING.items())
        yield f'{path}.{_COUNTS}', config.get(_COUNTS, 1)
    else:  # several, by their names
        for name, below in config.items():
            yield from _of_optimizers(below, f'{path}.{name}')


def _why_not(
    runner: Any,
    state: Mapping[str, Any],
    changed: list[str],
    before: Mapping[str, Any],
    now: Mapping[str, Any],
) -> str | None:
    """Why changed settings cannot hold for an optimiser's state, if so."""
    groups, saved = param_groups(runner), _saved_groups(state)
    # The groups of a run may have one more than the optimiser: MMEngine's, for the log.
    wrappers = each_optim_wrapper(runner.optim_wrapper)
    own = [group for wrapper in wrappers for group in wrapper.optimizer.param_groups]
    if saved and [len(g['params']) for g in saved] != [len(g['params']) for g in own]:
        name = next((name for name in changed if _key(name) in _GROUPING), changed[0])
        return f'{name} puts parameters into other groups than its state is of'
    for name in changed:
        key = _key(name)
        if key == 'type' and before.get(name) == _TAKES_STATE_OF.get(now.get(name, '')):
            continue
        if key in _CLASSES:
            return f'it has the state of {before.get(name)}, which {name} cannot go on with'
        if key in _SHAPES_STATE and now.get(name) and not all(g.get(key) for g in saved):
            return f'its state lacks what {name} needs'
        is_of_groups = name != 'param_scheduler' and key not in _GROUPING
        is_of_one = (name in before) != (name in now)
        if is_of_one and f'{name.rpartition(".")[0]}.type' in changed:
            continue  # the other class may not know it, and each is built with its own
        if is_of_groups and not any(key in group for group in groups):
            return f'{name} cannot be changed once an optimiser has a state'
    for schedule in _schedules(runner) if changed else ():
        if getattr(schedule, 'need_val_args', False):
            return (
                f'{type(schedule).__name__} in param_scheduler follows what was measured, so it '
                f'cannot go on from another {changed[0]}'
            )
    return None


def _follow_schedules(runner: Any, iterations: int, epochs: int) -> None:
    """Take the schedules from the beginning to a place in training, in the order of its steps."""
    by_iteration = [schedule for schedule in _schedules(runner) if not schedule.by_epoch]
    by_epoch = [schedule for schedule in _schedules(runner) if schedule.by_epoch]
    epoch_length = len(runner.train_dataloader) if epochs else iterations + 1
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of schedules that step without the optimiser
        for done in range(1, iterations + 1):
            ended = done % epoch_length == 0 and done // epoch_length <= epochs
            for schedule in by_iteration + (by_epoch if ended else []):
                schedule.step()


def _schedules(runner: Any) -> list[Any]:
    schedules = runner.param_schedulers or []
    return sum(schedules.values(), []) if isinstance(schedules, dict) else schedules


def _saved_groups(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parameter groups of a saved state, of several optimisers one after another."""
    if 'param_groups' in state:
        return list(state['param_groups'])
    states = [below for below in state.values() if isinstance(below, Mapping)]
    return [group for below in states for group in _saved_groups(below)]


def _key(name: str) -> str:
    return name.rpartition('.')[2]


def _held(changed: Iterable[str]) -> set[str]:
    """Settings of parameter groups that changed ones say; by parameter it is these two."""
    keys = set(map(_key, changed))
    return keys | {'lr', 'weight_decay'} if keys & _GROUPING.keys() else keys


def _scheduled(group: Iterable[str]) -> set[str]:
    """What schedules set in a parameter group; that of momentum sets Adam's betas."""
    keys = {key.removeprefix('initial_') for key in group if key.startswith('initial_')}
    return keys | {'betas'} if 'momentum' in keys else keys
