"""``memory_budget``, ``memory`` and ``'auto'`` sizes in a config: a plan that a run remembers."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.dist import get_world_size
from mmengine.logging import MMLogger

import memengine
from memengine._torch_private.distributed import pretended_ranks
from memengine.engine.checkpoint.files import atomic_write
from memengine.engine.config.before_torch.sizes import parse_bytes, parse_fit
from memengine.engine.config.check import ConfigError
from memengine.engine.config.file import merge_options
from memengine.engine.config.planning import Planner, budget_for
from memengine.engine.distributed.launchers import read_rank
from memengine.engine.distributed.processes import (
    cpu_group,
    do_on_all_ranks,
    init_process_group,
    use_own_gpu,
)
from memengine.memory import UnpredictableError, room_bytes

T = TypeVar('T')

PLAN_FILE = 'memory_plan.json'
_KEYS_WITHOUT_EFFECT = ('work_dir', 'resume', 'load_from', 'console', 'log_level', 'visualizer')
_KEYS = ('memory_budget', 'memory')
_SIZES = ('micro_batch_size', 'chunk_size')
_PLANNED_WITH_IT = ('keep_graph', 'forward_chunk_size')
_ONE_SLICE = {'slices': 1, 'kept': 1.0}  # a batch in one slice


@dataclass(frozen=True)
class _Planned:
    """What a rank has planned.

    Attributes:
        key: Of all that it depends on.
        room_bytes: What the step may take.
        needed_bytes: What it needs of that, with what stays free.
        options: What is set.
        caution: What makes a batch take more than was planned for; empty where nothing does.
    """

    key: str
    room_bytes: int
    needed_bytes: int
    options: dict[str, Any]
    caution: str = ''


def open_auto_sizes(cfg: Config) -> str:
    """Leave open in a config what ``'auto'`` leaves to a plan: its step is that of a whole batch.

    Args:
        cfg: Of training; changed in place.

    Returns:
        The setting that was ``'auto'``; empty where none was.

    Raises:
        ConfigError: For settings beside it that are planned with it.
    """
    wrapper = cfg.get('optim_wrapper') or {}
    setting = next((name for name in _SIZES if wrapper.get(name) == 'auto'), '')
    if not setting:
        return ''
    for name in _PLANNED_WITH_IT:
        if wrapper.pop(name, 'auto') != 'auto':
            raise ConfigError(
                f"optim_wrapper.{name}: {setting}='auto' is planned with it; leave it out, or give "
                f'the number of images of {setting}'
            )
    del wrapper[setting]
    wrapper['type'] = 'OptimWrapper'
    return setting


def _open_kept_graphs(cfg: Config) -> str:
    """Leave open ``keep_graph='auto'`` beside a number of images; the setting, or empty."""
    wrapper = cfg.get('optim_wrapper') or {}
    is_number = isinstance(wrapper.get('chunk_size'), int)
    if wrapper.get('keep_graph') != 'auto' or not is_number or wrapper.get('forward_chunk_size'):
        return ''
    del wrapper['chunk_size'], wrapper['keep_graph']
    wrapper['type'] = 'OptimWrapper'
    return 'keep_graph'


def keep_budget(cfg: Config) -> str:
    """Set in a config what keeps its training step within ``memory_budget``, or what is free.

    ``memory`` plans for a share of the bytes between the leanest plan and the step as it is.

    Args:
        cfg: A config of training; changed in place. Without one of these keys and without a size of
            slices that is ``'auto'`` nothing is done.

    Returns:
        A sentence for the log; empty when nothing was done.

    Raises:
        ConfigError: When nothing fits, both keys are set, or a size is ``'auto'`` where slices
            would be another training, or cannot be predicted. On several ranks on all of them.
    """
    if cfg.get('train_dataloader') is None:
        return ''
    asked = copy.deepcopy(cfg)
    wrapper = cfg.get('optim_wrapper') or {}
    kind, setting = wrapper.get('type'), open_auto_sizes(asked) or _open_kept_graphs(asked)
    keys = [key for key in _KEYS if cfg.get(key) is not None]
    if len(keys) > 1:
        raise ConfigError(
            f'memory={cfg.memory!r} and memory_budget={cfg.memory_budget!r} both say what a step '
            'may take; leave one out'
        )
    if not keys and not setting:
        return ''
    name = f'{keys[0]}={cfg[keys[0]]}' if keys else f"{setting}='auto'"
    is_alone = cfg.get('launcher', 'none') == 'none'
    of_model = str((cfg.get('model_wrapper_cfg') or {}).get('type', ''))
    if dist.is_initialized() and 'Shard' in of_model:
        raise ConfigError(
            f'{name}: what a rank of {of_model} takes is predicted before torch.distributed is '
            'initialised; leave that to the Runner'
        )
    # Before ranks know of each other, so that nothing of a prediction is sent; what came of it is
    # told to all, so that none waits for one that cannot plan.
    is_pretended = not is_alone and not dist.is_initialized()
    ranks = 1
    if is_pretended:
        own = read_rank(cfg.launcher)
        use_own_gpu(own)
        ranks = own.world_size
    with pretended_ranks(ranks) if is_pretended else nullcontext():
        plan = _outcome(lambda: _planned_or_measured(cfg, asked, setting))
    if not is_alone:
        init_process_group(cfg.launcher, (cfg.get('env_cfg') or {}).get('dist_cfg') or {})
    every = do_on_all_ranks(plan, None if is_alone else cpu_group('memory_budget'))
    chosen = min(every, key=lambda one: one.room_bytes)  # which fits where there is more room, too
    if is_alone or dist.get_rank() == 0:
        path = _file(cfg)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as unfinished:
            unfinished.write_text(json.dumps(asdict(chosen), indent=2))
    if setting and not chosen.options:
        return f'{name}: not predicted; it is measured in the first iterations'
    if setting:
        if chosen.options['optim_wrapper.type'] != kind:
            raise ConfigError(
                f'optim_wrapper.type={kind!r} is not for the loss of this model; use '
                f'{chosen.options["optim_wrapper.type"]!r}'
            )
        cfg.optim_wrapper = asked.optim_wrapper
    merge_options(cfg, chosen.options)
    said = ' '.join(f'{key}={value}' for key, value in chosen.options.items())
    sentences = [f'{name}: {said or "the step fits as it is"}', chosen.caution]
    return '; '.join(filter(None, sentences))


def _outcome(act: Callable[[], T]) -> Callable[[], T]:
    """Act now; what came of it is returned, or raised, later."""
    try:
        result = act()
    except Exception as error:
        failure = error

        def fail() -> T:
            raise failure

        return fail
    return lambda: result


def _planned_or_measured(cfg: Config, asked: Config, setting: str) -> _Planned:
    """As :func:`_planned`; ``keep_graph`` alone without options, where they cannot be planned."""
    try:
        return _planned(cfg, asked, setting)
    except ConfigError:
        if setting != 'keep_graph' or any(cfg.get(key) is not None for key in _KEYS):
            raise
        return _Planned(_key(cfg), 0, 0, {})


def _planned(cfg: Config, asked: Config, setting: str) -> _Planned:
    """The plan of this config, from the work dir if it is there.

    Args:
        cfg: As it was written.
        asked: With what is planned left open.
        setting: The size that is ``'auto'``, if one is.
    """
    path, key = _file(cfg), _key(cfg)
    budget, fit = cfg.get('memory_budget'), cfg.get('memory')
    chunk_size = cfg.optim_wrapper.chunk_size if setting == 'keep_graph' else None
    room = parse_bytes(budget) if budget else room_bytes(torch.device(get_device()))
    known = _read(path)
    if known and known.key == key and (fit is not None or known.needed_bytes <= room):
        return known
    with _quiet():
        try:
            planner = Planner(asked, chunk_size=chunk_size)
            if setting:
                _leave_to_slices(planner, setting, budget is None and fit is None)
            found = planner.find(room) if fit is None else planner.fitting(parse_fit(fit))
        except UnpredictableError as error:
            key = setting or ('memory' if budget is None else 'memory_budget')
            raise ConfigError(f'{key}: {error}; then give numbers') from error
    if found.chosen is None:
        least = budget_for(found.leanest.cost.peak_bytes) / 2**20
        see = f'; see memengine plan CONFIG --budget {budget}' if budget else ''
        raise ConfigError(
            f'{"memory_budget" if budget else setting}: nothing fits '
            f'{budget or f"{room / 2**20:.1f} MiB"}: the smallest that would is {least:.1f} MiB '
            f'(predicted){see}'
        )
    of_slices = [knob.name for knob in planner.knobs if setting and knob.name in _ONE_SLICE]
    plan = {name: _ONE_SLICE[name] for name in of_slices} | dict(found.chosen.plan)
    needed = budget_for(found.chosen.cost.peak_bytes)
    return _Planned(key, room, needed, planner.options(plan), planner.caution)


def _leave_to_slices(planner: Planner, setting: str, only: bool) -> None:
    """Leave out what would take the place of slices, and what else was not asked for."""
    knobs = [knob for knob in planner.knobs if knob.name != 'optimizer_in_backward']
    if not any(knob.name == 'slices' for knob in knobs):
        why = planner.left_out.get('slices', 'a batch of one image has no slices')
        raise ConfigError(f"{setting}='auto': {why}; give the number of images")
    planner.knobs = [knob for knob in knobs if knob.name in _ONE_SLICE] if only else knobs


def _file(cfg: Config) -> Path:
    return Path(cfg.get('work_dir') or '.') / PLAN_FILE


def _read(path: Path) -> _Planned | None:
    """The plan in a file; None where there is none that can be read, or another version's."""
    try:
        return _Planned(**json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _key(cfg: Mapping[str, Any]) -> str:
    """Of all that a plan depends on: config, versions, the device, how large it is, ranks."""
    stated = {name: value for name, value in cfg.items() if name not in _KEYS_WITHOUT_EFFECT}
    remembered = [field.name for field in fields(_Planned)]  # other versions had other ones
    versions = [torch.__version__, memengine.__version__, remembered]
    depends = [stated, *versions, get_device(), get_world_size()]
    if get_device() == 'cuda':
        depends.append(torch.cuda.get_device_properties(0).total_memory)
    return hashlib.sha256(json.dumps(depends, sort_keys=True, default=str).encode()).hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    logger = MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel('ERROR')  # each prediction would say what a run says once
    try:
        yield
    finally:
        logger.setLevel(level)
