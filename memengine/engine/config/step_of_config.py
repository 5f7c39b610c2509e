"""Model and training step of a config by themselves, to check, measure or predict them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from itertools import cycle, islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.dist import get_world_size, is_distributed
from mmengine.logging import MMLogger
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DefaultScope
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from memengine._torch_private.fake import is_fake
from memengine._torch_private.ops import pytree
from memengine.engine.config.error import ConfigError
from memengine.engine.config.schema.types import arguments_of
from memengine.engine.hooks import AlgorithmHook
from memengine.engine.hooks.technique import TechniqueHook
from memengine.engine.step import run_step
from memengine.engine.techniques_of_config import (
    apply_before_wrapping,
    apply_to_model,
    hooks_of_keys,
    refuse,
)
from memengine.engine.wrappers.disco import DisCoDistributedDataParallel
from memengine.memory import TrainingStep, UnpredictableError
from memengine.memory.prediction import on_fake_tensors
from memengine.registry import HOOKS, MODELS
from memengine.techniques.modules.blocks import select_modules
from memengine.techniques.modules.depth import shorten

_WEIGHTS = ('checkpoint_path', 'init_cfg', 'pretrained', 'weights')  # keys of what is read
_SAMPLES_LOADED = 4  # samples that are really loaded; a batch repeats them


def check_model(cfg: Config) -> None:
    """Build the model without memory, and look for the modules that techniques name.

    So a misspelling is answered before a run has its folder. Some 0.1 s; nothing is drawn or read.

    Args:
        cfg: A checked config.

    Raises:
        ConfigError: For a module that is not there.
        ValueError: For an argument that a part of the model does not take. What is wrong otherwise
            is left to the run.
    """
    try:
        with _scope(cfg), on_fake_tensors():
            model_cfg = _without_weights(cfg.model)
            model = MODELS.build(model_cfg)
    except Exception as error:
        is_told = isinstance(error, ValueError) and not isinstance(error, UnpredictableError)
        if is_told and "unexpected keyword argument '" in str(error):
            raise
        return
    if cfg.get('launcher', 'none') != 'none':
        return  # ranks may get other BatchNorm layers before names are looked up
    with _scope(cfg):
        hooks = _technique_hooks(cfg)
        problems = _lacking_modules(model, hooks)
        if problems:  # perhaps for a value that a tensor without memory does not have
            problems = _lacking_modules(MODELS.build(model_cfg), hooks)
    if problems:
        raise ConfigError(problems)


def _lacking_modules(model: nn.Module, hooks: Iterable[TechniqueHook]) -> list[str]:
    """A sentence for each setting of techniques that names modules that are not there."""
    problems = []
    for hook in hooks:
        for key in ('modules', 'exclude'):
            try:
                if selectors := getattr(hook.settings, key, None):
                    select_modules(model, selectors, setting=hook.technique.key)
            except ValueError as error:
                problems.append(str(error))
    return problems


def _without_weights(value: Any) -> Any:
    """A config of models that read no weights."""
    if isinstance(value, (list, tuple)):
        return [*map(_without_weights, value)]
    if not isinstance(value, Mapping):
        return value
    kind = value.get('type')
    kind = MODELS.get(kind) if isinstance(kind, str) else kind
    given = {**(arguments_of(kind).defaults if kind else {}), **value}
    off = {key: None if given[key] is not True else False for key in _WEIGHTS if given.get(key)}
    return {key: _without_weights(entry) for key, entry in {**value, **off}.items()}


def first_batch(cfg: Config) -> Any:
    """The first batch that training sees, loaded in this process."""
    return next(iter(loader_of(cfg)))


def loader_of(cfg: Config) -> DataLoader:
    """The data loader of training, which loads in this process."""
    from memengine.engine.runner import Runner

    loader = dict(cfg.train_dataloader, num_workers=0, persistent_workers=False)
    for option in ('prefetch_factor', 'multiprocessing_context', 'timeout'):
        loader.pop(option, None)
    with _scope(cfg):
        return Runner.build_dataloader(loader, seed=0)


class FewSamples:
    """A config's batch of any size from a few samples, each many times.

    So it can be predicted without its memory, and without loading it. Samples of different sizes
    (sentences of other lengths) are as many as the config's batch has, as a few would not tell how
    large a batch is. They are from all over the data set, which may be in the order of their sizes.

    Attributes:
        most: Samples that there are; None where that is not known before.
        differ: Whether they are of different sizes.
    """

    def __init__(self, cfg: Config) -> None:
        loader = loader_of(cfg)
        assert loader.collate_fn is not None
        self._collate = loader.collate_fn
        dataset: Any = loader.dataset
        self.most = None if isinstance(dataset, IterableDataset) else len(dataset)
        batch_size = cfg.train_dataloader.batch_size
        self._samples = self._loaded(dataset, min(_SAMPLES_LOADED, batch_size))
        self.differ = any(_sizes(one) != _sizes(self._samples[0]) for one in self._samples)
        if self.differ:
            self._samples = self._loaded(dataset, batch_size)

    def __call__(self, cfg: Config) -> Any:
        """A batch as large as this config's, which differs in nothing else of the data."""
        return self._collate(list(islice(cycle(self._samples), cfg.train_dataloader.batch_size)))

    def _loaded(self, dataset: Any, number: int) -> list[Any]:
        """So many samples at the same distance from each other; of a stream the first."""
        if self.most is None:
            return list(islice(dataset, number))
        number = min(number, self.most)
        return [dataset[index * (self.most - 1) // max(number - 1, 1)] for index in range(number)]


def _sizes(sample: Any) -> tuple[Any, list[tuple[int, ...]]]:
    """Lengths of lists, and shapes of what lies in them."""
    leaves, structure = pytree.tree_flatten(sample)
    arrays = [leaf for leaf in leaves if isinstance(leaf, (Tensor, np.ndarray))]
    return structure, [tuple(array.shape) for array in arrays]


def step_of(
    cfg: Config, batch: Any, blocks: Mapping[int, int] | None = None
) -> Callable[[], TrainingStep]:
    """What builds model, techniques and optimiser of a config, and gives their training step.

    It is the step of one process, or within a process group that of a rank, under DDP or sharded as
    the config says; where gradients are accumulated over iterations, two of these. Evaluation and
    checkpoints are not in it.

    Args:
        cfg: A checked config of training.
        batch: Of its data loader; the step has a copy of its own.
        blocks: As :func:`memengine.techniques.modules.depth.shorten` takes it, for a model of fewer
            blocks than the config's.

    Returns:
        A function that builds anew each time it is called.

    Raises:
        ValueError: By what is returned, when settings do not go together or nothing comes of them.
    """
    return functools.partial(_build, cfg, batch, blocks or {})


def _scope(cfg: Mapping[str, Any]) -> Any:
    return DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'memengine'))


def iterations_of(cfg: Config) -> int:
    """How many iterations of an update a step is: the last one is beside the gradients of others.

    They take as much of one as of many.
    """
    return min(cfg.optim_wrapper.get('accumulative_counts', 1), 2)


def _build(cfg: Config, batch: Any, blocks: Mapping[int, int]) -> TrainingStep:
    with _scope(cfg):
        model = MODELS.build(cfg.model)
        shorten(model, blocks)
        logger = MMLogger.get_current_instance()
        wrapped, buckets = _wrapped(cfg, model, logger)
        hooks = _technique_hooks(cfg)
        refuse(cfg, hooks)
        apply_to_model(model, logger, hooks)
        counts = iterations_of(cfg)
        accumulating = {'accumulative_counts': counts} if counts > 1 else {}
        wrapper = build_optim_wrapper(wrapped, cfg.optim_wrapper | accumulating)
    wrapper.initialize_count_status(model, 0, -1)
    # What hooks ask of a Runner.
    place = SimpleNamespace(
        model=wrapped, optim_wrapper=wrapper, hooks=hooks, logger=logger, iter=0, max_iters=1
    )
    place.epoch, place.max_epochs, place.train_loop = 0, 1, None
    every: list[Any] = [AlgorithmHook(), *hooks]
    every[0].before_train(place)
    model.train()
    copy = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)

    def run() -> None:
        for _ in range(counts):
            for hook in every:
                hook.before_train_iter(place, 0, copy)
            if wrapped is model:
                run_step(model, copy, wrapper)
            else:
                wrapped.train_step(copy, wrapper)
            for hook in hooks:
                hook.after_train_iter(place, 0, copy)

    are_settled = all(hook.handle is not None and hook.handle.is_settled for hook in hooks)
    is_settled = are_settled and 'auto' not in cfg.optim_wrapper.values()
    optimizer = getattr(wrapper, 'optimizer', None)
    return TrainingStep(run, model, optimizer, copy, buckets, is_settled, counts)


def _wrapped(cfg: Config, model: nn.Module, logger: Any) -> tuple[Any, list[Tensor]]:
    """The model as one process, or one of several ranks, has it; and what DDP adds to a step.

    DDP cannot be made of tensors without memory. Its buckets are as large as all gradients.
    """
    from memengine.engine.runner.wrapping import wrap, wrapper_type

    wrapper_cfg = cfg.get('model_wrapper_cfg')
    kind = wrapper_type(wrapper_cfg) if is_distributed() else None
    is_ddp = kind is not None and issubclass(kind, nn.parallel.DistributedDataParallel)
    if kind is not None and not (is_ddp and is_fake(next(model.parameters()))):
        ranks = SimpleNamespace(
            distributed=True, world_size=get_world_size(), cfg=cfg, logger=logger
        )
        return wrap(ranks, wrapper_cfg, model), []
    apply_before_wrapping(model, cfg)
    if get_device() != 'cpu':  # fake parameters cannot be moved, not even to where they are
        model = model.to(get_device())
    if kind is not None and issubclass(kind, DisCoDistributedDataParallel):
        for loss in kind.find_losses(model).values():
            loss.process_group = dist.group.WORLD
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, [torch.empty_like(parameter) for parameter in trained if is_ddp]


def _technique_hooks(cfg: Config) -> list[TechniqueHook]:
    """Of keys, and those that are written among the config's hooks."""
    custom = [HOOKS.build(hook) for hook in cfg.get('custom_hooks') or [] if _is_technique(hook)]
    return [*hooks_of_keys(cfg).values(), *custom]


def _is_technique(hook: Any) -> bool:
    kind = hook.get('type') if isinstance(hook, Mapping) else None  # else it is built already
    kind = HOOKS.get(kind) if isinstance(kind, str) else kind
    return isinstance(kind, type) and issubclass(kind, TechniqueHook)
