"""No checkpoint holds a NaN: weights and the optimiser's state are looked at before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from mmengine.optim import OptimWrapperDict
from torch import Tensor, nn

from memengine.engine.distributed.processes import cpu_group
from memengine.engine.faults.guard import StepGuard
from memengine.memory.ledger import parts_of


class NonFiniteError(RuntimeError):
    """A loss, a gradient or a weight became NaN or infinite."""


def each_optim_wrapper(optim_wrapper: Any) -> list[Any]:
    """The wrapper itself, or those that a dict of them holds; none of None."""
    if isinstance(optim_wrapper, OptimWrapperDict):
        return list(optim_wrapper.values())
    return [] if optim_wrapper is None else [optim_wrapper]


def guards_of(optim_wrapper: Any) -> list[StepGuard]:
    """What decides about updates while training goes on; none of MMEngine's own wrappers."""
    guards = (getattr(wrapper, 'guard', None) for wrapper in each_optim_wrapper(optim_wrapper))
    return [guard for guard in guards if guard is not None]


def only_refused(optim_wrapper: Any) -> bool:
    """Whether steps were refused since the last checkpoint, and none was carried out."""
    guards = guards_of(optim_wrapper)
    return any(guard.refused for guard in guards) and not any(g.has_updated for g in guards)


def note_failed_checkpoint(optim_wrapper: Any) -> None:
    """What a checkpoint would have held that could not be written is still to be saved."""
    for guard in guards_of(optim_wrapper):
        guard.has_updated = True


def refuse_nonfinite_state(model: nn.Module, optim_wrapper: Any) -> None:
    """Refuse to save weights or an optimiser's state that hold a NaN or an infinity.

    Every rank must call it; all raise if one has to. An infinity in a buffer is let pass, as masks
    hold some on purpose.

    Raises:
        NonFiniteError: Naming the first such tensor.

    Cost: one pass over what the rank holds, one synchronisation, one all-reduce of a number.
    """
    names, flags = [], []
    for name, tensor, is_bad in _saved_tensors(model, optim_wrapper):
        for part in parts_of(tensor):
            if part.is_floating_point() and part.numel():
                names.append(name)
                flags.append(is_bad(part).any())
    bad = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []
    first = next((name for name, flag in zip(names, bad, strict=True) if flag), None)
    if dist.is_initialized():
        found = torch.tensor(float(first is not None))
        dist.all_reduce(found, dist.ReduceOp.MAX, cpu_group('checking what is saved'))
        if found and first is None:
            first = 'a tensor of another rank'
    if first is not None:
        raise NonFiniteError(
            f'{first} is not finite, so no checkpoint is written and training stops; the last '
            'checkpoint is from before. Lower optim_wrapper.optimizer.lr or raise the eps of the '
            'optimiser, then go on with --resume'
        )


def _saved_tensors(
    model: nn.Module, optim_wrapper: Any
) -> Iterator[tuple[str, Tensor, Callable[[Tensor], Tensor]]]:
    """Each tensor with its name and what it must not hold."""
    for name, parameter in model.named_parameters():
        yield f'the parameter {name}', parameter.detach(), _nonfinite
    for name, buffer in model.named_buffers():
        yield f'the buffer {name}', buffer, torch.isnan
    names = {parameter: name for name, parameter in model.named_parameters()}
    for wrapper in each_optim_wrapper(optim_wrapper):
        for parameter, state in wrapper.optimizer.state.items():
            for key, value in state.items() if isinstance(state, Mapping) else ():
                if isinstance(value, Tensor):
                    yield f"the optimiser's {key} of {names.get(parameter)}", value, _nonfinite


def _nonfinite(tensor: Tensor) -> Tensor:
    return ~tensor.isfinite()
