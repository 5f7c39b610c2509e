"""What the tests of a technique share: ranks on gloo, and equality of a training step."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from memengine.memory import saved_bytes

__all__ = ['assert_same_step', 'relative_error', 'run_ranks', 'saved_bytes']


# Imported once, by the process that ranks are forked from: it takes longer than most ranks run.
_SHARED_IMPORTS = ['memengine.engine', 'memengine.testing', 'timm', 'torchvision']


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    environment: dict[str, str],
    fn: Callable[..., Any],
    args: tuple,
) -> None:
    os.environ.clear()  # of the first that started ranks
    os.environ.update(environment)
    os.environ['CUDA_VISIBLE_DEVICES'] = ''  # gloo ranks are CPU processes on any machine
    torch.set_num_threads(1)
    dist.init_process_group(
        'gloo', init_method=f'file://{folder}/rendezvous', rank=rank, world_size=world_size
    )
    try:
        result = ('ok', fn(rank, world_size, *args))
    except Exception:  # handed to the parent, which raises it with the rank's name
        result = ('error', traceback.format_exc())
    Path(folder, f'rank{rank}').write_bytes(pickle.dumps(result))
    if result[0] == 'ok':
        # A rank that leaves early breaks the connections of the others. The group itself ends with
        # the process: torch 2.6 sometimes hangs in destroying one of gloo.
        dist.barrier()
        time.sleep(0.3)  # the others may still be in it
        # Without the rest of Python's ending: gloo's threads now and then abort in it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 600.0
) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` on ``world_size`` gloo ranks, one process each.

    The ranks meet through a file, so tests that run at the same time never fight for a port. They
    are forked from a process that has imported torch and this package and done nothing else.

    Args:
        world_size: Number of processes.
        fn: A function at module level (it is pickled).
        *args: Passed on to ``fn``.
        timeout_s: Seconds after which ranks that have not ended are killed.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RuntimeError: When a rank raised (with its traceback), died or ran out of time.
    """
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.get_context('forkserver').set_forkserver_preload(_SHARED_IMPORTS)
        context = mp.start_processes(
            _rank_main,
            (world_size, folder, dict(os.environ), fn, args),
            world_size,
            join=False,
            start_method='forkserver',
        )
        assert context is not None
        failure: str | None = None
        try:
            if not _join(context, timeout_s):
                failure = f'no end after {timeout_s:.0f} s'
        except Exception as error:
            failure = str(error)
        results = []
        for rank in range(world_size):
            path = Path(folder, f'rank{rank}')
            kind, value = (
                pickle.loads(path.read_bytes()) if path.exists() else ('missing', failure or 'died')
            )
            if kind == 'error':
                raise RuntimeError(f'rank {rank} of {world_size} failed:\n{value}')
            results.append((kind, value))
        for rank, (kind, value) in enumerate(results):
            if kind == 'missing' or failure:
                raise RuntimeError(
                    f'rank {rank} of {world_size}: {value if kind != "ok" else failure}'
                )
        return [value for _, value in results]


def _join(context: Any, timeout_s: float) -> bool:
    """Wait for all ranks; when one has failed or time is up, end the others."""
    end = time.monotonic() + timeout_s
    try:
        while time.monotonic() < end:
            if context.join(timeout=1.0):
                return True
        return False
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def relative_error(actual: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """``||actual - expected|| / max(||expected||, least)`` in float64; absolute where that is 0."""
    actual, expected = actual.detach().double(), expected.detach().double()
    difference, scale = (actual - expected).norm().item(), max(expected.norm().item(), least)
    return difference / scale if scale > 0 else difference


def assert_same_step(
    actual: Mapping[str, torch.Tensor | None],
    expected: Mapping[str, torch.Tensor | None],
    tolerance: float = 1e-9,
) -> None:
    """Assert that two steps gave the same tensors (losses, gradients or parameters) by name.

    A gradient that is missing on one side only is a difference, and so is one that is zero. A
    tensor that is zero but for rounding (the gradient of a bias before BatchNorm, say) is compared
    on a millionth of the scale of the largest tensor, as its own digits are noise.

    Args:
        actual: Name to tensor of the step under test; None where there is no gradient.
        expected: The same of the plain step.
        tolerance: Largest relative error (in norm) of any tensor.

    Raises:
        AssertionError: Names every tensor that differs, with its error.
    """
    assert actual.keys() == expected.keys(), (
        f'different names: {sorted(actual.keys() ^ expected.keys())}'
    )
    norms = [want.detach().double().norm().item() for want in expected.values() if want is not None]
    least = 1e-6 * max(norms, default=0.0)
    wrong = []
    for name, want in expected.items():
        got = actual[name]
        if got is None or want is None:
            if got is not want:
                wrong.append(f'{name}: {"missing" if got is None else "unexpected"}')
        elif not (error := relative_error(got, want, least)) <= tolerance:  # also catches NaN
            wrong.append(f'{name}: relative error {error:.3e}')
    assert not wrong, f'{len(wrong)} of {len(expected)} tensors differ: ' + '; '.join(wrong[:20])
