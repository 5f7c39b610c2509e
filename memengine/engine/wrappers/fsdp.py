"""Model wrappers that spread parameters, gradients and optimiser state over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from mmengine.device import get_device
from mmengine.logging import print_log
from mmengine.model import BaseDataPreprocessor
from mmengine.optim import OptimWrapper
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload

from memengine.engine.step import run_step
from memengine.engine.wrappers.disco import losses_with_a_group
from memengine.registry import FUNCTIONS, MODEL_WRAPPERS
from memengine.techniques.sharding.shard_model import shard_model
from memengine.techniques.sharding.units import Units


def _dtype(name: str | torch.dtype | None, setting: str) -> torch.dtype | None:
    found = getattr(torch, name, None) if isinstance(name, str) else name
    if name is None or isinstance(found, torch.dtype):
        return found
    raise ValueError(f"{setting} must be a type of torch such as 'bfloat16', got {name!r}")


def _function(config: Any, setting: str) -> Any:
    """A function by its name, by a dict of its name and arguments, or as it is."""
    if isinstance(config, Mapping):
        options = dict(config)
        return partial(_function(options.pop('type'), setting), **options)
    if not isinstance(config, str):
        return config
    found = FUNCTIONS.get(config)
    if found is None:
        raise ValueError(f"{setting}: there is no function '{config}'; register it in FUNCTIONS")
    return found


@MODEL_WRAPPERS.register_module()
class FullyShardedDataParallel(nn.Module):
    """Each of N ranks holds 1 / N of the parameters, gradients and optimiser state.

    Args:
        module: The model.
        units, offload, free_after, reduce_once, prefetch, replicas: As of
            :func:`memengine.techniques.shard_model`.
        param_dtype, reduce_dtype: As there; also by name, e.g. ``'bfloat16'``.
        init_fn: As there; also the name of a function in ``FUNCTIONS``.
        meta: Whether the Runner builds the model on the ``meta`` device, so that no process ever
            holds all of it.
        global_losses: Whether losses in which samples meet see those of all ranks; see
            :class:`~memengine.engine.wrappers.DisCoDistributedDataParallel`.

    Raises:
        ValueError: As :func:`memengine.techniques.shard_model`, where costs are stated.

    A step is that of one process with the samples of all ranks, as under DDP, with any
    OptimWrapper of memengine. Names of parameters and of the state dict are the model's own; their
    values are DTensors. Parameters are broadcast from rank 0 at the start.
    """

    module: Any

    def __init__(
        self,
        module: nn.Module,
        units: Units = None,
        offload: bool = False,
        free_after: str = 'forward',
        reduce_once: bool | None = None,
        prefetch: bool | None = None,
        replicas: int = 1,
        param_dtype: str | torch.dtype | None = None,
        reduce_dtype: str | torch.dtype | None = None,
        init_fn: str | Mapping[str, Any] | Callable[[nn.Module], Any] | None = None,
        meta: bool = False,
        global_losses: bool = True,
    ) -> None:
        super().__init__()
        self._sharded = shard_model(
            module,
            units,
            device=get_device(),
            offload=offload,
            free_after=free_after,
            reduce_once=reduce_once,
            prefetch=prefetch,
            replicas=replicas,
            param_dtype=_dtype(param_dtype, 'param_dtype'),
            reduce_dtype=_dtype(reduce_dtype, 'reduce_dtype'),
            init_fn=_function(init_fn, 'init_fn'),
        )
        self.module = module
        for part in module.modules():
            if isinstance(part, BaseDataPreprocessor):
                part.to(self._sharded.device)
        if global_losses:
            for loss in losses_with_a_group(module).values():
                loss.process_group = dist.group.WORLD
        self._report(offload, replicas)

    def _report(self, offload: bool, replicas: int) -> None:
        units, ranks = self._sharded.units, dist.get_world_size()
        whole = sum(p.numel() for p in self.module.parameters())
        rest = whole - sum(
            p.numel() for name in units for p in self.module.get_submodule(name).parameters()
        )
        gathered = f'{len(units)} units ({units[0]}, ...)' if units else 'no units'
        print_log(
            f'{type(self).__name__}: {whole:,} parameters over {ranks // replicas} rank(s), '
            f'{replicas} time(s){", in host memory" if offload else ""}; {gathered} are gathered '
            f'one by one, and the rest, {rest:,}, for the whole step',
            logger='current',
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; inside :meth:`gathered`, which every step is."""
        return self._sharded(*args, **kwargs)

    def gathered(self) -> AbstractContextManager[None]:
        """Around any use of the model's methods, entered by all ranks."""
        return self._sharded.gathered()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around slices and iterations that do not reduce gradients yet."""
        with self._sharded.no_sync():
            yield

    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        """Carry out one training step; see :func:`memengine.engine.step.run_step`."""
        with self.gathered():
            return run_step(self, data, optim_wrapper)

    @torch.no_grad()
    def val_step(self, data: Any) -> Any:
        """Predictions for a batch; all ranks take part."""
        with self.gathered():
            batch = self.module.data_preprocessor(data, False)
            if isinstance(batch, Mapping):
                return self(**batch, mode='predict')
            return self(*batch, mode='predict')

    test_step = val_step

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own, of DTensors."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Into the model itself."""
        return self.module.load_state_dict(*args, **kwargs)


# What FSDP1 took beside: the values that ask for what is done anyway, and what to use for others.
_OF_FSDP1: dict[str, tuple[tuple[Any, ...], str]] = {
    'use_orig_params': ((True,), 'leave it out: parameters are always the original ones'),
    'sync_module_states': ((True, False), ''),
    'limit_all_gathers': ((True,), 'leave it out: at most two units are ever gathered'),
    'forward_prefetch': ((False,), 'set prefetch=True'),
    'backward_prefetch': ((None,), 'set prefetch=True'),
    'param_init_fn': ((None,), 'set init_fn'),
    'process_group': ((None,), 'set replicas to the number of copies of the model'),
    'device_mesh': ((None,), 'set replicas to the number of copies of the model'),
    'device_id': ((None,), "leave it out: the device is the rank's own"),
    'ignored_modules': ((None,), 'leave it out: all parameters are sharded'),
    'ignored_parameters': ((None,), 'leave it out: all parameters are sharded'),
    'ignored_states': ((None,), 'leave it out: all parameters are sharded'),
}
_STRATEGIES = {'FULL_SHARD': 'forward', 'SHARD_GRAD_OP': 'backward'}


@MODEL_WRAPPERS.register_module()
class MMFullyShardedDataParallel(FullyShardedDataParallel):
    """:class:`FullyShardedDataParallel` as configs for MMEngine's wrapper of FSDP1 write it.

    Args:
        module: The model.
        cpu_offload: ``offload``, or FSDP1's ``CPUOffload``.
        auto_wrap_policy: A policy of FSDP1, the name of one in ``FUNCTIONS``, or a dict of name and
            arguments. None shards the repeated blocks (FSDP1 shards nothing by itself then).
        sharding_strategy: ``'FULL_SHARD'`` or ``'SHARD_GRAD_OP'``.
        mixed_precision: Dict of ``param_dtype`` and ``reduce_dtype``.
        **kwargs: Those of :class:`FullyShardedDataParallel`, and others of FSDP1 if they ask for
            what is done anyway.

    Raises:
        ValueError: For what else FSDP1 took, with what to use instead.
    """

    def __init__(
        self,
        module: nn.Module,
        cpu_offload: Any = None,
        auto_wrap_policy: Any = None,
        sharding_strategy: Any = None,
        mixed_precision: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        for name, (accepted, instead) in _OF_FSDP1.items():
            value = kwargs.pop(name, accepted[0])
            if value not in accepted:
                raise ValueError(f'model_wrapper_cfg.{name}={value!r} was for FSDP1; {instead}')
        strategy = sharding_strategy or 'FULL_SHARD'
        strategy = strategy.name if isinstance(strategy, Enum) else strategy
        if strategy not in _STRATEGIES:
            raise ValueError(
                f'model_wrapper_cfg.sharding_strategy must be one of {tuple(_STRATEGIES)}, got '
                f'{strategy!r}; for one copy of the model per machine set replicas to their '
                "number, for no sharding type='MMDistributedDataParallel'"
            )
        precision = mixed_precision or {}
        if not isinstance(precision, Mapping) or set(precision) - {'param_dtype', 'reduce_dtype'}:
            raise ValueError(
                "model_wrapper_cfg.mixed_precision must be dict(param_dtype='bfloat16', "
                f"reduce_dtype='float32') or one of the two, got {mixed_precision!r}"
            )
        super().__init__(
            module,
            units=_function(auto_wrap_policy, 'auto_wrap_policy'),
            offload=bool(
                cpu_offload.offload_params if isinstance(cpu_offload, CPUOffload) else cpu_offload
            ),
            **{'free_after': _STRATEGIES[strategy], **precision, **kwargs},
        )
