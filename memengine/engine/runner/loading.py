"""What a run begins with: weights, a checkpoint to go on from, the last one to go back to."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from mmengine.hooks import EMAHook

from memengine.engine.checkpoint.checksums import verify
from memengine.engine.checkpoint.files import CheckpointError, DamagedError
from memengine.engine.checkpoint.latest import checkpoint_of, is_run, newest_first
from memengine.engine.checkpoint.state import ShardLayout, check_resumable, read_checkpoint
from memengine.engine.checkpoint.weights import (
    advise,
    load_from_options,
    load_weights,
    only_matching_part,
    select,
)
from memengine.engine.distributed.processes import cpu_group, do_on_all_ranks
from memengine.engine.runner.changed_settings import param_groups, settings_of_groups
from memengine.engine.step import unwrap

DDP_PREFIX = (r'^module\.', '')
"""What torch's DDP puts before names, as ``load_checkpoint`` takes it away."""


def load(
    runner: Any,
    filename: str,
    map_location: str | Callable[..., Any],
    strict: bool,
    revise_keys: Sequence[tuple[str, str]],
    part: str,
    into: str | None,
    is_resumed: bool,
    may_choose: bool,
) -> dict[str, Any]:
    """Load a checkpoint into a run: its weights or, to go on from it, all of it.

    Args:
        runner: The run, whose ``load_checkpoint`` says what the others are, and what is raised.
        is_resumed: Whether it is gone on from: it must match, and be all of a run.
        may_choose: Whether the one part that fits may be taken, where no name fits as it is.
    """
    named_part, model = bool(part or into), unwrap(runner.model)
    if 'module' in dict(model.named_children()):  # its own, and not what DDP puts before names
        revise_keys = [pair for pair in revise_keys if tuple(pair) != DDP_PREFIX]
    filename = checkpoint_of(filename)
    into = part if into is None else into
    moved = (rf'^{re.escape(part)}\.' if part else '^', f'{into}.' if into else '')
    optim_wrapper = runner.optim_wrapper if is_resumed else None
    layout = ShardLayout(runner.model, optim_wrapper, [*revise_keys, moved])
    trusted = runner.cfg.get('trusted_globals', ())
    _verify(runner, filename)
    checkpoint = read_checkpoint(filename, trusted, layout, is_resumed, map_location)
    if not all(isinstance(checkpoint.get(key), dict) for key in ('meta', 'state_dict')):
        raise CheckpointError(f'{filename} is no checkpoint: it has no dicts meta, state_dict')
    checkpoint['meta'].pop('config', None)  # MMEngine would run it as a config, which is code
    if is_resumed:
        check_resumable(runner, checkpoint, filename)
    names = list(select(checkpoint['state_dict'], revise_keys, '', ''))
    may_choose = may_choose and not (is_resumed or named_part)
    if may_choose and (reading := only_matching_part(model, names)):
        return load(
            runner, filename, map_location, strict, revise_keys, *reading, is_resumed, False
        )
    checkpoint['state_dict'] = select(checkpoint['state_dict'], revise_keys, part, into)
    runner.call_hook('after_load_checkpoint', checkpoint=checkpoint)
    if is_resumed and _take_own_weights(runner, checkpoint):
        runner.logger.warning(
            f'{filename} has an average of the weights (EMAHook), which the config does not ask '
            "for any more: the run goes on from the model's own weights, without an average"
        )
    try:
        left = load_weights(model, checkpoint['state_dict'], filename, into, strict or is_resumed)
    except CheckpointError as error:
        if not may_choose:
            raise
        raise CheckpointError(f'{error}{advise(model, names, filename)}') from error
    which = f', its {part or "weights"} into {into or "the model"}' if part or into else ''
    runner.logger.info(f'Load checkpoint from {filename}{which}')
    if left:
        runner.logger.warning(f'{filename}: {left}')
    return checkpoint


def load_or_resume(runner: Any) -> None:
    """As ``Runner.load_or_resume``, where nothing is loaded yet."""
    if runner._load_from is not None:
        if not runner._resume:
            runner.load_checkpoint(**load_from_options(runner._load_from))
        elif isinstance(runner._load_from, str):
            if not is_run(runner._load_from):
                runner.resume(runner._load_from)
            elif not resume_newest(runner, runner._load_from):
                raise CheckpointError(
                    f'--resume: there is no checkpoint of a run in {runner._load_from}'
                )
        else:
            raise ValueError(
                'resume=True goes on with all of a checkpoint: name it by load_from=PATH, '
                f'not {runner._load_from}'
            )
        runner._has_loaded = True
    elif runner._resume:
        runner._has_loaded = resume_newest(runner, runner.work_dir)
        if not runner._has_loaded:
            runner.logger.info(
                f'No checkpoint to resume in {runner.work_dir}: training starts from scratch.'
            )


def resume_newest(runner: Any, folder: str) -> bool:
    """Go on from the newest checkpoint of a run that is whole.

    Returns:
        Whether there is any.

    Raises:
        CheckpointError: When there are some, and none is whole.
    """
    trusted = runner.cfg.get('trusted_globals', ())
    found = newest_first(folder, trusted, runner.logger.warning) if not runner.rank else ()
    paths, damaged = iter(found), 0
    while path := do_on_all_ranks(lambda: next(paths, None), cpu_group('checkpoint'))[0]:
        try:
            runner.resume(str(path))
            return True
        except DamagedError as error:
            runner.logger.warning(f'{error}; going on from the checkpoint before it')
            damaged += 1
    if damaged:
        raise CheckpointError(
            f'none of the {damaged} checkpoint(s) in {folder} is whole; name another '
            'one with --resume PATH, or remove them to train from scratch'
        )
    return False


def roll_back(runner: Any) -> str | None:
    """As ``Runner.roll_back``."""
    # Rank 0 writes them. The work dir may hold those of a run before, which are not this one's.
    latest = do_on_all_ranks(lambda: runner.last_checkpoint, cpu_group('checkpoint'))[0]
    if latest is None:
        return None
    _verify(runner, latest)
    layout = ShardLayout(runner.model, runner.optim_wrapper, [])
    trusted = runner.cfg.get('trusted_globals', ())
    checkpoint = read_checkpoint(latest, trusted, layout, with_optimizer=True)
    runner.call_hook('before_roll_back', checkpoint=checkpoint)
    _take_own_weights(runner, checkpoint)
    unwrap(runner.model).load_state_dict(checkpoint['state_dict'])
    scheduled = settings_of_groups(runner)
    runner.optim_wrapper.load_state_dict(checkpoint['optimizer'])
    for group, values in zip(param_groups(runner), scheduled, strict=True):
        group.update(values)
    return latest


def _take_own_weights(runner: Any, checkpoint: dict[str, Any]) -> bool:
    """Have a checkpoint's weights be the model's own, where no hook takes the average beside them.

    EMAHook saves the average in place of the weights, and the weights in place of the average.
    Optimiser and schedules go on with the weights.

    Returns:
        Whether the weights were an average.
    """
    own = checkpoint.get('ema_state_dict')
    if own is None or any(isinstance(hook, EMAHook) for hook in runner.hooks):
        return False
    prefix = 'module.'  # of MMEngine's averaged model, which has a count of steps beside it
    found = {k.removeprefix(prefix): v for k, v in own.items() if k.startswith(prefix)}
    checkpoint['state_dict'].update(found)
    return True


def _verify(runner: Any, filename: str) -> None:
    """Compare a checkpoint with its checksum; ranks share the work."""
    if '://' in filename:
        return
    share = slice(runner.rank, None, runner.world_size)
    known = do_on_all_ranks(lambda: verify(filename, share), cpu_group('checkpoint'))
    if not all(known):
        runner.logger.info(f'{filename} has no checksum: it is read as it is')
