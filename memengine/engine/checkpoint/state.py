"""What a run puts into a checkpoint, and how a checkpoint is laid out over this run's ranks.

A checkpoint is the dict that MMEngine writes. In a sharded one, the optimiser's state goes by the
names of parameters instead of their numbers.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mmengine
import torch
from mmengine.dist import get_rank, get_world_size
from mmengine.optim import OptimWrapperDict
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from memengine.engine.checkpoint.files import CheckpointError
from memengine.engine.checkpoint.sharded import (
    KeyPath,
    is_sharded,
    merge_tensors,
    read_sharded,
    split_tensors,
)
from memengine.engine.checkpoint.weights import read_file
from memengine.engine.step import unwrap
from memengine.techniques.optimizer_memory.adamw_low_bit import in_full_precision


def is_sharded_model(model: nn.Module) -> bool:
    """Whether ranks hold shards of the model (``fully_shard``) rather than all of it."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def samples_per_step(runner: Any) -> int | None:
    """Samples that all ranks train on in an iteration; None if the loader does not say."""
    batch_size = getattr(runner.train_dataloader, 'batch_size', None)
    return None if batch_size is None else batch_size * get_world_size()


def check_resumable(runner: Any, checkpoint: Mapping[str, Any], filename: str) -> None:
    """Refuse to go on from what is not all of a run, or with steps of another size.

    Raises:
        CheckpointError: Naming what is missing.
        ValueError: Naming the batch size to set; the run would begin at another sample.
    """
    meta = checkpoint['meta']
    needed = [
        'message_hub',
        'optimizer',
        *(['param_schedulers'] if runner.param_schedulers else []),
    ]
    missing = [entry for entry in needed if entry not in checkpoint]
    missing += [f'meta.{key}' for key in ('epoch', 'iter') if not isinstance(meta.get(key), int)]
    if missing:
        raise CheckpointError(
            f'{filename} cannot be resumed from, as it has no {", ".join(missing)}; load_from '
            'without resume begins another training from its weights'
        )
    before, now = meta.get('samples_per_step'), samples_per_step(runner)
    if before is None or now is None or before == now:
        return
    ranks = get_world_size()
    fitting = (
        f'train_dataloader.batch_size={before // ranks}'
        if before % ranks == 0
        else (f'a number of ranks that divides {before}')
    )
    raise ValueError(
        f'the checkpoint is from steps of {before} samples, but {ranks} rank(s) with '
        f'train_dataloader.batch_size={now // ranks} make steps of {now}: set {fitting} to go on, '
        'or load_from without resume to begin another training from its weights'
    )


def run_state(
    runner: Any, meta: dict[str, Any], save_optimizer: bool, save_param_scheduler: bool
) -> dict[str, Any]:
    """The state of a run as MMEngine's ``save_checkpoint`` builds it, for all ranks to call.

    Tensors are the run's own, not copies; shards stay shards.
    """
    model = unwrap(runner.model)
    meta.update(
        cfg=runner.cfg.pretty_text,
        seed=runner.seed,
        experiment_name=runner.experiment_name,
        time=time.strftime('%Y%m%d_%H%M%S', time.localtime()),
        mmengine_version=mmengine.__version__,
    )
    if hasattr(runner.train_dataloader.dataset, 'metainfo'):
        meta['dataset_meta'] = runner.train_dataloader.dataset.metainfo
    checkpoint = dict(
        meta=meta, state_dict=model.state_dict(), message_hub=runner.message_hub.state_dict()
    )
    if save_optimizer:
        checkpoint['optimizer'] = runner.optim_wrapper.state_dict()
    schedulers = runner.param_schedulers
    if save_param_scheduler and schedulers is not None:
        checkpoint['param_schedulers'] = (
            {name: _scheduler_states(several) for name, several in schedulers.items()}
            if isinstance(schedulers, dict)
            else _scheduler_states(schedulers)
        )
    runner.call_hook('before_save_checkpoint', checkpoint=checkpoint)
    if get_rank():  # running statistics differ between ranks: rank 0's count, as with MMEngine
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        for entry in [entry for entry in checkpoint if entry != 'optimizer']:
            checkpoint[entry] = _without_own(checkpoint[entry], names)
    return checkpoint


def _without_own(tree: Any, parameters: Collection[str]) -> Any:
    """A dict without the tensors that a rank need not have in common with the others.

    Those are all but parameters and shards, also in what hooks have added (EMAHook's model). Of
    one layer one rank's mean and another's variance would be written otherwise.
    """
    if not isinstance(tree, dict):
        return tree
    left = copy.copy(tree)  # keeps what else an OrderedDict carries
    for key, value in tree.items():
        is_common = isinstance(value, DTensor) or str(key).removeprefix('module.') in parameters
        if isinstance(value, Tensor) and not is_common:
            del left[key]
        else:
            left[key] = _without_own(value, parameters)
    return left


def _scheduler_states(schedulers: Any) -> list[dict[str, Any]]:
    """Without what they call (OneCycleLR's curve): it is built anew, and is refused as code."""
    return [
        {key: value for key, value in scheduler.state_dict().items() if not callable(value)}
        for scheduler in schedulers
    ]


def gather_state(tree: Any, copies: bool = False) -> Any:
    """The same nested dicts and lists on the CPU, with the shards of all ranks put together.

    All ranks call it; it gathers one tensor at a time, and only rank 0 keeps it.

    Args:
        tree: What a checkpoint holds.
        copies: Whether tensors that lie on the CPU are copied, as training will change them.
    """
    if isinstance(tree, dict):
        same = copy.copy(tree)  # keeps what else an OrderedDict carries
        for key, value in tree.items():
            same[key] = gather_state(value, copies)
        return same
    if isinstance(tree, (list, tuple)):
        return type(tree)(gather_state(value, copies) for value in tree)
    if isinstance(tree, DTensor):
        whole: Any = in_full_precision(tree)
        full = whole.full_tensor()
        return full.cpu() if get_rank() == 0 else None
    return tree.detach().to('cpu', copy=copies) if isinstance(tree, Tensor) else tree


def _optimizers(optim_wrapper: Any) -> Iterator[tuple[KeyPath, Optimizer]]:
    """The optimisers, with the path of their state below ``checkpoint['optimizer']``."""
    if isinstance(optim_wrapper, OptimWrapperDict):
        for name, wrapper in optim_wrapper.items():
            yield (name,), wrapper.optimizer
    else:
        yield (), optim_wrapper.optimizer


def _parameter_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Names of an optimiser's parameters, in its order."""
    names = {id(p): name for name, p in unwrap(model).named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group['params']]
    return [names.get(id(p), f'parameter {i}') for i, p in enumerate(parameters)]


def key_by_name(states: dict[str, Any], model: nn.Module, optim_wrapper: Any) -> dict[str, Any]:
    """An optimiser wrapper's state with parameters' names instead of numbers."""
    for path, optimizer in _optimizers(optim_wrapper):
        names = _parameter_names(model, optimizer)

        def rename(state: dict[str, Any], names: list[str] = names) -> dict[str, Any]:
            return {
                **state,
                'names': names,
                'state': _rename_keys(state['state'], dict(enumerate(names))),
            }

        states = _change_at(states, path, rename)
    return states


def key_by_index(states: dict[str, Any]) -> dict[str, Any]:
    """Undo :func:`key_by_name`, wherever it was applied; what has numbers already stays."""
    if 'names' in states:
        numbers = {name: i for i, name in enumerate(states['names'])}
        states = {**states, 'state': _rename_keys(states['state'], numbers)}
        del states['names']
        return states
    return {
        key: key_by_index(value) if isinstance(value, dict) and 'names' in value else value
        for key, value in states.items()
    }


def _rename_keys(state: Mapping[Any, Any], names: Mapping[Any, Any]) -> dict[Any, Any]:
    return {names[key]: value for key, value in state.items()}


def _change_at(tree: dict[str, Any], path: KeyPath, change: Callable[[Any], Any]) -> dict[str, Any]:
    return (
        change(tree) if not path else {**tree, path[0]: _change_at(tree[path[0]], path[1:], change)}
    )


class ShardLayout:
    """How this run's ranks hold what a checkpoint contains.

    Args:
        model: The model, wrapped or not.
        optim_wrapper: The optimiser wrapper, if the checkpoint's state of it is to be laid out.
        revise_keys: Pairs of pattern and replacement for names, as ``load_checkpoint`` takes them.
    """

    def __init__(
        self, model: nn.Module, optim_wrapper: Any, revise_keys: list[tuple[str, str]]
    ) -> None:
        bare = unwrap(model)
        held = [  # a tied weight has several names, and a checkpoint has it by all of them
            *bare.named_parameters(remove_duplicate=False),
            *bare.named_buffers(remove_duplicate=False),
        ]
        self._shards = {name: t for name, t in held if isinstance(t, DTensor)}
        self._revise_keys = revise_keys
        self._names: dict[KeyPath, list[str]] = {}
        if optim_wrapper is not None:
            for path, optimizer in _optimizers(optim_wrapper):
                below: KeyPath = ('optimizer', *path)
                self._names[below] = _parameter_names(model, optimizer)

    def template(self, path: KeyPath, size: torch.Size) -> Tensor | None:
        """The DTensor as which the checkpoint's tensor at ``path`` is held; None if held whole."""
        for at, key in enumerate(path):
            name = key
            if isinstance(key, int):  # the number of a parameter, below (..., 'state')
                names = self._names.get(path[: at - 1], [])
                name = names[key] if key < len(names) else None
            for pattern, replacement in self._revise_keys if isinstance(name, str) else ():
                name = re.sub(pattern, replacement, name)
            shard = self._shards.get(name)
            if shard is not None and shard.shape == size:
                return shard
        return None

    def shard(self, path: KeyPath, tensor: Tensor) -> Tensor:
        """This rank's shard of a whole tensor that every rank has; the tensor if held whole."""
        shard = None if isinstance(tensor, DTensor) else self.template(path, tensor.shape)
        if not isinstance(shard, DTensor):
            return tensor
        device = shard.to_local().device
        whole = in_full_precision(tensor).to(device)
        return distribute_tensor(whole, shard.device_mesh, shard.placements)


def read_checkpoint(
    filename: str,
    trusted: Sequence[str],
    layout: ShardLayout,
    with_optimizer: bool,
    map_location: Any = 'cpu',
) -> dict[str, Any]:
    """Read a checkpoint of any kind as MMEngine's dict, laid out as this run's ranks hold it."""
    if is_sharded(filename):

        def wanted(entry: str) -> bool:
            return with_optimizer or entry != 'optimizer'

        checkpoint = read_sharded(Path(filename), trusted, wanted, layout.template)
        if 'optimizer' in checkpoint:
            checkpoint['optimizer'] = key_by_index(checkpoint['optimizer'])
        return checkpoint
    rest, tensors = split_tensors(read_file(filename, trusted, map_location))
    return merge_tensors(rest, {path: layout.shard(path, t) for path, t in tensors.items()})
