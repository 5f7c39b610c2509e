"""The fastest plan of a config: many of them follow from few predictions, and one is predicted."""

from __future__ import annotations

import copy
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mmengine.config import Config
from mmengine.device import get_device
from mmengine.dist import get_world_size

from memengine.engine.config.planning.open_knobs import (
    CHECKPOINTED_BLOCKS,
    CHECKPOINTED_BUDGET,
    KEPT_GRAPHS,
    RECOMPUTATION,
    OpenKnobs,
    with_kept_graphs,
    without,
)
from memengine.engine.config.planning.predictions import Predictions, sum_of, with_modes
from memengine.engine.config.step_of_config import step_of
from memengine.memory.planning import (
    Cost,
    Found,
    Knob,
    Plan,
    has_both,
    largest,
    leanest,
    rates_of,
    search,
)
from memengine.memory.prediction import on_fake_tensors

__all__ = ['Planner', 'budget_for', 'usable_bytes']

_KEPT_FREE = {'cpu': (0.02, 2**21), 'cuda': (0.1, 0)}

_MOST_TRACED = 4  # slices; what more of them cost follows from two and four
_MOST_WHOLE = 16  # slices of a step that is predicted whole to see that what followed is right


def _of_four(
    large_2: Cost | None, small_4: Cost | None, small_2: Cost | None, ratio: float
) -> Cost | None:
    """What four slices cost, from two as large, and four and two that are so much smaller.

    Of bytes only the batch grows with the number of slices, in proportion to their size; work does
    so also by what each slice takes whatever its size.
    """
    peaks = sum_of([(1, large_2), (ratio, small_4), (-ratio, small_2)], Cost.by_phase)
    work = sum_of([(2, large_2), (1, small_4), (-2, small_2)])
    if peaks is None or work is None:
        return None
    return peaks.with_work_of(work)


def usable_bytes(budget_bytes: int) -> int:
    """What a prediction may be at most.

    Left over is what predictions are wrong by: 2 % and 2 MiB, for Python's own objects and for
    kernels, of which libraries keep some for each shape (a last slice is often of another); on a
    GPU a tenth, for fragments of its allocator and workspaces, of which a prediction for the CPU
    knows nothing.
    """
    share, nbytes = _KEPT_FREE[get_device()]
    return int(budget_bytes * (1 - share)) - nbytes


def room_beside() -> int:
    """Bytes for each process where offload moves to: free on the disk, or half of a GPU's host."""
    if get_device() == 'cpu':
        return shutil.disk_usage(tempfile.gettempdir()).free // get_world_size()
    return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') // 2 // get_world_size()


def budget_for(peak_bytes: int) -> int:
    """The least budget of which so much is usable."""
    share, nbytes = _KEPT_FREE[get_device()]
    return math.ceil((peak_bytes + nbytes) / (1 - share))


class Planner:
    """What may be switched on in a config, and what that costs.

    Args:
        cfg: A checked config of training. What it sets itself stays as it is.
        allow: ``'exact'`` for techniques that change nothing of what is learned; ``'rounding'`` for
            other precisions, too; ``'lossy'`` also for activations in few bits.
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
        self._steps: Predictions = Predictions(cfg, self.left_out, like._steps if like else None)
        batch = self._steps.batch_of(cfg)
        with on_fake_tensors(self._steps.operators):
            step = step_of(cfg, batch())()
            self._open = OpenKnobs(cfg, step, allow, chunk_size, self.left_out)
        if like is None:
            self._steps.look_for_blocks(step.model)
        self.knobs = self._open.knobs
        if self._steps.lists:  # whose blocks are fewer in predictions than those that are counted
            self.knobs = [
                replace(knob, levels=knob.levels[-1:]) if knob.name == RECOMPUTATION else knob
                for knob in self.knobs
                if knob.name != 'checkpointed_blocks'  # budgets spare FLOPs, which count most there
            ]

    def find(self, budget_bytes: int) -> Found:
        """The fastest plan within what is usable of a budget."""
        return self._within(usable_bytes(budget_bytes))

    def fitting(self, fit: float) -> Found:
        """The fastest plan between the leanest there is (0) and the step as it is (1).

        Args:
            fit: The share of the bytes between these two that a plan may take.
        """
        least = self._whole(leanest(self._usual_knobs, self.cost)).peak_bytes
        return self._within(least + int(fit * (self.plain().peak_bytes - least)))

    def _within(self, limit_bytes: int) -> Found:
        while True:
            found = search(self.knobs, self.cost, limit_bytes, rates_of(get_device()))
            if found.chosen is None or self._whole(found.chosen.plan) == found.chosen.cost:
                return found

    def _whole(self, plan: Plan) -> Cost:
        """What followed from shorter steps is predicted whole before it is promised."""
        options, slices = self.options(plan), plan.get('slices', 0)
        if slices <= (2 if self._steps.lists else _MOST_WHOLE):
            whole = self._steps.predicted(options)
        else:
            whole = self.cost(plan)
        if not self._steps.knows(options) and self._steps.lists:
            # What all blocks add to what followed from few is seen on two slices.
            size, kept = self._open.size(slices), self._open.least_kept
            two = self._steps.predicted(self._open.in_slices(options, size, 2, kept))
            whole = sum_of([(1, two), (1, whole), (-1, self._short(options, size, 2, kept))])
            self._steps.know(options, whole)
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
        names = leanest(self._usual_knobs, self.cost)
        planners: dict[int, Planner] = {}

        def peak_of(size: int) -> int:
            planner = planners[size] = self.at(size)
            plan = {knob.name: knob.levels[-1] for knob in planner.knobs if knob.name in names}
            return planner._whole(plan).peak_bytes

        most = self._steps.samples.most and self._steps.samples.most // get_world_size()
        start = self.cfg.train_dataloader.batch_size
        size = largest(peak_of, usable_bytes(budget_bytes), start, most)
        return planners.get(size, self)

    @property
    def caution(self) -> str:
        """Of what a plan's step is one of many: a sentence, empty where all batches are alike."""
        if not self._steps.samples.differ:
            return ''
        return (
            "samples are of different sizes: planned for a batch's worth of them from all over the "
            'data set; a batch of larger ones takes more'
        )

    @property
    def _usual_knobs(self) -> list[Knob]:
        return [knob for knob in self.knobs if not knob.is_last_resort]

    def plain(self) -> Cost:
        """What the step takes as it is."""
        cost = self.cost({})
        assert cost is not None, 'what is refused without a plan is an error'
        return cost

    def options(self, plan: Plan) -> dict[str, Any]:
        """What a plan sets in the config, as ``--cfg-options`` takes it."""
        return self._open.options(plan)

    def cost(self, plan: Plan) -> Cost | None:
        """What a plan's step costs; None if the engine refuses it, which ``left_out`` then says.

        A step of many slices follows from shorter ones: what a slice takes, and each that is kept,
        is the same for all.
        """
        cost = self._steps.asked_first(self._cost, plan)
        at_once = cost.offloaded_bytes // 2 if cost else 0  # or less: all that goes out in a step
        if at_once and at_once > (room := room_beside()):
            self.left_out['activation_offload'] = (
                f'{at_once / 2**30:.1f} GiB would wait outside of the memory that is planned for, '
                f'where each process has {room / 2**30:.1f} GiB'
            )
            return None
        return cost

    def _cost(self, plan: Plan) -> Cost | None:
        if {'slices', 'optimizer_in_backward'} <= plan.keys():
            return None  # each is an OptimWrapper
        if has_both(self.knobs, plan):
            return None
        options, slices = self.options(plan), plan.get('slices', 0)
        is_even = self._open.towers == 1 or not plan.get('kept')  # towers' slices differ
        if self._steps.knows(options):
            return self._steps.predicted(options)
        if not slices:
            return self._between_budgets(options, self._steps.followed)
        if not is_even and self._steps.lists and slices > _MOST_TRACED and not self._chunk_size:
            return None  # it would take minutes, for the few graphs that so many slices can keep
        kept, size = options.get(KEPT_GRAPHS, 0), self._open.size(slices)
        if not is_even or (slices <= _MOST_TRACED and not self._steps.lists):
            return self._between_budgets(options, lambda options: self._between_kept(options, size))

        def short(number: int, kept: int = min(kept, 1)) -> Cost | None:
            return self._short(options, size, number, kept)

        slices = math.ceil(self._open.rows / size)
        pairs = slices / 2 - 1
        none_kept = sum_of([(1 - pairs, short(2)), (pairs, short(4))])
        cost = none_kept
        if kept > 1:
            more = [(-1, short(4)), (3 - kept, short(4, 2)), (kept - 2, short(4, 3))]
            cost = sum_of([(1, none_kept), *more])
        loss = self._loss_of_all(options)
        if none_kept is None or cost is None or loss is None:
            return None
        peak = max(
            cost.elsewhere_bytes,
            cost.in_loss_bytes,
            cost.before_loss_bytes + loss.in_loss_bytes - loss.before_loss_bytes,
            none_kept.peak_bytes,
        )
        share = self._open.rows / (slices * size)  # the last slice may be smaller
        return replace(cost, peak_bytes=peak).with_work_of(cost, share)

    def _loss_of_all(self, options: Mapping[str, Any]) -> Cost | None:
        """A step in whose loss all samples meet, in few slices: the loss takes what it takes."""
        if not self._open.meets:
            return Cost(0, 0, 0, 0)
        half = math.ceil(self._open.rows / 2)
        few = without(options, CHECKPOINTED_BLOCKS, CHECKPOINTED_BUDGET, KEPT_GRAPHS)
        return self._steps.followed({**few, 'optim_wrapper.chunk_size': half})

    def _short(self, options: Mapping[str, Any], size: int, number: int, kept: int) -> Cost | None:
        """A step of so many slices; of a deep model it follows from larger slices."""
        large, small = self._open.size(2), self._open.size(4)

        def with_size(options: Mapping[str, Any]) -> Cost | None:
            def of(size: int, number: int) -> Cost | None:
                return self._steps.followed(self._open.in_slices(options, size, number, kept))

            if not self._steps.lists or large == small:
                return of(size, number)
            if number == 2 or kept:
                of_large = of(large, number)
            else:  # four large slices are the dearest to predict, and follow
                of_large = _of_four(of(large, 2), of(small, 4), of(small, 2), large / small)
            share = (size - small) / (large - small)
            return sum_of([(share, of_large), (1 - share, of(small, number))], Cost.by_phase)

        return self._between_budgets(options, with_size)

    def _between_budgets(
        self, options: Mapping[str, Any], cost_of: Callable[[Mapping[str, Any]], Cost | None]
    ) -> Cost | None:
        """A budget of a deep model is between nothing kept and all; other options are asked."""
        budget = options.get(CHECKPOINTED_BUDGET)
        if not self._steps.lists or not budget:
            return cost_of(options)
        all_kept = without(options, CHECKPOINTED_BUDGET)
        none_kept = {**options, CHECKPOINTED_BUDGET: 0.0}
        between = sum_of([(1 - budget, cost_of(none_kept)), (budget, cost_of(all_kept))])
        return with_modes(between, options)

    def _between_kept(self, options: Mapping[str, Any], size: int) -> Cost | None:
        """A step some of whose graphs are kept: between none and all of a tower, or two."""
        kept, alike = options.get(KEPT_GRAPHS, 0), self._open.kept_alike(size)
        fewer = max(number for number in alike if number <= kept)
        more = min(number for number in alike if number >= kept)
        if fewer == more:
            return self._steps.followed(options)
        share = (kept - fewer) / (more - fewer)
        ends = [(1 - share, fewer), (share, more)]
        return sum_of(
            [(w, self._steps.followed(with_kept_graphs(options, n))) for w, n in ends],
            Cost.by_phase,
        )
