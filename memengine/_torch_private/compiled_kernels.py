"""Kernels compiled on the spot, used where they have been seen to agree with what they stand for.

Triton comes with torch's builds for CUDA, on Linux, and is imported by the kernels' modules alone;
on a CPU a compiler of C may be there. Which kernels they compile rightly depends on their version,
the driver and the device, so nobody is asked: they are tried on a small case on the device itself.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

_agreed: dict[tuple[str, torch.device, torch.dtype, tuple[Any, ...]], Any] = {}
_given_up: set[tuple[str, torch.device]] = set()
_is_off = False


def proven_kernels(
    module: str, tensor: Tensor, *variant: Any, on: Literal['cuda', 'cpu'] = 'cuda'
) -> Any | None:
    """The module of kernels to use for a tensor, or None: then the eager form is to be used.

    Before it is given for the first time in a process, for a device, dtype and variant, its
    ``compare_with_eager(like, *variant)`` runs both forms on a small case that lies where the
    tensor `like` does, and raises where they do not agree. After any error the module is not used
    on that device any more: that is warned of, once.

    Args:
        module: Its name; it is imported here.
        tensor: What the kernels are to read.
        variant: What they are compiled for besides its dtype.
        on: The type of device for which they are made.

    While a CUDA graph is captured none proves itself, which would wait for the device: the graph
    has the eager form, unless that was done before.

    Raises:
        torch.OutOfMemoryError: When the small case does not fit; it is tried again next time.

    Cost: a microsecond; the first time seconds, in which a compiler runs, and a wait for the
    device. No generator is drawn from.
    """
    if _is_off or not _can_be_read(tensor, on) or (module, tensor.device) in _given_up:
        return None
    key = module, tensor.device, tensor.dtype, variant
    if key in _agreed:
        return _agreed[key]
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    try:
        kernels = importlib.import_module(module)
        kernels.compare_with_eager(tensor, *variant)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers and drivers raise what they like
        _given_up.add((module, tensor.device))
        reason = f'{type(error).__name__}: {next(iter(str(error).splitlines()), "")}'
        warnings.warn(
            f'the kernels of {module} are not used on {tensor.device} ({reason}); the same is '
            "computed by torch's own operations, in more steps and with no other difference",
            stacklevel=2,
        )
        return None
    _agreed[key] = kernels
    return kernels


def given_up_on(device: torch.device) -> list[str]:
    """Names of modules that are not used on a device since they erred there."""
    return sorted(module for module, where in _given_up if where == device)


@contextmanager
def without_kernels() -> Iterator[None]:
    """Compute by torch's own operations in the block, to compare with them."""
    global _is_off
    before, _is_off = _is_off, True
    try:
        yield
    finally:
        _is_off = before


def _can_be_read(tensor: Tensor, on: str) -> bool:
    """Whether it lies on such a device, and is no stand-in such as a fake tensor."""
    return type(tensor) is Tensor and (tensor.is_cpu if on == 'cpu' else tensor.is_cuda)
