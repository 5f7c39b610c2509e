"""Techniques of a model as a callback of Lightning's Trainer."""

from __future__ import annotations

from typing import Any

import lightning
from lightning.pytorch.utilities import rank_zero_info

from memengine.techniques import AppliedTechniques, apply_techniques


class TechniquesCallback(lightning.Callback):
    """Applies techniques to a LightningModule for as long as it is fitted.

    ``Trainer(callbacks=[TechniquesCallback(recomputed_activations=True)])``: they are applied
    before the strategy wraps the model (DDP) or it shards itself (``configure_model``), follow
    their schedules, say after the first step of each fit what they have done, and are undone at its
    end, or where it breaks off.

    Args:
        **settings: As :func:`~memengine.apply_techniques` takes them.

    Raises:
        ValueError: As that does; after the first step of a fit, when a technique has done nothing.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.applied = AppliedTechniques()
        self.said: list[str] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Apply them."""
        if stage == 'fit':
            self.applied, self.said = apply_techniques(pl_module, **self.settings), []

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Let schedules go on."""
        self.applied.before_step(trainer.global_step, log=rank_zero_info)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Say once in a fit what was done."""
        if not self.said:
            self.said = self.applied.report()
            for sentence in self.said:
                rank_zero_info(sentence)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the model as it was."""
        self.applied.undo()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the model as it was where a fit breaks off, which ends in no teardown."""
        self.applied.undo()
