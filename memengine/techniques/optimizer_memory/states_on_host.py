"""An optimiser whose states wait in host memory, by torchao, an optional package.

torchao does the work; here its optimiser learns of weights that are loaded after it is built, and
of gradients that change between backward and step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from memengine.suggest import import_optional
from memengine.technique import Settings, Technique, setting


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != 'params'}


@functools.cache
def _offload_class() -> Any:
    torchao = import_optional('torchao.optim', "optimizer.type='CPUOffloadOptimizer'")
    base: Any = torchao.CPUOffloadOptimizer

    class Offloading(base):
        def __init__(self, groups: list[Any], optimizer_class: Any, **kwargs: Any) -> None:
            super().__init__([dict(group) for group in groups], optimizer_class, **kwargs)
            part = next(iter(self.optim_dict.values()), self.d_opt)
            # What Optimizer's constructor would have made: defaults, and hooks of the step.
            Optimizer.__setstate__(self, {'defaults': dict(part.defaults)})
            self._groups = [{**self.defaults, **group} for group in groups]
            self._host_has_weights = False

        @property
        def param_groups(self) -> list[dict[str, Any]]:
            """The parameters on the device; torchao's own are those on the host, one a group."""
            return self._groups

        @property
        def state(self) -> dict[Any, dict[str, Any]]:
            """By parameter on the device; torchao's has none, as each of its optimisers has one."""
            states = dict(self.d_opt.state) if self.d_opt else {}
            for parameter, part in self.optim_dict.items():
                states.update(zip([parameter], part.state.values(), strict=False))
            return states

        def _parts(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
            """Each group with those of the optimisers that carry it out."""
            parts = {p: part.param_groups[0] for p, part in self.optim_dict.items()}
            for part in self.d_opt.param_groups if self.d_opt else ():
                parts.update(dict.fromkeys(part['params'], part))
            for group in self._groups:
                for parameter in parts.keys() & set(group['params']):
                    yield group, parts[parameter]

        def _hand_settings_on(self) -> None:
            for group, part in self._parts():
                part.update(_settings(group))

        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            """torchao's step, from the gradients, settings and, at first, weights as they are now.

            torchao copies gradients within backward, before clipping, unscaling and DDP's
            reduction, and weights when it is built, before they are initialised or loaded.
            """
            self._hand_settings_on()
            self.stream.synchronize()  # torchao's copies would else come after these
            for on_device, on_host in self.param_d2h_map.items():
                if not self._host_has_weights:
                    on_host.copy_(on_device)
                if on_device.grad is None:
                    self.queue.pop(on_device, None)
                else:
                    on_host.grad.copy_(on_device.grad)
            self._host_has_weights = True
            return super().step(closure)

        def state_dict(self) -> dict[str, Any]:
            """torchao's, with settings as they are now: schedules go on after a step."""
            self._hand_settings_on()
            state: dict[str, Any] = super().state_dict()
            return state

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Load what ``state_dict`` gave; the weights are taken from the device again."""
            super().load_state_dict(state_dict)
            for group, part in self._parts():
                group.update(_settings(part))
            self._host_has_weights = False

    Offloading.__name__ = Offloading.__qualname__ = 'CPUOffloadOptimizer'
    return Offloading


def cpu_offload_optimizer(
    params: Iterable[Any],
    optimizer_class: type[Optimizer] = torch.optim.AdamW,
    minimal_size: int = 4096,
    **kwargs: Any,
) -> Optimizer:
    """torchao's optimiser that keeps its states, and a copy of the weights, in host memory.

    Args:
        params: Parameters or groups, on a GPU.
        optimizer_class: The optimiser that runs on the host.
        minimal_size: Tensors of fewer numbers stay with their state on the GPU.
        **kwargs: Settings of that optimiser, such as ``lr``.

    Raises:
        ImportError: When torchao is not installed.
        ValueError: When the parameters are on no GPU; with torchao's ``offload_gradients=True``,
            which leaves no gradient to be clipped, unscaled or reduced, and none for this step.

    Cost: no state on the GPU (AdamW: 8 bytes per parameter less); pinned host memory for weights,
    gradients and states (16 bytes per parameter). Per update each gradient goes to the host twice
    (torchao's copy within backward, and its final value after clipping and reduction), each weight
    comes back once, and the CPU does the arithmetic.

    Exact: the update is that of the optimiser on the host. Its checkpoint is torchao's own, which
    other optimisers cannot load.
    """
    if kwargs.get('offload_gradients'):
        raise ValueError(
            'CPUOffloadOptimizer: with offload_gradients=True torchao takes the gradients away '
            'within backward, before they are clipped, unscaled, reduced and used for the update; '
            'leave offload_gradients out'
        )
    params = list(params)
    groups = [{**g} for g in params] if isinstance(params[0], dict) else [{'params': params}]
    for group in groups:
        one = isinstance(group['params'], Tensor)
        group['params'] = [group['params']] if one else list(group['params'])
    trained = [p for group in groups for p in group['params'] if p.requires_grad]
    if {p.device.type for p in trained} - {'cuda', 'xpu'}:
        raise ValueError(
            "optimizer.type='CPUOffloadOptimizer' moves the state of parameters on a GPU to host "
            'memory, but these are there already; use '
            f"optimizer.type='{optimizer_class.__name__}'"
        )
    return _offload_class()(groups, optimizer_class, minimal_size=minimal_size, **kwargs)


@dataclass(frozen=True)
class CPUOffloadOptimizerSettings(Settings):
    """Settings of :func:`cpu_offload_optimizer`."""

    optimizer_class: Any = setting('AdamW', help='the optimiser that runs on the host')
    minimal_size: int = setting(4096, help='tensors of fewer numbers stay on the GPU', low=0)


TECHNIQUE = Technique(
    key='optimizer_offload',
    title='optimiser states on the host',
    settings=CPUOffloadOptimizerSettings,
    switch='optim_wrapper.optimizer.type=CPUOffloadOptimizer',
    conflicts={
        'verify_exactness': 'it moves gradients to the host inside backward; use '
        "optim_wrapper.optimizer.type='AdamW' for the time of the check"
    },
    use_when="the optimiser's state does not fit on the GPU, and host memory is free",
    saves="the optimiser's state, all of it, on the GPU",
    price='gradients to the host, weights back, and the CPU does the update; needs torchao',
    page='optimizer_memory.md',
)
