"""Values for parameters that a model was built without (on the ``meta`` device), module by module.

So that a model which no process could hold is built, one part of it at a time being there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ['materialize']


@torch.no_grad()
def materialize(
    module: nn.Module,
    device: torch.device,
    init_fn: Callable[[nn.Module], Any] | None = None,
    ready: Collection[Tensor] = (),
) -> None:
    """Bring a module onto the device, with rank 0's values on all ranks, in place.

    Args:
        module: Holds parameters and buffers on any device, ``meta`` included.
        device: Where they go.
        init_fn: ``init_fn(module)`` gives values to a module's own tensors that were on ``meta``,
            after its ``reset_parameters()`` (or ``_reset_parameters()``) if it has that.
        ready: Tensors that are left as they are.

    Raises:
        ValueError: When tensors on ``meta`` are given no value; they are named.

    Cost: memory for the tensors themselves, and each of them on the wire once.
    """
    done = {id(tensor) for tensor in ready}
    missing: list[str] = []
    for name, part in module.named_modules():
        own = [t for t in _own(part) if id(t) not in done]
        if any(tensor.is_meta for tensor in own):
            missing += [f'{name}.{key}' if name else key for key in _fill(part, device, init_fn)]
        for tensor in _own(part):
            if id(tensor) not in done:
                tensor.data = tensor.data.to(device)
                if dist.is_initialized() and not tensor.is_meta:
                    dist.broadcast(tensor.data, 0)
                done.add(id(tensor))
    if missing:
        raise ValueError(
            f'{len(missing)} tensors of {type(module).__name__} were built on the meta device and '
            f'nothing gives them a value: {", ".join(missing[:5])}; pass init_fn, or give their '
            'modules a method reset_parameters()'
        )


def _own(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _fill(
    module: nn.Module, device: torch.device, init_fn: Callable[[nn.Module], Any] | None
) -> list[str]:
    """Give values to a module's own tensors; names of those that got none."""
    module.to_empty(device=device, recurse=False)
    tensors: dict[str, Tensor] = dict(module.named_parameters(recurse=False))
    tensors.update(module.named_buffers(recurse=False))
    floating = {key: t for key, t in tensors.items() if t.is_floating_point()}
    for tensor in floating.values():
        tensor.fill_(torch.nan)
    inits: list[Any] = [getattr(module, n, None) for n in ('reset_parameters', '_reset_parameters')]
    used = [init for init in inits if init is not None][:1]
    for init in used:
        init()
    if init_fn is not None:
        init_fn(module)
    elif not used:
        return list(tensors)
    return [key for key, tensor in floating.items() if bool(tensor.isnan().any())]
