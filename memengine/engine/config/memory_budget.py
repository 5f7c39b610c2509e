"""``memory_budget`` in a config: a plan at start-up, remembered beside the run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.logging import MMLogger

import memengine
from memengine.engine.config.check import ConfigError
from memengine.engine.config.file import merge_options
from memengine.engine.config.planning import Planner, budget_for
from memengine.engine.distributed.processes import cpu_group, init_process_group, together
from memengine.memory.planning import parse_bytes

__all__ = ['PLAN_FILE', 'keep_budget']

PLAN_FILE = 'memory_plan.json'
_OF_NO_MATTER = ('work_dir', 'resume', 'load_from', 'console', 'log_level', 'visualizer')


def keep_budget(cfg: Config) -> str:
    """Set in a config what keeps its training step within ``memory_budget``.

    Args:
        cfg: A config of training; changed in place. Without that key nothing is done.

    Returns:
        A sentence for the log; empty without the key.

    Raises:
        ConfigError: When nothing fits, or the model is sharded; on several ranks also when they
            planned differently, which on machines of one kind cannot be.
    """
    budget = cfg.get('memory_budget')
    if budget is None or cfg.get('train_dataloader') is None:
        return ''
    is_alone = cfg.get('launcher', 'none') == 'none'
    wrapper = str((cfg.get('model_wrapper_cfg') or {}).get('type', ''))
    if not is_alone and ('Shard' in wrapper or 'DisCo' in wrapper):
        raise ConfigError(
            f'memory_budget: what a rank of {wrapper} takes is not predicted; leave it out, and '
            'see what one takes with default_hooks.memory'
        )
    # Each rank by itself and before they know of each other, so that none can wait for another.
    options = _remembered(cfg, budget)
    if not is_alone:
        init_process_group(cfg.launcher, (cfg.get('env_cfg') or {}).get('dist_cfg') or {})
        every = together(lambda: options, cpu_group('memory_budget'))
        if any(other != options for other in every):
            raise ConfigError(
                f'memory_budget: ranks planned differently ({every}); set one of these in the '
                'config, and leave memory_budget out'
            )
    merge_options(cfg, options)
    said = ' '.join(f'{key}={value}' for key, value in options.items())
    return f'memory_budget={budget}: {said or "the step fits as it is"}'


def _remembered(cfg: Config, budget: str) -> dict[str, Any]:
    """The plan of this config and budget, from the work dir if it is there."""
    key = _key(cfg)
    path = Path(cfg.get('work_dir') or '.') / PLAN_FILE
    if path.is_file():
        known = json.loads(path.read_text())
        if known['key'] == key:
            return known['options']
    with _quiet():
        planner = Planner(cfg)
        of_ranks = 0
        if cfg.get('launcher', 'none') != 'none':  # DDP's buckets hold all gradients again
            of_ranks = planner.plain().by_category['parameters']
        found = planner.find(parse_bytes(budget) - of_ranks)
    if found.chosen is None:
        least = (budget_for(found.leanest.cost.peak_bytes) + of_ranks) / 2**20
        raise ConfigError(
            f'memory_budget: nothing fits {budget}: the smallest that would is {least:.1f} MiB '
            f'(predicted); see memengine plan CONFIG --budget {budget}'
        )
    options = planner.options(found.chosen.plan)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({'key': key, 'budget': budget, 'options': options}, indent=2))
    return options


def _key(cfg: Mapping[str, Any]) -> str:
    """Of all that a plan depends on: the config, the versions, the device."""
    stated = {name: value for name, value in cfg.items() if name not in _OF_NO_MATTER}
    depends = [stated, torch.__version__, memengine.__version__, get_device()]
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
