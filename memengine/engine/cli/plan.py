"""``memengine plan``: what to switch on so that a config's training step fits a budget."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mmengine.config import Config
from mmengine.device import get_device
from mmengine.dist import get_world_size
from mmengine.logging import MMLogger

from memengine.engine.config.before_torch.sizes import parse_bytes, parse_fit
from memengine.engine.config.check import ConfigError
from memengine.engine.config.file import merge_options
from memengine.engine.config.planning import Planner, budget_for, usable_bytes
from memengine.memory import UnpredictableError
from memengine.memory.planning import Cost, Found, Tried, rates_of

__all__ = ['plan_step']

_MIB = 2**20


def plan_step(cfg: Config, args: argparse.Namespace) -> str:
    """The plan that the command line asks for.

    Raises:
        ConfigError: When nothing fits, with what would.
    """
    MMLogger.get_current_instance().setLevel('ERROR')  # a prediction says what a run says once
    try:
        planner, found = _found(cfg, args)
    except UnpredictableError as error:
        return _as_measured(cfg, args, error)
    if args.plot is not None:
        _draw(planner, found, args.plot)
    if found.chosen is None:
        raise ConfigError(nothing_fits(planner, found, args.budget))
    options = planner.options(found.chosen.plan)
    if args.batch is not None or args.max_batch:
        size = planner.cfg.train_dataloader.batch_size
        options = {'train_dataloader.batch_size': size, **options}
    if args.write is not None:
        merge_options(cfg, options)
        cfg.dump(args.write)
    if args.json:
        return json.dumps({'options': options, 'limit_bytes': found.limit_bytes} | _figures(found))
    return '\n'.join(_report(planner, found, options, args))


def _found(cfg: Config, args: argparse.Namespace) -> tuple[Planner, Found]:
    """What is asked for."""
    option = '--budget' if args.budget is not None else '--fit'
    try:
        asked = parse_fit(args.fit) if args.budget is None else parse_bytes(args.budget)
    except ValueError as error:
        raise ConfigError(f'{option}: {error}') from error
    if args.batch is not None:
        merge_options(cfg, {'train_dataloader.batch_size': _of_a_rank(args.batch)})
    planner = Planner(cfg, args.allow)
    if args.budget is None:
        if args.max_batch:
            raise ConfigError('--max-batch: the largest batch is that of a --budget, not of --fit')
        return planner, planner.fitting(asked)
    if args.max_batch:
        planner = planner.largest(int(asked))
    return planner, planner.find(int(asked))


def _of_a_rank(batch: int) -> int:
    """How much of a batch each process has."""
    ranks = get_world_size()
    if batch % ranks:
        raise ConfigError(f'--batch={batch} cannot be shared out among {ranks} processes alike')
    return batch // ranks


def _as_measured(cfg: Config, args: argparse.Namespace, error: UnpredictableError) -> str:
    """Whether a step that cannot be predicted fits as it is: real ones are measured.

    Raises:
        ConfigError: When it does not fit, or what is asked for takes predictions.
    """
    for option, value in (
        ('--gpus', args.gpus > 1),
        ('--nodes', args.nodes > 1),
        ('--fit', args.fit),
        ('--max-batch', args.max_batch),
        ('--plot', args.plot),
    ):
        if value not in (None, False):
            raise ConfigError(f'{option} takes predictions, and {error}')
    budget = parse_bytes(args.budget)
    limit, peak = usable_bytes(budget), measured_bytes(cfg)
    figures = f'{_mib(peak).strip()} at the peak, measured in a process on this machine'
    if peak > limit:
        needed = _mib(budget_for(peak) + _MIB // 10).strip()
        raise ConfigError(
            f'{args.budget} is too little: {figures}; the smallest budget for that is {needed}. '
            'Nothing was tried to make it smaller, as the step cannot be predicted; switch on what '
            '"memengine techniques" offers, and plan again'
        )
    options = {} if args.batch is None else {'train_dataloader.batch_size': args.batch}
    if args.write is not None:
        cfg.dump(args.write)
    if args.json:
        return json.dumps({'options': options, 'limit_bytes': limit, 'measured_bytes': peak})
    why = str(error).partition('; measure')[0]
    return (
        f'{figures}: {peak / budget:.1%} of {args.budget}\n\n{_command(args, options)}\n\n'
        f'the step fits as it is; it was measured because {why}'
    )


def measured_bytes(cfg: Config) -> int:
    """The peak of a config's training step, by ``memengine measure`` in a process of its own."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / 'config.py'
        cfg.dump(file)
        command = [sys.executable, '-m', 'memengine', 'measure', str(file), '--json']
        paths = os.pathsep.join(path for path in sys.path if path)  # also the config's own modules
        ran = subprocess.run(
            command, env=os.environ | {'PYTHONPATH': paths}, capture_output=True, text=True
        )
    if ran.returncode:
        raise ConfigError(f'the step could not be measured: {ran.stderr.strip()}')
    return json.loads(ran.stdout.splitlines()[-1])['peak_bytes']


def _draw(planner: Planner, found: Found, path: str) -> None:
    from memengine.visualization.memory import draw_plans

    def labelled(some: Iterable[Tried]) -> Iterator[tuple[float, int, str]]:
        for one in some:
            label = ' '.join(f'{name}={level}' for name, level in one.plan.items())
            yield one.seconds / found.plain.seconds, one.cost.peak_bytes, label or 'as it is'

    draw_plans([*labelled(found.tried)], [*labelled(found.front)], found.limit_bytes, path)


def _figures(found: Found) -> dict[str, Any]:
    assert found.chosen is not None
    tried = [
        asdict(replace(one.cost, phases={})) | {'plan': dict(one.plan), 'seconds': one.seconds}
        for one in found.tried
    ]
    return {'chosen': found.tried.index(found.chosen), 'tried': tried}


def _report(
    planner: Planner, found: Found, options: Mapping[str, Any], args: argparse.Namespace
) -> Iterator[str]:
    chosen, plain, rates = found.chosen, found.plain, rates_of(get_device())
    assert chosen is not None
    cost = chosen.cost
    size = planner.cfg.train_dataloader.batch_size
    if args.budget is not None:
        share = cost.peak_bytes / parse_bytes(args.budget)
        what_for = (
            f'{share:.1%} of {args.budget}, of which {_mib(found.limit_bytes).strip()} may be '
            'planned for'
        )
    else:
        what_for = (
            f'--fit {args.fit}; as it is, the step takes {_mib(plain.cost.peak_bytes).strip()}'
        )
    yield f'{_mib(cost.peak_bytes)} at the peak, {cost.how}: {what_for}'
    if args.max_batch:
        whole = size * get_world_size()
        yield f'{whole:9}     images or pairs in a batch: the largest that fits, to a thirty-second'
    yield ''
    yield _command(args, options)
    yield ''
    yield from (f'{_mib(nbytes)}  {name}' for name, nbytes in cost.by_category.items())
    yield ''
    if chosen is plain:
        yield 'the step fits as it is: nothing has to be switched on'
    else:
        yield (
            f'{_more(cost.flops, plain.cost.flops)} FLOPs, '
            f'{_more(cost.moved_bytes, plain.cost.moved_bytes)} bytes moved, '
            f'{_offloaded(cost)}'
            f'{_more(cost.operators, plain.cost.operators)} operators; expected time '
            f'{_times(chosen, plain)} that of the step as it is: counted, and weighed by round '
            f'figures of {rates.name}, not measured'
        )
        yield from _others(planner, found)
    if planner.caution:
        yield planner.caution
    yield from _left_out(planner)


def _left_out(planner: Planner) -> Iterator[str]:
    names_of: dict[str, list[str]] = {}
    for name, why in planner.left_out.items():
        names_of.setdefault(why, []).append(name)
    for why, (name, *others) in names_of.items():
        more = f' (and {len(others)} other{"s" * (len(others) > 1)})' if others else ''
        yield f'left out: {name}{more}: {why}'


def _command(args: argparse.Namespace, options: Mapping[str, Any]) -> str:
    """What trains with a plan, and with what the command line has set beside it."""
    line = said({**(args.cfg_options or {}), **options})
    start, launcher = 'memengine', ''
    if get_world_size() > 1:
        nodes = f'--nnodes {args.nodes} ' if args.nodes > 1 else ''
        start = f'torchrun {nodes}--nproc_per_node {args.gpus} -m memengine'
        launcher = ' --launcher pytorch'
    return f'{start} train {args.config}{launcher}{f" --cfg-options {line}" if line else ""}'


def _others(planner: Planner, found: Found) -> Iterator[str]:
    if faster := found.next_faster:
        lacking = faster.cost.peak_bytes - found.limit_bytes
        yield (
            f'next faster: {said(planner.options(faster.plan)) or "the step as it is"}: '
            f'{_times(faster, found.plain)}, does not fit by {_mib(lacking).strip()}'
        )
    yield ''
    yield f'plans that no other beats in both, of {len(found.tried)} that were tried:'
    for one in found.front:
        options = said(planner.options(one.plan)) or '(as it is)'
        yield f'{_mib(one.cost.peak_bytes)}  {_times(one, found.plain)}  {options}'


def nothing_fits(planner: Planner, found: Found, budget: str) -> str:
    """What is said when nothing fits."""
    leanest = found.leanest
    needed = _mib(budget_for(leanest.cost.peak_bytes) + _MIB // 10)  # as it is rounded
    options = said(planner.options(leanest.plan)) or 'nothing switched on'
    problem = (
        f'nothing fits {budget}: the smallest budget that would is {needed.strip()} '
        f'({leanest.cost.how}), with {options} at {_times(leanest, found.plain)} the time; a '
        'smaller train_dataloader.batch_size or model takes less'
    )
    return '\n  '.join([problem, *_left_out(planner)])


def said(options: Mapping[str, Any]) -> str:
    """Options as the command line takes them."""
    return ' '.join(shlex.quote(f'{key}={value}') for key, value in options.items())


def _mib(nbytes: int) -> str:
    return f'{nbytes / _MIB:9.1f} MiB'


def _more(now: int, before: int) -> str:
    return f'{now / before - 1:+.1%}'


def _offloaded(cost: Cost) -> str:
    if not cost.offloaded_bytes:
        return ''
    return f'{_mib(cost.offloaded_bytes).strip()} to the host or to files and back, '


def _times(one: Tried, plain: Tried) -> str:
    return f'{one.seconds / plain.seconds:.2f} ×'
