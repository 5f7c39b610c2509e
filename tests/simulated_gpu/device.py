"""Tests on the simulated device: ``python -m pytest -p tests.simulated_gpu.device -m gpu``.

Loaded before torch, whose CUDA build then finds the simulated runtime in the place of NVIDIA's.
"""

from __future__ import annotations

import collections
import ctypes
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.simulated_gpu.build import DRIVER, RUNTIME, build, why_not

MIB = 2**20
REASON = why_not()
LIBRARIES = None if REASON else build()
if LIBRARIES is not None:
    _runtime_is_first = RUNTIME in os.environ.get('LD_PRELOAD', '')
    assert _runtime_is_first or 'torch' not in sys.modules, 'torch was imported before'
    _driver = ctypes.CDLL(str(LIBRARIES / DRIVER), ctypes.RTLD_GLOBAL)
    _runtime = ctypes.CDLL(str(LIBRARIES / RUNTIME), ctypes.RTLD_GLOBAL)

import torch  # noqa: E402 (the simulated runtime comes first)

ROOT = Path(__file__).parents[2]
_MEMORY_MIB = 4096
# Torch's own code for the device runs here: metadata, allocations and transfers.
_KEPT = set(
    'empty.memory_format empty_strided _efficientzerotensor as_strided view view.dtype unfold '  # noqa: SIM905
    'alias _reshape_alias view_as_real view_as_complex set_ set_.source_Tensor '
    'set_.source_Storage set_.source_Storage_storage_offset set_data is_set_to resize_ '
    'resize_as_ record_stream _local_scalar_dense _pin_memory is_pinned lift_fresh '
    '_has_same_storage_numel copy_ native_dropout _fused_rms_norm_backward '
    '_fused_sdp_choice'.split()
)
_WITH_KERNELS_INSIDE = ['ldexp.Tensor', 'ldexp.out']  # of no device, but what they call is
_WITHOUT_CPU_KERNELS = (
    *('sparse', 'nested', 'cudnn', 'miopen', '_cufft', '_flash', '_efficient', 'quantized'),
    *('mkldnn', '_cslt'),
)


def _install() -> Any:
    """Let the CPU's kernels stand in for all of CUDA's, but those of libraries."""
    sys.path.insert(0, str(LIBRARIES))
    import kernels

    sys.path.remove(str(LIBRARIES))
    registered = torch._C._dispatch_get_registrations_for_dispatch_key('CUDA')
    names = [name.removeprefix('aten::') for name in registered if name.startswith('aten::')]
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # that each overrides one
        kernels.install(
            ['convolution', 'convolution_backward', *_WITH_KERNELS_INSIDE]
            + [
                name
                for name in names
                if name not in _KEPT and not any(part in name for part in _WITHOUT_CPU_KERNELS)
            ]
        )
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    return kernels


_kernels = _install() if LIBRARIES else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if REASON is not None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=REASON))


@dataclass
class Counts:
    """What a device would have been asked for.

    Attributes:
        kernels: Operations by name; one is at least one kernel of a GPU.
        waits: How often the host waited for the device, by the line of this repository that is
            the innermost when it did; ``'backward'`` for autograd's thread.
        retries: How often the allocator gave its cache back to find room.
        peak_reserved_mib: What it had taken from the device, at most.
    """

    kernels: collections.Counter[str] = field(default_factory=collections.Counter)
    waits: collections.Counter[str] = field(default_factory=collections.Counter)
    retries: int = 0
    peak_reserved_mib: float = 0.0


@contextmanager
def counted() -> Iterator[Counts]:
    """Count what the block asks of the device; the counts are whole when it ends."""
    counts = Counts()

    def note(message: Any, *_: Any, **__: Any) -> None:
        if 'called a synchronizing' in str(message):
            counts.waits[_line_of_ours()] += 1

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    retries = torch.cuda.memory_stats()['num_alloc_retries']
    before = collections.Counter(_kernels.kernel_counts())
    with warnings.catch_warnings():
        warnings.simplefilter('always')
        warnings.showwarning = note  # put back with the filters
        torch.cuda.set_sync_debug_mode('warn')
        try:
            yield counts
        finally:
            torch.cuda.set_sync_debug_mode('default')
    counts.kernels = collections.Counter(_kernels.kernel_counts()) - before
    stats = torch.cuda.memory_stats()
    counts.retries = stats['num_alloc_retries'] - retries
    counts.peak_reserved_mib = stats['reserved_bytes.all.peak'] / MIB


def _line_of_ours() -> str:
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and path != Path(__file__):
            return f'{path.relative_to(ROOT)}:{frame.lineno}'
    return 'backward'


@contextmanager
def memory(mib: int) -> Iterator[None]:
    """Give the device so much memory in the block."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    _runtime.simulated_set_memory(ctypes.c_size_t(mib * MIB))
    try:
        yield
    finally:
        _runtime.simulated_set_memory(ctypes.c_size_t(_MEMORY_MIB * MIB))


@contextmanager
def host_running_ahead() -> Iterator[None]:
    """Let the host know that something is done only when it has waited for it: the worst case."""
    torch.cuda.synchronize()
    _runtime.simulated_set_host_runs_ahead(1)
    try:
        yield
    finally:
        _runtime.simulated_set_host_runs_ahead(0)


@contextmanager
def refusing(number: int) -> Iterator[None]:
    """Let the block's ``number``-th tensor on the device run out of memory, counted from 1."""
    _kernels.refuse_allocation(number)
    try:
        yield
    finally:
        _kernels.refuse_allocation(0)


def allocations() -> int:
    """Tensors that were made on the device since :func:`refusing` was last entered or left."""
    return _kernels.allocations()
