"""What a config leaves open to a planner, and what each level sets in it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.dist import get_world_size
from torch import Tensor, nn

from memengine._torch_private.fake import unset_fake_temporarily, without_modes
from memengine._torch_private.ops import pytree
from memengine.engine.config.schema.types import arguments_of, find_type
from memengine.engine.step import SlicedModel
from memengine.engine.wrappers.disco import losses_with_a_group
from memengine.memory import TrainingStep
from memengine.memory.planning import Cost, Knob, Plan
from memengine.techniques.modules.blocks import find_blocks
from memengine.techniques.modules.running_statistics import layers_with_batch_statistics
from memengine.techniques.slices.slicing import Slice

CHECKPOINTING = 'activation_checkpointing'
CHECKPOINTED_BUDGET = f'{CHECKPOINTING}.budget'
CHECKPOINTED_BLOCKS = f'{CHECKPOINTING}.first'
RECOMPUTATION = 'recomputed_activations'
EVERYWHERE = 'everywhere'
KEPT_GRAPHS = 'optim_wrapper.keep_graph'

_SLICES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
_KEPT = tuple(eighth / 8 for eighth in range(8, -1, -1))
_BUDGETS = tuple(tenth / 10 for tenth in range(9, -1, -1))
_BITS = (8, 4)
_SIZE = {'Accumulation': 'micro_batch_size', 'GradCache': 'chunk_size'}
_OPTION_OF_KNOB = dict(
    tiled_loss='model.loss.tile_size',
    optimizer_in_backward='optim_wrapper.type',
    checkpointed_blocks=CHECKPOINTED_BLOCKS,
    activation_checkpointing=CHECKPOINTED_BUDGET,
    adamw_bf16='optim_wrapper.optimizer.type',
    mixed_precision='optim_wrapper.precision',
    recomputed_activations=f'{RECOMPUTATION}.first',
    quantized_activations='quantized_activations',
    activation_offload='activation_offload',
)
_LOCAL_LOSSES = 'MMDistributedDataParallel'  # where samples meet, those of one rank only
_HALF_PRECISION = 'AmpOptimWrapper'


def _finer_budgets(faster: float | None, leaner: float) -> list[float]:
    above = 1.0 if faster is None else faster
    return [round(above - fifth * (above - leaner) / 5, 2) for fifth in range(1, 5)]


def without(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The other options."""
    return {name: options[name] for name in options if name not in names}


def with_kept_graphs(options: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Options by which so many graphs are kept."""
    return {**without(options, KEPT_GRAPHS), **({KEPT_GRAPHS: number} if number else {})}


class OpenKnobs:
    """The knobs of a config.

    Args:
        cfg: A checked config of training. What it sets itself stays as it is.
        step: Its training step, on fake tensors, in whose mode this is called.
        allow: As of the planner.
        chunk_size: The size of slices, where that is settled.
        left_out: To which is added why a technique is not among them, by its key.

    Attributes:
        knobs: For :func:`memengine.memory.planning.search`.
        meets: Whether samples meet in the loss, so that slices are a gradient cache's.
        towers: How many encoders are cut into slices.
        rows: The most rows of a batch that one of them takes.
    """

    def __init__(
        self,
        cfg: Config,
        step: TrainingStep,
        allow: str,
        chunk_size: int | None,
        left_out: dict[str, str],
    ) -> None:
        self._cfg, self._chunk_size, self._left_out = cfg, chunk_size, left_out
        self._samples = cfg.train_dataloader.batch_size
        self._wrapper = ''
        self._sharded: dict[str, Any] = {}
        # Slices that the coupled loss reads of each tower, the last one first, by their size.
        self._coupled: dict[int, list[int]] = {}
        self.towers = self.rows = 0
        slices = list(self._slices(step.model, self._cut_batch(step)))
        blocks = find_blocks(step.model)
        trained = [
            number
            for number, block in enumerate(blocks.values(), 1)
            if any(parameter.requires_grad for parameter in block.parameters())
        ]
        checkpointing = list(self._checkpointing(bool(blocks), trained))
        # The cheapest first: a gradient cache computes more twice than checkpointing does.
        self.meets = self._wrapper == 'GradCache'
        self.knobs = [
            *(checkpointing + slices if self.meets else slices + checkpointing),
            *self._compression(allow, trained),
            *self._tiles(),
            *self._of_optim_wrapper(allow),
            *self._sharding(step.model),
        ]

    def options(self, plan: Plan) -> dict[str, Any]:
        """What a plan sets in the config, as ``--cfg-options`` takes it."""
        options: dict[str, Any] = {}
        if 'slices' in plan:
            size = self.size(plan['slices'])
            options = {
                'optim_wrapper.type': f'{self._wrapper}OptimWrapper',
                f'optim_wrapper.{_SIZE[self._wrapper]}': size,
            }
            kept = round(plan.get('kept', 0) * sum(self._coupled[size]))
            if kept := max(kept, self.least_kept):
                options[KEPT_GRAPHS] = kept
        for name, level in plan.items():
            if level == EVERYWHERE:
                options[name] = True
            elif name in _OPTION_OF_KNOB:
                options[_OPTION_OF_KNOB[name]] = level
        if self._kind == _HALF_PRECISION and 'optim_wrapper.type' in options:  # others take fp32
            options['optim_wrapper.precision'] = 'bf16' if get_device() == 'cpu' else 'fp16'
        return options | (self._sharded if 'sharding' in plan else {})

    def size(self, slices: int) -> int:
        """How many rows each of so many slices has."""
        return self._chunk_size or math.ceil(self.rows / slices)

    def in_slices(
        self, options: Mapping[str, Any], size: int, number: int, kept: int
    ) -> dict[str, Any]:
        """Options of a batch of so many slices, of which the graphs of some are kept."""
        batch = math.ceil(number * size * self._samples / self.rows)
        said = {f'optim_wrapper.{_SIZE[self._wrapper]}': size, 'train_dataloader.batch_size': batch}
        return {**with_kept_graphs(options, kept), **said}

    def kept_alike(self, size: int) -> list[int]:
        """Numbers of kept graphs between which each takes as much: those of one tower."""
        return sorted({self.least_kept, *accumulate(self._coupled[size])})

    @property
    def least_kept(self) -> int:
        """Graphs that are kept in any case, as one takes no room where there is one tower."""
        return int(self.meets and self.towers == 1)

    @property
    def _kind(self) -> Any:
        return self._cfg.optim_wrapper.get('type', 'OptimWrapper')

    def _is_plain(self) -> bool:
        """Whether another wrapper may take the place of the config's, with its other settings."""
        return self._kind in ('OptimWrapper', _HALF_PRECISION) and not self._cfg.optim_wrapper.get(
            'dtype'
        )

    def _cut_batch(self, step: TrainingStep) -> Mapping[str, Any] | None:
        """The batch as it is cut, each of its tensors one number; None of a step without slices."""
        model = step.model
        if self._cfg.optim_wrapper.get('dtype'):
            self._left_out['slices'] = (
                f'only {_HALF_PRECISION} has optim_wrapper.dtype; write it as '
                "optim_wrapper.type='OptimWrapper' with precision='bf16' or 'fp16'"
            )
        elif not self._is_plain():
            self._left_out['slices'] = 'optim_wrapper.type is set by the config'
        elif not isinstance(model, SlicedModel):
            self._left_out['slices'] = f'{type(model).__name__} does not say how it is cut'
        elif layers := layers_with_batch_statistics(model):
            self._left_out['slices'] = (
                f'{len(layers)} BatchNorm layers ({layers[0]}, ...) would normalise by slices, '
                'which has a part in what is learned'
            )
        else:
            preprocessor: Any = model.data_preprocessor
            batch = preprocessor(step.batch, True)
            with unset_fake_temporarily():
                return pytree.tree_map(
                    lambda leaf: (
                        torch.zeros((), dtype=leaf.dtype).expand(leaf.shape)
                        if isinstance(leaf, Tensor)
                        else leaf
                    ),
                    dict(batch),
                )
        return None

    def _slices(self, model: nn.Module, batch: Mapping[str, Any] | None) -> Iterator[Knob]:
        if batch is None:
            return
        assert isinstance(model, SlicedModel)
        self._wrapper = 'GradCache' if model.coupled else 'Accumulation'
        inputs, samples = batch['inputs'], batch.get('data_samples')

        def cut(size: int) -> list[Slice]:
            with without_modes():  # a hundred times as fast
                return model.slices(inputs, samples, size)

        rows = Counter(piece.tower for piece in cut(1))
        self.towers, self.rows = len(rows), max(rows.values())
        several = [math.ceil(self.rows / self._chunk_size)] if self._chunk_size else _SLICES
        levels = list({self.size(n): n for n in several if n <= self.rows}.values())
        for size in map(self.size, [1, *levels]):
            coupled = Counter(piece.tower for piece in reversed(cut(size)) if piece.coupled)
            self._coupled[size] = list(coupled.values())
        if levels:
            yield Knob('slices', levels, least=Cost.without_activations)
        if levels and model.coupled:
            yield Knob('kept', _KEPT, of='slices')

    def _checkpointing(self, has_blocks: bool, numbers: list[int]) -> Iterator[Knob]:
        if self._cfg.get(CHECKPOINTING):
            self._left_out[CHECKPOINTING] = 'it is set by the config'
        elif not has_blocks:
            self._left_out[CHECKPOINTING] = 'the model has no repeated blocks'
        else:
            least, some = Cost.without_activations, 'checkpointed_blocks'
            if numbers:
                yield Knob(some, numbers, least=least)
            yield Knob(
                CHECKPOINTING, _BUDGETS, least=least, instead_of=some, between=_finer_budgets
            )

    def _compression(self, allow: str, numbers: list[int]) -> Iterator[Knob]:
        yield from self._of_activations(RECOMPUTATION, (*numbers, EVERYWHERE))
        if allow == 'lossy':
            yield from self._of_activations('quantized_activations', _BITS)
        # It takes the host's memory, or files.
        yield from self._of_activations('activation_offload', (True,), is_last_resort=True)

    def _of_activations(
        self, key: str, levels: tuple[Any, ...], is_last_resort: bool = False
    ) -> Iterator[Knob]:
        if self._cfg.get(key):
            self._left_out[key] = 'it is set by the config'
        else:
            least = Cost.without_activations
            yield Knob(key, levels, least=least, is_last_resort=is_last_resort)

    def _tiles(self) -> Iterator[Knob]:
        loss = self._cfg.model.get('loss')
        kind = loss.get('type') if isinstance(loss, Mapping) else None
        if isinstance(kind, str):
            kind = find_type('MODELS', kind, self._cfg.get('default_scope', 'memengine'))
        if kind and 'tile_size' in arguments_of(kind).names and not loss.get('tile_size'):
            yield Knob('tiled_loss', ('auto',), least=Cost.without_loss)

    def _sharding(self, model: nn.Module) -> Iterator[Knob]:
        if get_world_size() == 1:
            return
        stated = self._cfg.get('model_wrapper_cfg') or {'type': _LOCAL_LOSSES}
        if stated not in ({'type': _LOCAL_LOSSES}, {'type': 'DisCoDistributedDataParallel'}):
            self._left_out['sharding'] = 'model_wrapper_cfg is set by the config'
            return
        self._sharded['model_wrapper_cfg.type'] = 'FullyShardedDataParallel'
        if stated['type'] == _LOCAL_LOSSES and losses_with_a_group(model):
            self._sharded['model_wrapper_cfg.global_losses'] = False
        yield Knob('sharding', ('over all ranks',), least=Cost.without_state)

    def _of_optim_wrapper(self, allow: str) -> Iterator[Knob]:
        wrapper = self._cfg.optim_wrapper
        if self._is_plain():
            yield Knob(
                'optimizer_in_backward',
                ('OptimizerInBackwardOptimWrapper',),
                least=Cost.without_state,
            )
        if allow != 'exact' and wrapper.optimizer.type == 'AdamW':
            yield Knob('adamw_bf16', ('AdamWBf16',))
        if allow != 'exact' and self._kind == 'OptimWrapper' and not wrapper.get('precision'):
            yield Knob('mixed_precision', ('bf16',))
