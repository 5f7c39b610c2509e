"""The knobs that a config leaves open to a planner, and what each of its plans would cost."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.dist import get_world_size
from torch import Tensor, nn

from memengine._torch_private.fake import unset_fake_temporarily
from memengine._torch_private.ops import pytree
from memengine.engine.config.check import check_config
from memengine.engine.config.file import merge_options
from memengine.engine.config.training_step import FewSamples, step_of
from memengine.engine.config.types import arguments_of, find_type
from memengine.engine.step import SlicedModel
from memengine.engine.wrappers.disco import losses_with_a_group
from memengine.memory import TrainingStep, UnpredictableError
from memengine.memory.live_memory import KnownOperators
from memengine.memory.planning import (
    Cost,
    Found,
    Knob,
    Plan,
    largest,
    leanest,
    rates_of,
    search,
)
from memengine.memory.prediction import (
    Phase,
    carried_out,
    on_fake_tensors,
    peaks_by_phase,
    prediction_of,
)
from memengine.techniques.modules.blocks import find_blocks
from memengine.techniques.modules.depth import FEWEST, lists_of_blocks, place_of
from memengine.techniques.modules.running_statistics import layers_with_batch_statistics

__all__ = ['Planner', 'budget_for', 'usable_bytes']

_KEPT_FREE = {'cpu': (0.02, 2**21), 'cuda': (0.1, 0)}

CHECKPOINTING = 'activation_checkpointing'

_BUDGET = f'{CHECKPOINTING}.budget'
_KEPT_GRAPHS = 'optim_wrapper.keep_graph'
_DEEP = 8  # blocks in a list: what more of them cost follows from three and four
_MOST_TRACED = 4  # slices; what more of them cost follows from two and four
_SLICES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
_MOST_WHOLE = 16  # slices of a step that is predicted whole to see that what followed is right
_KEPT = tuple(eighth / 8 for eighth in range(8, -1, -1))
_BUDGETS = tuple(tenth / 10 for tenth in range(9, -1, -1))
_SIZE = {'Accumulation': 'micro_batch_size', 'GradCache': 'chunk_size'}
_OPTION_OF_KNOB = dict(
    tiled_loss='model.loss.tile_size',
    optimizer_in_backward='optim_wrapper.type',
    activation_checkpointing=_BUDGET,
    adamw_bf16='optim_wrapper.optimizer.type',
    mixed_precision='optim_wrapper.precision',
)
_LOCAL_LOSSES = 'MMDistributedDataParallel'  # where samples meet, those of one rank only
_PLAIN_WRAPPERS = ('OptimWrapper', 'AmpOptimWrapper')


def _sum_of(
    parts: Sequence[tuple[float, Cost | None]],
    how: Callable[[Sequence[tuple[float, Cost]]], Cost] = Cost.sum,
) -> Cost | None:
    """Of several costs; None if one of them is refused."""
    known = [(weight, cost) for weight, cost in parts if cost is not None]
    return how(known) if len(known) == len(parts) else None


def _of_four(
    large_2: Cost | None, small_4: Cost | None, small_2: Cost | None, ratio: float
) -> Cost | None:
    """What four slices cost, from two as large, and four and two that are so much smaller.

    Of bytes only the batch grows with the number of slices, in proportion to their size; work does
    so also by what each slice takes whatever its size.
    """
    peaks = _sum_of([(1, large_2), (ratio, small_4), (-ratio, small_2)], Cost.by_phase)
    work = _sum_of([(2, large_2), (1, small_4), (-2, small_2)])
    if peaks is None or work is None:
        return None
    return replace(peaks, flops=work.flops, moved_bytes=work.moved_bytes, operators=work.operators)


def usable_bytes(budget_bytes: int) -> int:
    """What a prediction may be at most.

    Left over is what predictions are wrong by: 2 % and 2 MiB, for Python's own objects and for
    kernels, of which libraries keep some for each shape (a last slice is often of another); on a
    GPU a tenth, for fragments of its allocator and workspaces, of which a prediction for the CPU
    knows nothing.
    """
    share, nbytes = _KEPT_FREE[get_device()]
    return int(budget_bytes * (1 - share)) - nbytes


def budget_for(peak_bytes: int) -> int:
    """The least budget of which so much is usable."""
    share, nbytes = _KEPT_FREE[get_device()]
    return math.ceil((peak_bytes + nbytes) / (1 - share))


class Planner:
    """What may be switched on in a config, and what that costs.

    Args:
        cfg: A checked config of training. What it sets itself stays as it is.
        allow: ``'exact'`` for techniques that change nothing of what is learned; ``'rounding'`` for
            other precisions, too.
        chunk_size: The size of slices, where that is settled.
        like: A planner of the same config for another batch, whose samples and predictions it uses.

    Attributes:
        knobs: For :func:`memengine.memory.planning.search`.
        left_out: Why a technique is not among them, by its key.
    """

    def __init__(
        self,
        cfg: Config,
        allow: str = 'exact',
        chunk_size: int | None = None,
        like: Planner | None = None,
    ) -> None:
        self.cfg, self._allow, self._chunk_size = cfg, allow, chunk_size
        self.left_out: dict[str, str] = dict(like.left_out) if like else {}
        self._batch: FewSamples = like._batch if like else FewSamples(cfg)
        self._samples = cfg.train_dataloader.batch_size
        # Predictions, by batch and options.
        self._known: dict[tuple[tuple[str, Any], ...], Cost | None] = like._known if like else {}
        self._operators: KnownOperators = like._operators if like else KnownOperators()
        self._wrapper, self._rows = '', 0
        self._towers: Counter[str | None] = Counter()
        self._sharded: dict[str, Any] = {}
        self._coupled: dict[int, int] = {}  # slices that the coupled loss reads, by their size
        with on_fake_tensors(self._operators):
            step = step_of(cfg, self._batch(cfg))()
            whole = self._cut_batch(step)
            lists = lists_of_blocks(step.model)
        self._lists = {name: count for name, count in lists.items() if count >= _DEEP}
        if self._lists and not self._can_be_short():
            self._lists = {}
        self.knobs = [*self._slices(step.model, whole), *self._checkpointing(step.model)]
        self.knobs += [*self._tiles(), *self._of_optim_wrapper(allow), *self._sharding(step.model)]

    def find(self, budget_bytes: int) -> Found:
        """The fastest plan within what is usable of a budget."""
        return self._within(usable_bytes(budget_bytes))

    def fitting(self, fit: float) -> Found:
        """The fastest plan between the leanest there is (0) and the step as it is (1).

        Args:
            fit: The share of the bytes between these two that a plan may take.
        """
        least = self._whole(leanest(self.knobs, self.cost)).peak_bytes
        return self._within(least + int(fit * (self.plain().peak_bytes - least)))

    def _within(self, limit_bytes: int) -> Found:
        while True:
            found = search(self.knobs, self.cost, limit_bytes, rates_of(get_device()))
            if found.chosen is None or self._whole(found.chosen.plan) == found.chosen.cost:
                return found

    def _whole(self, plan: Plan) -> Cost:
        """What followed from shorter steps is predicted whole before it is promised."""
        options, slices = self.options(plan), plan.get('slices', 0)
        key = self._key(options)
        if not slices or (slices <= _MOST_WHOLE and not self._lists):
            whole = self._predicted(options)
        else:
            whole = self.cost(plan)
        if slices and self._lists and key not in self._known:  # two slices are predicted whole
            size, kept = self._size(slices), min(options.get(_KEPT_GRAPHS, 0), 1)
            two = self._predicted(self._in_slices(options, size, 2, kept))
            whole = _sum_of([(1, two), (1, whole), (-1, self._short(options, size, 2, kept))])
            self._known[key] = whole
        assert whole is not None, 'a plan that is refused is none'
        return whole

    def at(self, batch_size: int) -> Planner:
        """A planner of the same config for another batch, which knows what this one knows."""
        other = copy.deepcopy(self.cfg)
        other.train_dataloader.batch_size = batch_size
        return Planner(other, self._allow, self._chunk_size, self)

    def largest(self, budget_bytes: int) -> Planner:
        """A planner for the largest batch that fits a budget, by any plan; the first for none.

        The techniques are those that make the step of the batch that the config states smallest.
        """
        names = leanest(self.knobs, self.cost)
        planners: dict[int, Planner] = {}

        def peak_of(size: int) -> int:
            planner = planners[size] = self.at(size)
            plan = {knob.name: knob.levels[-1] for knob in planner.knobs if knob.name in names}
            return planner._whole(plan).peak_bytes

        most = self._batch.most and self._batch.most // get_world_size()
        size = largest(peak_of, usable_bytes(budget_bytes), self._samples, most)
        return planners.get(size, self)

    def plain(self) -> Cost:
        """What the step takes as it is."""
        cost = self.cost({})
        assert cost is not None, 'what is refused without a plan is an error'
        return cost

    def options(self, plan: Plan) -> dict[str, Any]:
        """What a plan sets in the config, as ``--cfg-options`` takes it."""
        options: dict[str, Any] = {}
        if 'slices' in plan:
            size = self._size(plan['slices'])
            options = {
                'optim_wrapper.type': f'{self._wrapper}OptimWrapper',
                f'optim_wrapper.{_SIZE[self._wrapper]}': size,
            }
            least = int(self._wrapper == 'GradCache' and len(self._towers) == 1)  # takes no room
            if kept := max(round(plan.get('kept', 0) * self._coupled[size]), least):
                options[_KEPT_GRAPHS] = kept
        for name, level in plan.items():
            if name in _OPTION_OF_KNOB:
                options[_OPTION_OF_KNOB[name]] = level
        return options | (self._sharded if 'sharding' in plan else {})

    def cost(self, plan: Plan) -> Cost | None:
        """What a plan's step costs; None if the engine refuses it, which ``left_out`` then says.

        A step of many slices follows from shorter ones: what a slice takes, and each that is kept,
        is the same for all.
        """
        if {'slices', 'optimizer_in_backward'} <= plan.keys():
            return None  # each is an OptimWrapper
        options, slices = self.options(plan), plan.get('slices', 0)
        is_even = len(self._towers) == 1 or not plan.get('kept')  # towers' slices differ
        if self._key(options) in self._known:
            return self._predicted(options)
        if not is_even and self._lists and slices > _MOST_TRACED and not self._chunk_size:
            return None  # it would take minutes, for the few graphs that so many slices can keep
        if not slices or not is_even or (slices <= _MOST_TRACED and not self._lists):
            return self._between_budgets(options, self._followed)
        kept, size = options.get(_KEPT_GRAPHS, 0), self._size(slices)

        def short(number: int, kept: int = min(kept, 1)) -> Cost | None:
            return self._short(options, size, number, kept)

        pairs = slices / 2 - 1
        none_kept = _sum_of([(1 - pairs, short(2)), (pairs, short(4))])
        cost = none_kept
        if kept > 1:
            more = [(-1, short(4)), (3 - kept, short(4, 2)), (kept - 2, short(4, 3))]
            cost = _sum_of([(1, none_kept), *more])
        loss = self._loss_of_all(options)
        if none_kept is None or cost is None or loss is None:
            return None
        peak = max(
            cost.elsewhere_bytes,
            cost.in_loss_bytes,
            cost.before_loss_bytes + loss.in_loss_bytes - loss.before_loss_bytes,
            none_kept.peak_bytes,
        )
        return replace(cost, peak_bytes=peak)

    def _loss_of_all(self, options: Mapping[str, Any]) -> Cost | None:
        """A step in whose loss all samples meet, in few slices: the loss takes what it takes."""
        if self._wrapper != 'GradCache':
            return Cost(0, 0, 0, 0)
        few = {name: options[name] for name in options if name not in (_BUDGET, _KEPT_GRAPHS)}
        return self._followed({**few, 'optim_wrapper.chunk_size': math.ceil(self._rows / 2)})

    def _in_slices(
        self, options: Mapping[str, Any], size: int, number: int, kept: int
    ) -> dict[str, Any]:
        """Options of a batch of so many slices, of which the graphs of some are kept."""
        batch = math.ceil(number * size * self._samples / self._rows)
        said = {f'optim_wrapper.{_SIZE[self._wrapper]}': size, 'train_dataloader.batch_size': batch}
        others = {name: options[name] for name in options if name != _KEPT_GRAPHS}
        return {**others, **said, **({_KEPT_GRAPHS: kept} if kept else {})}

    def _short(self, options: Mapping[str, Any], size: int, number: int, kept: int) -> Cost | None:
        """A step of so many slices; of a deep model it follows from larger slices."""
        large, small = self._size(2), self._size(4)

        def with_size(options: Mapping[str, Any]) -> Cost | None:
            def of(size: int, number: int) -> Cost | None:
                return self._followed(self._in_slices(options, size, number, kept))

            if not self._lists or large == small:
                return of(size, number)
            if number == 2 or kept:
                of_large = of(large, number)
            else:  # four large slices are the dearest to predict, and follow
                of_large = _of_four(of(large, 2), of(small, 4), of(small, 2), large / small)
            share = (size - small) / (large - small)
            return _sum_of([(share, of_large), (1 - share, of(small, number))], Cost.by_phase)

        return self._between_budgets(options, with_size)

    def _between_budgets(
        self, options: Mapping[str, Any], cost_of: Callable[[Mapping[str, Any]], Cost | None]
    ) -> Cost | None:
        """A budget of a deep model is between nothing kept and all; other options are asked."""
        budget = options.get(_BUDGET)
        if not self._lists or not budget:
            return cost_of(options)
        all_kept = {name: options[name] for name in options if name != _BUDGET}
        return _sum_of(
            [(1 - budget, cost_of({**options, _BUDGET: 0.0})), (budget, cost_of(all_kept))]
        )

    def _followed(self, options: Mapping[str, Any]) -> Cost | None:
        """What a step costs; of a deep model from what models of three and four blocks do."""
        depths = sorted({*self._lists.values()})
        if not depths:
            return self._predicted(options)
        few = dict.fromkeys(depths, FEWEST)
        more = [(depth - FEWEST, {**few, depth: FEWEST + 1}) for depth in depths]
        several = [(1 - sum(weight for weight, _ in more), few), *more]
        parts = [(weight, self._predicted(options, blocks)) for weight, blocks in several]
        return _sum_of(parts, Cost.by_phase)

    def _predicted(
        self, options: Mapping[str, Any], blocks: Mapping[int, int] | None = None
    ) -> Cost | None:
        short = {f'of {count} blocks': left for count, left in (blocks or {}).items()}
        key = self._key({**options, **short})
        if key not in self._known:
            self._known[key] = self._predict(options, blocks)
        return self._known[key]

    def _key(self, options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        return tuple(sorted({'train_dataloader.batch_size': self._samples, **options}.items()))

    def _predict(self, options: Mapping[str, Any], blocks: Mapping[int, int] | None) -> Cost | None:
        cfg = copy.deepcopy(self.cfg)
        merge_options(cfg, options)
        try:
            check_config(cfg)
            memory = carried_out(lambda: step_of(cfg, self._batch(cfg), blocks)(), self._operators)
            phases = self._at_places(peaks_by_phase(memory), blocks) if blocks else {}
            return Cost.of(prediction_of(memory), phases)
        except UnpredictableError:
            raise
        except ValueError as error:
            if not options:
                raise
            self.left_out[', '.join(options)] = str(error)
            return None

    def _at_places(
        self, phases: Mapping[Phase, int], blocks: Mapping[int, int]
    ) -> dict[Phase, int]:
        """Phases by names that are the same at every depth."""
        lists = {name: blocks[count] for name, count in self._lists.items()}
        placed: dict[Phase, int] = {}
        for phase, nbytes in phases.items():
            part, module = (place_of(name, lists) for name in (phase.part, phase.module))
            where = phase._replace(part=part, module=module)
            placed[where] = max(placed.get(where, 0), nbytes)
        return placed

    def _can_be_short(self) -> bool:
        """Whether the model goes without some of its blocks, as its forward may name each."""
        try:
            self._followed({})
        except (UnpredictableError, AttributeError, LookupError, AssertionError):
            return False
        return True

    # ------------------------------------------------------------------ what is open

    def _size(self, slices: int) -> int:
        return self._chunk_size or math.ceil(self._rows / slices)

    def _is_plain(self) -> bool:
        kind = self.cfg.optim_wrapper.get('type', 'OptimWrapper')
        return kind in _PLAIN_WRAPPERS

    def _cut_batch(self, step: TrainingStep) -> Mapping[str, Any] | None:
        """The batch as it is cut, each of its tensors one number; None of a step without slices."""
        model = step.model
        if not self._is_plain():
            self.left_out['slices'] = 'optim_wrapper.type is set by the config'
        elif not isinstance(model, SlicedModel):
            self.left_out['slices'] = f'{type(model).__name__} does not say how it is cut'
        elif layers := layers_with_batch_statistics(model):
            self.left_out['slices'] = (
                f'{len(layers)} BatchNorm layers ({layers[0]}, ...) would normalise by slices, '
                'which has a part in what is learned'
            )
        else:
            preprocessor: Any = model.data_preprocessor
            batch = preprocessor(step.batch, True)
            with unset_fake_temporarily():  # a cut is a hundred times as fast there
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
        self._towers = Counter(piece.tower for piece in model.slices(inputs, samples, 1))
        self._rows = max(self._towers.values())
        several = [math.ceil(self._rows / self._chunk_size)] if self._chunk_size else _SLICES
        levels = list({self._size(n): n for n in several if n <= self._rows}.values())
        for size in map(self._size, [1, *levels]):
            pieces = model.slices(inputs, samples, size)
            self._coupled[size] = sum(piece.coupled for piece in pieces)
        if levels:
            yield Knob('slices', levels, of_activations=True)
        if levels and model.coupled:
            yield Knob('kept', _KEPT, of='slices')

    def _checkpointing(self, model: nn.Module) -> Iterator[Knob]:
        if self.cfg.get(CHECKPOINTING):
            self.left_out[CHECKPOINTING] = 'it is set by the config'
        elif not find_blocks(model):
            self.left_out[CHECKPOINTING] = 'the model has no repeated blocks'
        else:
            yield Knob(CHECKPOINTING, _BUDGETS, of_activations=True)

    def _tiles(self) -> Iterator[Knob]:
        loss = self.cfg.model.get('loss')
        kind = loss.get('type') if isinstance(loss, Mapping) else None
        if isinstance(kind, str):
            kind = find_type('MODELS', kind, self.cfg.get('default_scope', 'memengine'))
        if kind and 'tile_size' in arguments_of(kind).names and not loss.get('tile_size'):
            yield Knob('tiled_loss', ('auto',), of_activations=True)

    def _sharding(self, model: nn.Module) -> Iterator[Knob]:
        if get_world_size() == 1:
            return
        stated = self.cfg.get('model_wrapper_cfg') or {'type': _LOCAL_LOSSES}
        if stated not in ({'type': _LOCAL_LOSSES}, {'type': 'DisCoDistributedDataParallel'}):
            self.left_out['sharding'] = 'model_wrapper_cfg is set by the config'
            return
        self._sharded['model_wrapper_cfg.type'] = 'FullyShardedDataParallel'
        if stated['type'] == _LOCAL_LOSSES and losses_with_a_group(model):
            self._sharded['model_wrapper_cfg.global_losses'] = False
        yield Knob('sharding', ('over all ranks',))

    def _of_optim_wrapper(self, allow: str) -> Iterator[Knob]:
        wrapper = self.cfg.optim_wrapper
        if self._is_plain():
            yield Knob('optimizer_in_backward', ('OptimizerInBackwardOptimWrapper',))
        if allow != 'exact' and wrapper.optimizer.type == 'AdamW':
            yield Knob('adamw_bf16', ('AdamWBf16',))
        if allow != 'exact' and self._is_plain() and not wrapper.get('precision'):
            yield Knob('mixed_precision', ('bf16',))
