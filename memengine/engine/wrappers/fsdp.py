"""Model wrappers that spread parameters, gradients and optimiser state over ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from mmengine.hooks import EMAHook, Hook
from mmengine.logging import print_log
from mmengine.model import BaseDataPreprocessor
from mmengine.optim import OptimWrapper
from torch import Tensor, nn

from memengine.engine.step import run_step
from memengine.engine.wrappers.disco import losses_with_a_group
from memengine.registry import FUNCTIONS, MODEL_WRAPPERS
from memengine.techniques.sharding.shard_model import shard_model
from memengine.techniques.sharding.units import Units

__all__ = ['FullyShardedDataParallel', 'MMFullyShardedDataParallel', 'refuse_beside_sharding']


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
        units: What is gathered and freed by itself: by default the model's repeated blocks, and
            with ``offload`` their parts; names, globs or classes of modules, a least number of
            parameters, or a wrap policy of FSDP1.
        offload: Whether shards and the optimiser's state live in host memory.
        free_after: When gathered parameters are freed: after each ``'forward'``, after its
            ``'backward'``, or after the whole ``'step'`` (of several slices).
        reduce_once: Whether the slices of a step reduce gradients once, in the last, and hold
            whole gradients until then; otherwise each slice reduces. By default once, unless
            ``offload``.
        prefetch: Whether the next unit is gathered while one computes; by default, unless
            ``offload``.
        replicas: Copies of the model among the ranks (hybrid sharding), e.g. one per machine.
        param_dtype: What to gather and compute in, e.g. ``'bfloat16'``; by default the
            parameters' own.
        reduce_dtype: What to reduce gradients in; by default ``param_dtype``.
        init_fn: Function, or the name of one in ``FUNCTIONS``, that gives values to a module's own
            tensors that were built on ``meta``, after the model's own ``reset_parameters()`` and
            ``init_weights()``.
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
        device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
        for part in module.modules():
            if isinstance(part, BaseDataPreprocessor):
                part.to(device)
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


# FSDP1's arguments that have become pointless: the values that ask for what is done anyway.
_AS_EVER: dict[str, tuple[tuple[Any, ...], str]] = {
    'use_orig_params': ((True,), 'parameters are always the original ones, cut up one by one'),
    'sync_module_states': ((True, False), "rank 0's values are always broadcast"),
    'limit_all_gathers': ((True,), 'at most two units are ever gathered'),
    'backward_prefetch': (
        (None, 'BACKWARD_PRE'),
        'gathering after a unit has computed saves nothing',
    ),
    'process_group': (
        (None,),
        'the ranks are always all of them; for hybrid sharding set replicas',
    ),
    'device_id': ((None,), "the device is always the rank's own"),
    'ignored_modules': ((None,), 'all parameters are sharded'),
    'ignored_parameters': ((None,), 'all parameters are sharded'),
    'ignored_states': ((None,), 'all parameters are sharded'),
    'device_mesh': ((None,), 'the mesh follows from the ranks; for hybrid sharding set replicas'),
}
_FREE_AFTER = {
    'FULL_SHARD': 'forward',
    'SHARD_GRAD_OP': 'backward',
    'HYBRID_SHARD': 'forward',
    '_HYBRID_SHARD_ZERO2': 'backward',
}
_OF_MIXED_PRECISION = ('param_dtype', 'reduce_dtype')


def _name_of(value: Any) -> Any:
    """Enums of FSDP1 as the strings that stand for them in configs."""
    return getattr(value, 'name', value)


def _copies() -> int:
    """One copy of the model per machine."""
    here = int(os.environ.get('LOCAL_WORLD_SIZE', 0)) or torch.cuda.device_count()
    if not here:
        raise ValueError(
            "sharding_strategy='HYBRID_SHARD' keeps a copy per machine, but LOCAL_WORLD_SIZE does "
            'not say how many ranks a machine has; start with torchrun, or set replicas of '
            "type='FullyShardedDataParallel'"
        )
    return max(dist.get_world_size() // here, 1)


def _precision_of(mixed_precision: Any) -> dict[str, Any]:
    """``param_dtype`` and ``reduce_dtype`` of FSDP1's setting."""
    options = mixed_precision or {}
    if not isinstance(options, Mapping):
        options = {key: getattr(options, key) for key in (*_OF_MIXED_PRECISION, 'buffer_dtype')}
    buffers = _dtype(options.get('buffer_dtype'), 'mixed_precision.buffer_dtype')
    if buffers not in (None, torch.float32):
        raise ValueError(
            f'mixed_precision.buffer_dtype={buffers} is no more: buffers keep their type; leave it '
            'out'
        )
    others = set(options) - {*_OF_MIXED_PRECISION, 'buffer_dtype'}
    if others:
        raise ValueError(
            f'mixed_precision.{min(others)} is no more; it takes {_OF_MIXED_PRECISION}'
        )
    return {key: options.get(key) for key in _OF_MIXED_PRECISION}


@MODEL_WRAPPERS.register_module()
class MMFullyShardedDataParallel(FullyShardedDataParallel):
    """:class:`FullyShardedDataParallel` with the arguments of MMEngine's wrapper of FSDP1.

    Args:
        module: The model.
        process_group: None.
        sharding_strategy: ``'FULL_SHARD'`` (also None), ``'SHARD_GRAD_OP'``, ``'HYBRID_SHARD'`` or
            ``'_HYBRID_SHARD_ZERO2'``, which keep one copy per machine. ``'NO_SHARD'`` is DDP.
        cpu_offload: True, False or FSDP1's ``CPUOffload``.
        auto_wrap_policy: A policy of FSDP1, the name of one in ``FUNCTIONS``, or a dict of name and
            arguments. None shards the repeated blocks (FSDP1 shards nothing by itself then).
        backward_prefetch: ``'BACKWARD_PRE'`` is ``prefetch=True``; or None.
        mixed_precision: Dict of ``param_dtype`` and ``reduce_dtype``.
        param_init_fn: ``init_fn``.
        use_orig_params: True.
        sync_module_states: Either; values are broadcast.
        forward_prefetch: True is ``prefetch=True``.
        limit_all_gathers: True.
        device_id: None.
        device_mesh: None.
        ignored_modules: None.
        ignored_parameters: None.
        ignored_states: None.
        **kwargs: ``free_after``, ``reduce_once``, ``prefetch``, ``replicas``, ``meta``,
            ``global_losses``.

    Raises:
        ValueError: For what has no meaning any more, with the reason.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: Any = None,
        cpu_offload: Any = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: Any = None,
        mixed_precision: Any = None,
        param_init_fn: Any = None,
        use_orig_params: bool = True,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        device_id: Any = None,
        device_mesh: Any = None,
        ignored_modules: Any = None,
        ignored_parameters: Any = None,
        ignored_states: Any = None,
        **kwargs: Any,
    ) -> None:
        given = locals()
        for name, (accepted, reason) in _AS_EVER.items():
            if _name_of(given[name]) not in accepted:
                raise ValueError(
                    f'MMFullyShardedDataParallel: {name}={_name_of(given[name])} has no meaning '
                    f'any more, as {reason}; leave it out'
                )
        strategy = _name_of(sharding_strategy) or 'FULL_SHARD'
        if strategy == 'NO_SHARD':
            raise ValueError(
                "sharding_strategy='NO_SHARD' shards nothing; use "
                "model_wrapper_cfg.type='MMDistributedDataParallel'"
            )
        if strategy not in _FREE_AFTER:
            raise ValueError(
                f'sharding_strategy must be one of {tuple(_FREE_AFTER)}, got {strategy!r}'
            )
        if 'HYBRID' in strategy:
            kwargs.setdefault('replicas', _copies())
        kwargs.setdefault('free_after', _FREE_AFTER[strategy])
        if backward_prefetch or forward_prefetch:
            kwargs.setdefault('prefetch', True)
        super().__init__(
            module,
            units=_function(auto_wrap_policy, 'auto_wrap_policy'),
            offload=bool(getattr(cpu_offload, 'offload_params', cpu_offload)),
            init_fn=param_init_fn,
            **_precision_of(mixed_precision),
            **kwargs,
        )


def refuse_beside_sharding(cfg: Mapping[str, Any], hooks: Iterable[Hook] = ()) -> None:
    """Refuse what cannot work on a model whose parameters are spread over ranks.

    Raises:
        ValueError: Naming the setting, and what to use instead.
    """
    ddp = "use model_wrapper_cfg.type='MMDistributedDataParallel'"
    for hook in hooks:
        if isinstance(hook, EMAHook):
            raise ValueError(
                f'custom_hooks: {type(hook).__name__} copies the model, which a sharded one does '
                f'not allow; {ddp}, or an algorithm that holds its own average, as DINO does'
            )
    if cfg.get('compile'):
        raise ValueError(
            'compile compiles the step in one graph, which gathering parameters breaks; compile '
            f'the blocks (compile_blocks=True), or {ddp}'
        )
    if cfg.get('sync_bn', 'torch') not in ('torch', None):
        raise ValueError(
            f"sync_bn={cfg['sync_bn']!r} does not know of sharding; set sync_bn='torch'"
        )
