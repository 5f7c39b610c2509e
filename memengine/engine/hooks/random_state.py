"""Random numbers as a function of the place in training."""

from __future__ import annotations

from typing import Any

from mmengine.hooks import Hook

from memengine._torch_private.ops import draw_from_known_generators_when_compiled
from memengine.engine.data_order import derive_seed, seed_generators
from memengine.registry import HOOKS


@HOOKS.register_module()
class RandomStateHook(Hook):
    """Seeds all generators before each iteration from (seed, iteration, rank).

    Dropout and whatever else is drawn in a step then does not depend on what ran before it, so
    a resumed run draws the same numbers. Part of memengine's Runner.
    """

    priority = 'VERY_HIGH'

    def before_train(self, runner: Any) -> None:
        """Have what is compiled draw from the generators that are seeded."""
        draw_from_known_generators_when_compiled()

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Seed for the iteration that begins."""
        seed_generators(derive_seed(runner.seed, runner.iter, runner.rank))
