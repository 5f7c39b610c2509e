"""The optimiser's step inside backward: a gradient lives no longer than its parameter's update.

A plain step holds the gradients of all parameters at once, as many bytes as the parameters. Here::

    backward ──► gradient of p whole ──► step of p alone ──► gradient freed ──► backward goes on
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memengine._torch_private.modules import without_step_hooks
from memengine.technique import Settings, Technique

_WITH_FUSED_KERNELS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def check_steps_alone(optimizer: Optimizer) -> None:
    """Refuse optimisers that cannot update one parameter without the others.

    Raises:
        TypeError: When the optimiser does not keep its parameters in ``param_groups``.
        ValueError: When it clips the norm of all gradients together.
    """
    name = type(optimizer).__name__
    if 'param_groups' not in vars(optimizer):
        raise TypeError(
            f'{name} spreads its parameters over optimisers of its own, so it cannot step inside '
            'backward; use AdamW or another optimiser that holds them itself'
        )
    for group in optimizer.param_groups:
        if group.get('max_grad_norm'):
            raise ValueError(
                f'{name}: max_grad_norm={group["max_grad_norm"]} needs all gradients at once, '
                'which a step inside backward never has; set max_grad_norm=None'
            )


def fuse_where_possible(optimizer: Optimizer) -> None:
    """Let torch's Adam, AdamW and SGD update a parameter of a GPU by one kernel, not by ten.

    Nothing is done where ``fused`` or ``foreach`` was chosen, or training has begun. The rounding
    is the fused kernels'.
    """
    if type(optimizer) not in _WITH_FUSED_KERNELS or optimizer.state:
        return
    for group in optimizer.param_groups:
        is_free = group['fused'] is None and group['foreach'] is None
        if is_free and all(p.is_cuda and p.is_floating_point() for p in group['params']):
            group['fused'] = True


@contextmanager
def step_in_backward(
    optimizer: Optimizer,
    before: Callable[[nn.Parameter], Any] | None = None,
    later: Container[nn.Parameter] = (),
) -> Iterator[None]:
    """Backward inside this context updates each parameter once its gradient is whole, and frees it.

    ``optimizer.step()`` goes on being called after it: it runs the optimiser's post hooks and
    updates what has got its gradient elsewhere::

        with step_in_backward(optimizer):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    Args:
        optimizer: Any that updates each parameter by its own gradient and state. Groups, schedules
            and ``state_dict`` are those of the plain step, so a run may go on with or without.
        before: Called with each parameter before its update, e.g. to clip its gradient.
        later: Parameters that are left to ``optimizer.step()``, as their gradients are not whole
            before the end of backward.

    Raises:
        TypeError, ValueError: See :func:`check_steps_alone`.
        RuntimeError: In backward, when a parameter gets a second gradient (accumulation, two
            losses, reentrant checkpointing), or the optimiser turns out to keep state of its whole
            groups.

    Cost: gradients alive at once are those of the largest parameter, or of as many as autograd
    makes in one operation, instead of all. The optimiser runs once per parameter, without its
    multi-tensor kernels; on a GPU ``fused=True`` makes that one kernel each (see
    :func:`fuse_where_possible`). Nothing is computed twice.

    The update is that of the plain step, bit for bit where the optimiser's kernels for one and
    for many tensors are: no parameter is changed before all of its uses are behind backward, a
    shared one not either. The optimiser's own pre hooks run before each parameter's update, when
    only its gradient is there, and again in the final ``step``; post hooks in the latter only.

    Clipping goes into ``before``: behind backward, where no gradient is left,
    ``clip_grad_norm_`` returns 0 and clips nothing, without a word.

    AMP: autocast as always; a gradient scaler needs whole gradients to find overflows, so fp16
    cannot: parameters are updated by scaled gradients, before the scaler's step or update says
    that no inf checks were recorded. DDP's reduction comes after this hook, on gradients that are
    gone: not for DDP, whose buckets hold all gradients anyway. ``fully_shard`` calls these hooks on
    reduced gradients. BatchNorm and random state are not touched. A compiled graph hands its
    gradients over all at once, so fewer are freed early.

    Source: torch.Tensor.register_post_accumulate_grad_hook; Lv et al., Full Parameter Fine-tuning
    for Large Language Models with Limited Resources (2023), who fuse SGD so.
    """
    check_steps_alone(optimizer)
    updated: set[Tensor] = set()
    one_at_a_time = threading.Lock()  # autograd has a thread per device

    def update(group: dict[str, Any], parameter: nn.Parameter) -> None:
        with one_at_a_time:
            if parameter in updated:
                raise RuntimeError(
                    f'a parameter of shape {tuple(parameter.shape)} got a second gradient after '
                    'its update inside backward: run one backward per step, without accumulation '
                    'and with use_reentrant=False, or step after backward'
                )
            updated.add(parameter)
            if before is not None:
                before(parameter)
            _step_alone(optimizer, group, parameter)
            parameter.grad = None

    handles = [
        parameter.register_post_accumulate_grad_hook(partial(update, group))
        for group in optimizer.param_groups
        for parameter in group['params']
        if parameter.requires_grad and parameter not in later
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _step_alone(optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> None:
    """The optimiser's step as if it held this parameter only; without its post hooks."""
    alone = {**group, 'params': [parameter]}
    groups, optimizer.param_groups = optimizer.param_groups, [alone]
    try:
        with without_step_hooks(optimizer):
            optimizer.step()
    finally:
        optimizer.param_groups = groups
    changed = [key for key in alone if key != 'params' and alone[key] is not group.get(key)]
    if changed:
        raise RuntimeError(
            f'{type(optimizer).__name__} keeps state of a whole parameter group '
            f'({", ".join(changed)}), so it cannot step inside backward; step after backward'
        )


TECHNIQUE = Technique(
    key='optimizer_in_backward',
    title='optimiser step in backward',
    settings=Settings,
    switch='optim_wrapper.type=OptimizerInBackwardOptimWrapper',
    call='memengine.techniques.step_in_backward',
    conflicts={
        'accumulation_over_iterations': 'accumulation adds up gradients of several iterations, but '
        "in backward none outlives its update; use optim_wrapper.type='OptimWrapper'",
        'optim_wrapper.clip_grad.type=norm|None': 'clipping needs the norm of all gradients '
        "together, but in backward they are never there at once; set clip_grad.type='each_norm' "
        "(each parameter's own norm, as DINO does) or 'value', or clip_grad=None, or use "
        "optim_wrapper.type='OptimWrapper'",
        'verify_exactness': 'gradients are gone when the step could be compared with the plain '
        "one; use optim_wrapper.type='OptimWrapper' for the time of the check",
        'optim_wrapper.precision=fp16|float16': 'fp16 skips a step in which any gradient '
        "overflowed, which is known only after backward; use precision='bf16', or "
        "optim_wrapper.type='OptimWrapper'",
        'optim_wrapper.on_nonfinite=skip': 'some parameters are updated before a later gradient '
        "turns out to be no number, so the step cannot be left out; set on_nonfinite='rollback' or "
        "'stop', or use optim_wrapper.type='OptimWrapper'",
        'data_parallel': 'DistributedDataParallel reduces gradients over ranks when they are gone '
        "already, and holds all of them in its buckets anyway; use type='OptimWrapper' with an "
        'optimiser such as AdamW8bit or AdamWBf16, or shard the model (fully_shard)',
    },
    use_when='gradients do not fit beside the parameters',
    saves='all gradients but the largest',
    price='no norm over all gradients',
    page='optimizer_memory.md',
    example=Settings(),
)
