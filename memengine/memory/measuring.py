"""What a training step really takes of a process, by the kernel's count, or of a GPU."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from memengine._torch_private.allocator import allocations_recorded
from memengine.memory.training_step import TrainingStep

__all__ = ['Measured', 'map_blocks_singly', 'measure', 'write_snapshot']

SINGLE_BLOCK = 64 * 2**10
"""Bytes from which on a block is mapped by itself, and so given back when it is freed."""

_STATUS = Path('/proc/self/status')
_RESET_PEAK = Path('/proc/self/clear_refs'), '5'
# Of glibc's malloc.h, and of malloc.c: a bit of the size that stands before a block.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4
_IS_MAPPED = 2


@dataclass(frozen=True)
class Measured:
    """Bytes beyond those that were taken before the model was there.

    Attributes:
        peak_bytes: The most at once during a step.
        held_bytes: Between steps: parameters, optimiser's state, batch, and what libraries keep.
        reserved_bytes: On a GPU the most that torch's allocator had taken of it, with what was
            there before the model; else None.
    """

    peak_bytes: int
    held_bytes: int
    reserved_bytes: int | None = None


def map_blocks_singly() -> None:
    """Have the C library map large blocks one by one, so that freed ones are the kernel's again.

    Else the process keeps what was freed, and its high-water mark says what the allocator did with
    a step and not what the step needs. What is free between small blocks is taken, so that no large
    one comes to lie there. For the process's whole life; it makes allocating slower.

    Raises:
        OSError: On a system without glibc's ``mallopt``.
    """
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None) if sys.platform == 'linux' else None
    if mallopt is None:
        raise OSError(
            'memory of the CPU is measured by Linux and glibc only; predict it instead, or measure '
            'on a GPU'
        )
    mallopt(_M_MMAP_THRESHOLD, SINGLE_BLOCK)
    mallopt(_M_MMAP_MAX, 2**30)
    mallopt(_M_TRIM_THRESHOLD, 0)
    mallopt(_M_TOP_PAD, 0)
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before this is the kernel's, too
    _fill_holes()


def _fill_holes() -> None:
    """Take, untouched, what lies free between small blocks and is as large as a large one.

    The C library looks there before it maps a block, and cannot give such a block back.
    """
    malloc = ctypes.CDLL('libc.so.6').malloc  # also where another library's is in its place
    malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    size_of = ctypes.sizeof(ctypes.c_size_t)
    while not ctypes.c_size_t.from_address(malloc(SINGLE_BLOCK) - size_of).value & _IS_MAPPED:
        pass


def measure(
    build: Callable[[], TrainingStep], device: torch.device | str = 'cpu', steps: int = 3
) -> Measured:
    """Carry out real steps and ask the kernel, or torch's allocator of a GPU, for their peak.

    It is to be called in a process that does nothing else; threads of others count, too. On a CPU
    what is not backed by a file is counted (programs are), after :func:`map_blocks_singly`.

    Args:
        build: Makes the model, its optimiser and the batch. What it imports or reads in the first
            call of the process counts: carry it out before, by :func:`memengine.memory.predict`.
        device: Where the step computes.
        steps: Of which the last counts, when the optimiser has its state.

    Raises:
        OSError: As :func:`map_blocks_singly`; where the kernel resets no high-water mark.
    """
    device = torch.device(device)
    if device.type == 'cuda':
        return _measure_on_gpu(build, device, steps)
    gc.collect()
    map_blocks_singly()
    before = _kib('RssAnon')
    step = build()
    for _ in range(steps - 1):
        step.run()
    map_blocks_singly()  # the first steps have left holes of their own
    file, value = _RESET_PEAK
    file.write_text(value)
    held = _kib('RssAnon')
    step.run()
    not_anonymous = _kib('RssFile') + _kib('RssShmem')
    return Measured(1024 * (_kib('VmHWM') - not_anonymous - before), 1024 * (held - before))


def _measure_on_gpu(
    build: Callable[[], TrainingStep], device: torch.device, steps: int
) -> Measured:
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    step = build()
    for _ in range(steps - 1):
        step.run()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    step.run()
    torch.cuda.synchronize(device)
    return Measured(
        torch.cuda.max_memory_allocated(device) - before,
        held - before,
        torch.cuda.max_memory_reserved(device),
    )


def write_snapshot(build: Callable[[], TrainingStep], path: str | Path) -> Path:
    """Write torch's own record of a step's allocations on a GPU.

    Args:
        build: Makes the model, its optimiser and the batch, on a GPU.
        path: The file, which https://pytorch.org/memory_viz shows; folders are made.

    Returns:
        The path.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    step = build()
    step.run()  # which makes the optimiser's state
    with allocations_recorded(path):
        step.run()
    return path


def _kib(field: str) -> int:
    """A line of the kernel's account of this process."""
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(':')
        if name == field:
            return int(value.split()[0])
    raise OSError(f'{_STATUS} has no {field}: memory of the CPU is measured on Linux only')
