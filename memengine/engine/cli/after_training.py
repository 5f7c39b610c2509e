"""``memengine probe`` and others: a loop of its own on the model of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmengine.config import Config

from memengine.engine.checkpoint.latest import checkpoint_of
from memengine.engine.checkpoint.sharded import is_sharded
from memengine.engine.config.check import check_config
from memengine.engine.config.error import ConfigError
from memengine.engine.config.file import load_config
from memengine.engine.config.schema.runner import AFTER_TRAINING
from memengine.engine.distributed.threads import set_threads
from memengine.registry import LOOPS, RUNNERS


def read_run(args: argparse.Namespace) -> Config:
    """The config of a run, with its checkpoint as ``load_from``, checked.

    Raises:
        ConfigError: When there is no such run, no config or several, or something wrong in it.
    """
    path = Path(args.run)
    if not path.exists():
        raise ConfigError(f'RUN: there is no {path}; name the folder of a run, or a checkpoint')
    is_folder = path.is_dir() and not is_sharded(str(path))
    folder = path if is_folder else path.parent
    checkpoint = checkpoint_of(path)
    beside = sorted(folder.glob('*.py'))
    if args.config is None and len(beside) != 1:
        raise ConfigError(
            f'--config: {folder} holds {len(beside)} configs, of which one would be taken; name it'
        )
    options = dict(args.cfg_options or {})
    for name in ('part', 'to'):  # options of export
        if getattr(args, name, None) is not None:
            options[f'{args.command}.{name}'] = getattr(args, name)
    cfg = load_config(args.config or beside[0], options)
    cfg.setdefault('default_scope', 'memengine')
    check_config(cfg)
    cfg.launcher = args.launcher or 'none'
    cfg.work_dir = args.work_dir or str(folder / 'report' / args.command)
    cfg.update(load_from=str(checkpoint), resume=False, custom_hooks=None, model_wrapper_cfg=None)
    return cfg


def run_after(cfg: Config, command: str) -> str:
    """Build the model with its weights, and run the command's loop; what it says, on rank 0."""
    loop = {'type': AFTER_TRAINING[command], **(cfg.get(command) or {})}
    set_threads(0)
    runner = RUNNERS.build(cfg)
    meta = runner.load_checkpoint(cfg.load_from, strict=True)['meta']
    for name in {'epoch', 'iter', 'dataset_meta'} & meta.keys():
        runner.message_hub.update_info(name, meta[name])
    answer = LOOPS.build(loop, default_args=dict(runner=runner)).run()
    if runner.rank != 0:
        return ''
    report = Path(cfg.work_dir).parent
    if report.name != 'report':
        return answer  # results that were asked for elsewhere
    from memengine.visualization.page import write_page

    return f'{answer}\n{write_page(report.parent)}'
