"""``memengine measure`` and ``memengine predict``: what a training step of a config takes."""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.logging import MMLogger

from memengine._torch_private.distributed import pretended_ranks
from memengine.engine.config.step_of_config import first_batch, iterations_of, step_of
from memengine.engine.distributed.launchers import read_rank
from memengine.engine.distributed.processes import (
    cpu_group,
    do_on_all_ranks,
    init_process_group,
    use_own_gpu,
)
from memengine.memory import Prediction, UnpredictableError, map_blocks_singly, measure, predict

_MIB = 2**20
_MOST_MODULES = 5


def measure_step(cfg: Config, as_json: bool = False) -> str:
    """What real steps of a config take, beside what was predicted where that can be.

    Of several ranks it is what the one takes that takes most, which the first says.

    To be called in a process of its own: the kernel counts all of it.
    """
    launcher = cfg.get('launcher', 'none')
    is_alone = launcher == 'none'
    ranks = None if is_alone else read_rank(launcher)
    if ranks is not None:
        use_own_gpu(ranks)
    with nullcontext() if ranks is None else pretended_ranks(ranks.world_size):
        step = step_of(cfg, _quietly_loaded(cfg))
        if get_device() == 'cpu':
            map_blocks_singly()
        try:
            predicted: Prediction | None = predict(step)  # which also imports what a step needs
        except UnpredictableError:
            predicted = None
    if not is_alone:
        init_process_group(launcher, (cfg.get('env_cfg') or {}).get('dist_cfg') or {})
    if predicted is None:
        step().run()
    every = do_on_all_ranks(lambda: measure(step, get_device()), cpu_group('measuring'))
    measured = max(every, key=lambda one: one.peak_bytes)
    if not is_alone:
        atexit.register(_end_at_once)
        if dist.get_rank():
            return ''
    figures = asdict(measured) | {'predicted_bytes': predicted and predicted.peak_bytes}
    if as_json:
        return json.dumps(figures)
    how = "the kernel's high-water mark" if measured.reserved_bytes is None else 'the allocator'
    lines = [
        f'{_mib(measured.peak_bytes)} at the peak of a training step, by {how}',
        f'{_mib(measured.held_bytes)} between steps',
    ]
    if measured.reserved_bytes is not None:
        lines.append(f'{_mib(measured.reserved_bytes)} reserved')
    if predicted is not None:
        error = predicted.peak_bytes / measured.peak_bytes - 1
        lines.append(f'{_mib(predicted.peak_bytes)} predicted for a CPU ({error:+.1%})')
    return '\n'.join(lines)


def _end_at_once() -> None:
    """End without the rest of Python's ending, in which gloo's threads now and then abort.

    They outlive ``destroy_process_group``, at least those of a sharded model's group.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def predict_step(cfg: Config, as_json: bool = False) -> str:
    """The predicted peak of a config's training step, by category and module."""
    predicted = predict(step_of(cfg, _quietly_loaded(cfg)))
    if as_json:
        return json.dumps(asdict(predicted))
    modules = {
        name or '(outside of modules)': nbytes for name, nbytes in predicted.by_module.items()
    }
    largest = dict(list(modules.items())[:_MOST_MODULES])
    iterations = iterations_of(cfg)
    of_iterations = f' of {iterations} iterations' if iterations > 1 else ''
    lines = [
        f'{_mib(predicted.peak_bytes)} at the peak of a training step, predicted for a process '
        f'on a CPU; reached in {predicted.at}',
        '',
        *_table(predicted.by_category),
        '',
        f'activations and transients of the peak by module, the largest of {len(modules)}:',
        *_table(largest),
        '',
        f'{predicted.flops / 1e9:.2f} GFLOP a step{of_iterations}',
    ]
    if predicted.guessed:
        lines.append(
            f'{predicted.guessed} number(s) that the step reads are not known before; guessed'
        )
    return '\n'.join(lines)


def _quietly_loaded(cfg: Config) -> Any:
    MMLogger.get_current_instance().setLevel('WARNING')
    return first_batch(cfg)


def _mib(nbytes: int) -> str:
    return f'{nbytes / _MIB:9.1f} MiB'


def _table(rows: Mapping[str, int]) -> Iterable[str]:
    return (f'{_mib(nbytes)}  {name}' for name, nbytes in rows.items())
