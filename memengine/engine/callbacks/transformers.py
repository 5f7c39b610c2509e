"""Techniques of a model as a callback of transformers' Trainer."""

from __future__ import annotations

from typing import Any

import transformers

from memengine.techniques import AppliedTechniques, apply_techniques


class TechniquesCallback(transformers.TrainerCallback):
    """Applies techniques to a Trainer's model.

    ``Trainer(model, arguments, callbacks=[TechniquesCallback(recomputed_activations=True)])``: they
    are applied as soon as the Trainer is made, before the model is wrapped, follow their schedules,
    and say after the first step of each ``train()`` what they have done. A model that the Trainer
    makes anew (``model_init``) has them when it begins to train, as one does whose Trainer was
    given the callback later.
    ``callback.applied.undo()`` leaves the model as it was.

    Args:
        **settings: As :func:`~memengine.apply_techniques` takes them.

    Raises:
        ValueError: As that does; after the first step of a ``train()``, when a technique
            has done nothing.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.applied = AppliedTechniques()
        self.said: list[str] = []
        self._model: Any = None  # to which they were applied

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Apply them, to this model alone."""
        self.applied.undo()
        self._model = kwargs['model']
        self.applied, self.said = apply_techniques(self._model, **self.settings), []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Apply them to another model, and anew when one trains again: reports count from there."""
        is_another = all(module is not self._model for module in kwargs['model'].modules())
        if is_another or (self.said and self.applied.handles):
            self.on_init_end(args, state, control, **kwargs)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let schedules go on."""
        self.applied.before_step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say once in a ``train()`` what was done."""
        if not self.said:
            self.said = self.applied.report()
            for sentence in self.said if state.is_world_process_zero else ():
                print(sentence)
