"""What torch keeps private of modules and optimisers: their tables, and the classes of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as BatchOrInstanceNorm
from torch.nn.modules.conv import _ConvNd as Convolution
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm
from torch.optim import Optimizer

__all__ = [
    'BatchNorm',
    'BatchOrInstanceNorm',
    'Convolution',
    'InstanceNorm',
    'forget_compilation',
    'forward_hooks_of',
    'forward_pre_hooks_of',
    'is_compiled',
    'options_of_mode',
    'own_buffers',
    'own_modules',
    'own_parameters',
    'scripted_attributes',
    'without_compilation',
    'without_step_hooks',
]

own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter('_parameters')
"""The table of a module's own parameters; to write into it is to swap one, unseen by hooks."""

own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter('_buffers')
"""The table of a module's own buffers, likewise."""

own_modules: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter('_modules')
"""The table of a module's own children, which ``children()`` takes longer to go through."""

forward_hooks_of: Callable[[nn.Module], dict[int, Any]] = attrgetter('_forward_hooks')
"""A module's forward hooks, which see its output."""

forward_pre_hooks_of: Callable[[nn.Module], dict[int, Any]] = attrgetter('_forward_pre_hooks')
"""A module's forward pre-hooks, which see its input."""


def scripted_attributes(module: ScriptModule) -> list[str]:
    """Names of what a module of TorchScript holds: parameters, buffers, numbers, its mode.

    It holds them in C++, where ``vars()`` does not see them, and whatever stands for its tables in
    Python is no dict.
    """
    return list(module._concrete_type.get_attributes())


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is one that ``torch.compile`` gave back, or was compiled in place."""
    return hasattr(module, '_orig_mod') or module._compiled_call_impl is not None


def forget_compilation(module: nn.Module) -> None:
    """Undo ``module.compile()``, which torch has no way back from."""
    module._compiled_call_impl = None


def options_of_mode(mode: str | None, dynamic: bool | None) -> dict[str, Any]:
    """The options of torch's compiler that a mode stands for; it takes either."""
    if mode is None:
        return {}
    from torch import _inductor  # which takes a second

    return _inductor.list_mode_options(mode, dynamic)


@contextmanager
def without_compilation(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run a block with modules as they were before ``module.compile()``."""
    compiled = [(module, module._compiled_call_impl) for module in modules]
    for module, _ in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, implementation in compiled:
            module._compiled_call_impl = implementation


@contextmanager
def without_step_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Let ``optimizer.step()`` run without the hooks that are to run once it is done."""
    hooks = optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_post_hooks = type(hooks)()
    try:
        yield
    finally:
        optimizer._optimizer_step_post_hooks = hooks
