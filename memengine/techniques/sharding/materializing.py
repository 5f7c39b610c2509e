"""Values for parameters that a model was built without (on the ``meta`` device), part by part.

So that a model which no process could hold is built, one part of it at a time being there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memengine._torch_private.modules import own_buffers, own_parameters

# Their models draw values while they are constructed; those without init_weights() only then.
_LIBRARIES = ('timm.models', 'torchvision.models', 'transformers', 'open_clip')


class _NumbersOnCpu(TorchFunctionMode):
    """``torch.linspace`` on the CPU: constructors read numbers from it, as those of timm 1.0.15."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.linspace:
            kwargs.setdefault('device', 'cpu')
        return func(*args, **kwargs)


@contextmanager
def on_meta() -> Iterator[None]:
    """Within it, models are built without values, as :func:`materialize` takes them.

    It is ``torch.device('meta')``, under which timm's models of all versions can be built.
    """
    with torch.device('meta'), _NumbersOnCpu():
        yield


@torch.no_grad()
def materialize(
    module: nn.Module,
    device: torch.device,
    init_fn: Callable[[nn.Module], Any] | None = None,
    ready: Collection[Tensor] = (),
    model: nn.Module | None = None,
) -> None:
    """Bring a module onto the device, with rank 0's values on all ranks, in place.

    What was on ``meta`` is drawn anew as constructors do: by ``reset_parameters()`` (or
    ``_reset_parameters()``) of modules and of those that hold them, inner ones first; by
    ``init_weights()`` of the outermost modules that have it, as timm's do; by ``init_fn``. All of
    them find on ``meta`` what is not this module's, so that it stays as it is.

    Args:
        module: Holds parameters and buffers on any device, ``meta`` included.
        device: Where they go.
        init_fn: ``init_fn(part)`` gives values to a part's own tensors that were on ``meta``.
        ready: Tensors that are left as they are.
        model: What the module is a part of.

    Raises:
        ValueError: When tensors on ``meta`` are given no value (they are named), or when there is
            no ``init_fn`` and they are a library's that draws them in constructors only, or a
            weight that several modules hold, of which nobody knows whose values it had.

    Cost: memory for the tensors themselves, and each of them on the wire once.
    """
    model = module if model is None else model
    done = {id(tensor) for tensor in ready}
    empty = [
        part
        for part in module.modules()
        if any(t.is_meta and id(t) not in done for t in _own_tensors(part).values())
    ]
    if empty and init_fn is None:
        _refuse_constructors(model, empty)
        _refuse_tied(model, empty)
    _make_room(model, empty, device)
    if empty:
        with _others_on_meta(model, {id(t) for part in empty for t in _own_tensors(part).values()}):
            _initialize(model, empty, init_fn)
    names = {part: name for name, part in module.named_modules()}
    missing = [f'{names[part]}.{key}'.lstrip('.') for part in empty for key in _without_value(part)]
    if missing:
        raise ValueError(
            f'{len(missing)} tensors of {type(module).__name__} were built on the meta device and '
            f'nothing gives them a value: {", ".join(missing[:5])}; pass init_fn, or give their '
            'modules a method reset_parameters(), or the model init_weights()'
        )
    for part in module.modules():
        for tensor in _own_tensors(part).values():
            if id(tensor) not in done:
                tensor.data = tensor.data.to(device)
                if dist.is_initialized():
                    dist.broadcast(tensor.data, 0)
                done.add(id(tensor))


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    parameters: dict[str, Tensor] = dict(module.named_parameters(recurse=False))
    return parameters | dict(module.named_buffers(recurse=False))


def _make_room(model: nn.Module, empty: Collection[nn.Module], device: torch.device) -> None:
    """Put tensors on the device, without values, in the place of those of some parts.

    A tied weight is one tensor afterwards, too. ``to_empty`` would make several of it.
    """
    fresh: dict[int, tuple[Tensor, Tensor]] = {}  # with what it replaces, so that no id comes again
    for part in empty:
        for tensor in _own_tensors(part).values():
            if id(tensor) not in fresh:
                room = torch.empty_like(tensor, device=device).fill_(_unset_value(tensor))
                if isinstance(tensor, nn.Parameter):
                    room = nn.Parameter(room, tensor.requires_grad)
                fresh[id(tensor)] = tensor, room
    for part in model.modules() if fresh else ():
        tables: list[dict[str, Any]] = [own_parameters(part), own_buffers(part)]
        for table in tables:
            table.update({key: fresh[id(t)][1] for key, t in table.items() if id(t) in fresh})


def _refuse_tied(model: nn.Module, empty: Collection[nn.Module]) -> None:
    able = {part for outer in _initializers(model) for part in outer.modules()}
    names = {part: name for name, part in model.named_modules()}
    first: dict[nn.Parameter, str] = {}
    for part in empty:
        for key, parameter in part.named_parameters(recurse=False):
            name = f'{names[part]}.{key}'.lstrip('.')
            tied = first.setdefault(parameter, name)
            if tied != name and part not in able:
                raise ValueError(
                    f'{tied} and {name} are one parameter, built on the meta device, and each of '
                    'the two modules would draw other values for it; pass init_fn, or build the '
                    'model without meta=True'
                )


def _unset_value(tensor: Tensor) -> float | int | bool:
    """A value that nobody gives."""
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.nan
    return False if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max


def _without_value(part: nn.Module) -> list[str]:
    def is_untouched(tensor: Tensor) -> bool:
        if tensor.is_floating_point() or tensor.is_complex():
            return bool(tensor.isnan().any())
        return tensor.dtype != torch.bool and bool((tensor == _unset_value(tensor)).any())

    return [key for key, tensor in _own_tensors(part).items() if is_untouched(tensor)]


def _initialize(
    model: nn.Module, empty: Collection[nn.Module], init_fn: Callable[[nn.Module], Any] | None
) -> None:
    inside = set(empty)
    in_order = dict.fromkeys(_inner_first(model))
    holders = [part for part in in_order if any(inner in inside for inner in part.modules())]
    for part in holders:
        resets: list[Any] = [
            getattr(part, name, None) for name in ('reset_parameters', '_reset_parameters')
        ]
        for reset in [reset for reset in resets if reset is not None][:1]:
            reset()
    for part in _initializers(model):
        if part in holders:
            init: Any = part.init_weights
            # timm's constructors call it so: what resets itself has done so
            takes_it = 'needs_reset' in inspect.signature(init).parameters
            init(**(dict(needs_reset=False) if takes_it else {}))
    if init_fn is not None:
        for part in empty:
            init_fn(part)


def _inner_first(module: nn.Module) -> Iterator[nn.Module]:
    """Modules in the order in which they are constructed."""
    for child in module.children():
        yield from _inner_first(child)
    yield module


def _initializers(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that initialise all that is in them, as often as they are asked."""
    once = hasattr(module, 'is_init') or _library_of(module) == 'transformers'  # MMEngine's, too
    if not once and callable(getattr(module, 'init_weights', None)):
        yield module
    else:
        for child in module.children():
            yield from _initializers(child)


def _library_of(module: nn.Module) -> str | None:
    """That of whose models this is one."""
    defined = [kind.__module__ for kind in type(module).__mro__]
    return next(
        (lib for lib in _LIBRARIES if any(f'{name}.'.startswith(f'{lib}.') for name in defined)),
        None,
    )


def _refuse_constructors(model: nn.Module, empty: Collection[nn.Module]) -> None:
    able = {part for outer in _initializers(model) for part in outer.modules()}
    for part in model.modules():
        library = _library_of(part)
        if library and part not in able and any(inner in empty for inner in part.modules()):
            raise ValueError(
                f'{type(part).__name__} of {library} draws its values while it is constructed, '
                'and was built on the meta device; pass init_fn, or load weights into a model that '
                'is built without meta=True'
            )


@contextmanager
def _others_on_meta(model: nn.Module, kept: Collection[int]) -> Iterator[None]:
    """Puts tensors without values in the place of all but those with these ids."""
    away: list[tuple[dict[str, Any], str, Tensor]] = []
    for part in model.modules():
        tables: list[dict[str, Any]] = [own_parameters(part), own_buffers(part)]
        for table in tables:
            away += [
                (table, key, tensor)
                for key, tensor in table.items()
                if tensor is not None and not tensor.is_meta and id(tensor) not in kept
            ]
    for table, key, tensor in away:
        hollow = torch.empty(tensor.shape, dtype=tensor.dtype, device='meta')
        is_parameter = isinstance(tensor, nn.Parameter)
        table[key] = nn.Parameter(hollow, tensor.requires_grad) if is_parameter else hollow
    try:
        yield
    finally:
        for table, key, tensor in away:
            table[key] = tensor
