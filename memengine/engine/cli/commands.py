"""What the command line does: its options put into the config, then training or testing."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from mmengine.config import Config
from mmengine.dist import get_rank

from memengine._torch_private.distributed import pretended_ranks
from memengine.engine.checkpoint.checksums import verify as compare_checksums
from memengine.engine.checkpoint.convert import convert
from memengine.engine.checkpoint.files import DamagedError
from memengine.engine.checkpoint.latest import find_latest
from memengine.engine.checkpoint.sharded import SUFFIX, is_sharded
from memengine.engine.cli.tracking import track
from memengine.engine.config.check import check_config
from memengine.engine.config.error import ConfigError
from memengine.engine.config.file import load_config, similar_files
from memengine.engine.config.schema.types import arguments_of, find_type
from memengine.engine.config.step_of_config import check_model
from memengine.engine.distributed.threads import set_threads
from memengine.registry import RUNNERS

__all__ = ['run_command', 'convert', 'read_config', 'replay', 'verify']

_DTYPE = {'bf16': 'bfloat16', 'fp16': 'float16'}


def read_config(args: argparse.Namespace) -> Config:
    """The config with what the command line sets, checked whole.

    Raises:
        ConfigError: With all that is wrong.
    """
    if args.command == 'test':
        _check_exists(args.checkpoint, 'CHECKPOINT')
    cfg = load_config(args.config, args.cfg_options)
    cfg.setdefault('default_scope', 'memengine')
    _set_launcher(cfg, 'pytorch' if _ranks(args) > 1 else args.launcher)
    if getattr(args, 'work_dir', None) is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = str(Path('work_dirs') / Path(args.config).stem)
    if getattr(args, 'console', None) is not None:
        cfg.console = args.console
    if args.command == 'train':
        _set_train_options(cfg, args)
    elif args.command == 'test':
        cfg.load_from, cfg.resume = args.checkpoint, False
    if args.command != 'train':  # which alone plans; others take the whole batch
        from memengine.engine.config.memory_budget import open_auto_sizes

        for key in ('memory', 'memory_budget'):
            cfg.pop(key, None)
        open_auto_sizes(cfg)
    check_config(cfg)
    done = 'test' if args.command == 'test' else 'train'
    if cfg.get(f'{done}_cfg') is None:
        parts = 'optim_wrapper' if done == 'train' else 'test_evaluator'
        raise ConfigError(
            f'{args.config} has no {done}_dataloader, {done}_cfg and {parts}, so there is '
            f'nothing to {done}'
        )
    return cfg


def run_command(args: argparse.Namespace, cfg: Config) -> str:
    """Train, test, or look at data and memory, as a checked config says; what is to be printed."""
    if args.command in ('plan', 'predict'):
        from memengine.engine.cli.measure_and_predict import predict_step
        from memengine.engine.cli.plan import plan_step

        with pretended_ranks(_ranks(args)) if _ranks(args) > 1 else nullcontext():
            return plan_step(cfg, args) if args.command == 'plan' else predict_step(cfg, args.json)
    if args.command == 'memory':
        from memengine.engine.cli.memory import report_memory

        return report_memory(cfg, args.json)
    if args.command == 'measure':
        from memengine.engine.cli.measure_and_predict import measure_step

        return measure_step(cfg, args.json)
    if args.command == 'data':
        from memengine.engine.cli.data import examine_data

        return examine_data(cfg)
    check_model(cfg)
    _make_work_dir(cfg.work_dir)
    loader = cfg.get(f'{args.command}_dataloader')
    set_threads(loader.get('num_workers', 0) if isinstance(loader, dict) else 0)
    runner = RUNNERS.build(cfg)
    if args.command == 'train':
        runner.train()
    else:
        runner.test()
    return ''


def verify(path: str) -> Iterator[str]:
    """Compare a checkpoint, or all in a folder, with their checksums; gives a line for each.

    Raises:
        ConfigError: When there is none.
        DamagedError: After the last line, when one is damaged.
    """
    suffixes = ('.pth', SUFFIX, '.safetensors')
    found = [Path(path)]
    if Path(path).is_dir() and not is_sharded(path):
        found = sorted(file for file in Path(path).iterdir() if file.suffix in suffixes)
    else:
        _check_exists(path, 'PATH')
    if not found:
        raise ConfigError(f'PATH: there is no checkpoint ({", ".join(suffixes)}) in {path}')
    damaged = 0
    for checkpoint in found:
        try:
            yield f'{checkpoint}: {"whole" if compare_checksums(checkpoint) else "no checksum"}'
        except DamagedError as error:
            damaged += 1
            yield f'{checkpoint}: damaged ({error})'
    if damaged:
        raise DamagedError(f'{damaged} of {len(found)} checkpoint(s) damaged')


def replay(args: argparse.Namespace) -> str:
    """Carry out again a step that was not finite; what was found, on rank 0.

    The config, which is code, is the one beside the file unless another one is named.
    """
    from memengine.engine.faults.capture import CONFIG
    from memengine.engine.faults.replay import replay as replay_step

    cfg = load_config(args.config or Path(args.file).with_name(CONFIG), args.cfg_options)
    cfg.setdefault('default_scope', 'memengine')
    if args.launcher is not None:
        cfg.launcher = args.launcher
    set_threads(0)
    findings = replay_step(args.file, cfg)
    return '\n'.join(map(str, findings)) if get_rank() == 0 else ''


def _check_exists(checkpoint: str, option: str, or_run: bool = False) -> None:
    """Refuse a checkpoint, or the folder of a run where one may stand for it, that is not there."""
    is_file = os.path.isfile(os.path.expanduser(checkpoint))  # as MMEngine does
    is_there = is_file or (or_run or is_sharded(checkpoint)) and os.path.isdir(checkpoint)
    if '://' not in checkpoint and not is_there:
        like = similar_files(checkpoint, ('*.pth', '*.dcp', '*.safetensors'))
        advice = '; name a checkpoint, or the folder of a run' if or_run and not like else ''
        raise ConfigError(f'{option}: there is no checkpoint {checkpoint}{like or advice}')


def _make_work_dir(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
        reason = None if os.access(path, os.W_OK) else 'it may not be written to'
    except OSError as error:
        reason = 'there is a file' if os.path.isfile(path) else error.strerror
    if reason is not None:
        raise ConfigError(
            f'work_dir: {path} cannot be the folder of a run: {reason}; name another by --work-dir '
            'or work_dir'
        )


def _ranks(args: argparse.Namespace) -> int:
    """How many processes a plan or a prediction is for."""
    return getattr(args, 'gpus', 1) * getattr(args, 'nodes', 1)


def _set_launcher(cfg: Config, launcher: str | None) -> None:
    if launcher is not None:
        cfg.launcher = launcher
    ranks = int(os.environ.get('WORLD_SIZE', 1))
    if cfg.get('launcher', 'none') == 'none' and ranks > 1:
        raise ConfigError(
            f'--launcher: {ranks} processes were started (WORLD_SIZE={ranks}), each of which would '
            'train by itself into the same folder; add --launcher pytorch'
        )


def _set_train_options(cfg: Config, args: argparse.Namespace) -> None:
    if args.seed is not None or args.deterministic:
        randomness = {'seed': None, **(cfg.get('randomness') or {})}
        if args.seed is not None:
            randomness['seed'] = args.seed
        if args.deterministic:
            randomness['deterministic'] = True
            os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')  # cuBLAS asks for it
        cfg.randomness = randomness
    if args.max_iters is not None:
        if args.max_iters < 1:
            raise ConfigError(f'--max-iters must be at least 1, got {args.max_iters}')
        _stop_after(cfg, args.max_iters)
    if args.amp is not None:
        _set_amp(cfg, args.amp)
    if args.track:
        track(cfg, args.track)
    if args.resume in (True, 'auto'):
        _resume_latest(cfg)
    elif args.resume is not None:
        _check_exists(args.resume, '--resume', or_run=True)
        cfg.resume, cfg.load_from = True, args.resume
    if load_from := cfg.get('load_from'):
        path = load_from['path'] if isinstance(load_from, dict) else load_from
        _check_exists(str(path), 'load_from', or_run=True)


def _stop_after(cfg: Config, iterations: int) -> None:
    """Have the training loop stop, or a hook for a loop of another package that takes no number."""
    loop = cfg.get('train_cfg')
    if not isinstance(loop, dict):
        return
    kind = loop.get('type', 'EpochBasedTrainLoop')
    found = find_type('LOOPS', kind, cfg.default_scope) if isinstance(kind, str) else kind
    if found is None or 'stop_at_iter' in arguments_of(found).names:
        loop['stop_at_iter'] = iterations
    else:
        hook = dict(type='StopAfterHook', iterations=iterations)
        cfg.custom_hooks = [*(cfg.get('custom_hooks') or ()), hook]


def _resume_latest(cfg: Config) -> None:
    """Go on from the work dir; what ``load_from`` names is for the first start only."""
    cfg.resume = True
    if cfg.get('load_from') is not None:
        if find_latest(cfg.work_dir) is not None:
            cfg.load_from = None
        else:
            cfg.resume = False


def _set_amp(cfg: Config, amp: str) -> None:
    """Set mixed precision on the optimiser wrapper, or on each of several."""
    wrapper = cfg.get('optim_wrapper')
    if not isinstance(wrapper, dict):
        raise ConfigError('--amp: the config has no optim_wrapper to set it on')
    several = [value for value in wrapper.values() if isinstance(value, dict)]
    for one in [wrapper] if 'optimizer' in wrapper else several:
        kind = one.get('type', 'OptimWrapper')
        found = kind
        if isinstance(kind, str):
            found = find_type('OPTIM_WRAPPERS', kind, cfg.default_scope)
        taken = arguments_of(found).names if found is not None else frozenset({'dtype'})
        if 'precision' in taken:
            one['precision'] = amp
        elif 'dtype' in taken:
            one['dtype'] = _DTYPE[amp]
        elif getattr(found, '__name__', '') == 'OptimWrapper':
            one['type'], one['dtype'] = 'AmpOptimWrapper', _DTYPE[amp]
        else:
            name = getattr(kind, '__name__', kind)
            raise ConfigError(
                f"--amp: optim_wrapper.type='{name}' takes neither precision nor dtype; leave "
                '--amp out, or use OptimWrapper'
            )
