"""A model on its device and in its wrapper; nothing is ignored silently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from mmengine.device import get_device
from mmengine.model import BaseModule
from mmengine.runner import BaseLoop
from torch import nn
from torch.utils.data import DataLoader

from memengine.engine.checkpoint.files import safe_loading
from memengine.engine.data_order import refuse_unsized
from memengine.engine.distributed.processes import (
    cpu_group,
    do_on_all_ranks,
    local_device_ids,
)
from memengine.engine.step import SlicedModel, unwrap
from memengine.engine.techniques_of_config import apply_before_wrapping
from memengine.engine.wrappers.disco import DisCoDistributedDataParallel, losses_with_a_group
from memengine.engine.wrappers.fsdp import FullyShardedDataParallel
from memengine.registry import MODEL_WRAPPERS


@runtime_checkable
class InitializesWeights(Protocol):
    """A model that gives its parameters the values that they start from."""

    def init_weights(self) -> None:
        """Called once, before training."""


@runtime_checkable
class ActsAfterInit(Protocol):
    """A model with something to do when parameters that were built without values have some."""

    def after_init(self) -> None:
        """Called once, after the values have been given."""


_DEFAULT = {'type': 'MMDistributedDataParallel'}


def wrapper_type(wrapper_cfg: Mapping[str, Any] | None) -> type[nn.Module]:
    """The class that ``model_wrapper_cfg`` names; DDP without one.

    Raises:
        ValueError: For a wrapper that is not known.
    """
    kind: Any = {**_DEFAULT, **(wrapper_cfg or {})}['type']
    wrapper = MODEL_WRAPPERS.get(kind) if isinstance(kind, str) else kind
    if wrapper is None:
        raise ValueError(f"model_wrapper_cfg.type: there is no model wrapper '{kind}'")
    return wrapper


def wrap(runner: Any, wrapper_cfg: dict[str, Any] | None, model: nn.Module) -> nn.Module:
    """Put a model on its device, and on several ranks into its wrapper.

    Raises:
        ValueError: For a wrapper that is not known, or would be missed in one process.
    """
    config = {**_DEFAULT, **(wrapper_cfg or {})}
    kind, wrapper = config['type'], wrapper_type(wrapper_cfg)
    is_sharded = runner.distributed and issubclass(wrapper, FullyShardedDataParallel)
    if not is_sharded:
        model = model.to(get_device())  # first: what replaces modules asks where they are
    apply_before_wrapping(model, runner.cfg)
    is_ddp = issubclass(wrapper, nn.parallel.DistributedDataParallel)
    if not runner.distributed:
        if wrapper_cfg is not None:
            _warn_unused_wrapper(runner, kind, wrapper, is_ddp, model)
        return model
    if is_sharded:
        wrapped = _shard(runner, config, wrapper, model)
    else:
        if is_ddp:
            unused = runner.cfg.get('find_unused_parameters', False)
            config.setdefault('find_unused_parameters', unused)
            config.setdefault('device_ids', local_device_ids())
            if wrapper_cfg is None:
                config['broadcast_buffers'] = False
        wrapped = MODEL_WRAPPERS.build(config, default_args=dict(module=model))
    found = losses_with_a_group(unwrap(wrapped))
    local = [name for name, loss in found.items() if loss.process_group is None]
    if local and runner.world_size > 1:
        runner.logger.warning(
            f'{", ".join(local)}: each of the {runner.world_size} ranks contrasts only its own '
            'samples with each other, which is another objective than that of the whole batch; '
            "set model_wrapper_cfg.type='DisCoDistributedDataParallel' to contrast the samples "
            'of all ranks'
        )
    return wrapped


def _warn_unused_wrapper(
    runner: Any, kind: Any, wrapper: Any, is_ddp: bool, model: nn.Module
) -> None:
    """Warn of a wrapper in one process, or refuse one whose effect is missed there."""
    if not is_ddp:
        raise ValueError(
            f"model_wrapper_cfg: '{kind}' needs several processes, but launcher='none' starts "
            'one; start with torchrun and --launcher pytorch (to offload on one GPU with '
            '--nproc_per_node 1), or remove model_wrapper_cfg'
        )
    why = 'there is nothing to synchronise'
    if issubclass(wrapper, DisCoDistributedDataParallel):
        why = f'{", ".join(wrapper.find_losses(model))} sees the whole batch as it is'
    runner.logger.warning(
        f"model_wrapper_cfg has no effect in one process (launcher='none'): {why}"
    )


def _shard(runner: Any, config: dict[str, Any], wrapper: Any, model: nn.Module) -> nn.Module:
    """Initialise a model while it is whole, and spread it over the ranks."""
    options = {key: value for key, value in config.items() if key != 'type'}
    if options.get('meta'):
        if options.get('init_fn') is None:
            refuse_unread_init_cfg(model)
    elif isinstance(model, InitializesWeights):
        initialize_weights(runner, model.init_weights)
    wrapped = wrapper(module=model, **options)
    if options.get('meta') and isinstance(model, ActsAfterInit):
        model.after_init()
    return wrapped


def refuse_unread_init_cfg(model: nn.Module) -> None:
    """Refuse what says how it is initialised where units are given their values one by one."""
    for name, part in model.named_modules():
        if isinstance(part, BaseModule) and part.init_cfg:
            raise ValueError(
                f'model_wrapper_cfg.meta=True: {f"model.{name}".rstrip(".")} has an init_cfg, '
                'which is not read where a model is built without values; set meta=False, or leave '
                'init_cfg out (init_cfg=None) and give init_fn or load_from'
            )


def initialize_weights(runner: Any, initialize: Any) -> None:
    """Initialise, and hold MMEngine's ``Pretrained`` to reading as safely as all else."""
    with safe_loading('A checkpoint of init_cfg', runner.cfg.get('trusted_globals', ())):
        initialize()


def refuse_uncounted(loop: Any, setting: str) -> None:
    """Refuse an evaluation of data without a length."""
    if isinstance(loop, BaseLoop) and isinstance(loop.dataloader, DataLoader):
        refuse_unsized(loop.dataloader.dataset, setting)


def refuse_unequal_batches(model: nn.Module, loop: Any, setting: str) -> None:
    """Refuse an evaluation in which ranks that hold shards would wait for each other for ever.

    Every rank must call it.
    """
    if not isinstance(model, FullyShardedDataParallel) or not isinstance(loop, BaseLoop):
        return
    numbers = do_on_all_ranks(lambda: len(loop.dataloader), cpu_group('checkpoint'))
    if len(set(numbers)) > 1:
        raise ValueError(
            f'{setting}: the ranks would get {", ".join(map(str, numbers))} batches, but where a '
            'model is in shards all of them gather it for each batch. Set sampler.round_up=True, '
            'by which they get as many, and what is given twice counts once'
        )


def refuse_lone_samples(model: nn.Module, samples_per_step: int | None, world_size: int) -> None:
    """Refuse batches of one sample where samples meet in the loss, which is 0 then."""
    losses = losses_with_a_group(model).values()
    is_local = any(loss.process_group is None for loss in losses)
    fewest = world_size if is_local else 1
    if samples_per_step == fewest and isinstance(model, SlicedModel) and model.coupled:
        raise ValueError(
            f'train_dataloader.batch_size=1: in the loss of {type(model).__name__} samples are '
            'compared with each other, so that one alone teaches nothing (the loss is 0); set '
            'it to at least 2'
        )
