"""Lets an algorithm follow training: its schedules, and what happens around an update."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from mmengine.hooks import Hook
from mmengine.optim import OptimWrapperDict

from memengine.engine.step import Progress, progress_of, unwrap
from memengine.registry import HOOKS


@runtime_checkable
class FollowsTraining(Protocol):
    """A model that is told where training stands."""

    def set_progress(self, progress: Progress) -> None:
        """Called before each iteration."""


@runtime_checkable
class ActsBeforeUpdate(Protocol):
    """A model with something to do when the gradients are there."""

    def before_update(self) -> None:
        """Called right before the optimiser steps."""


@runtime_checkable
class ActsAfterUpdate(Protocol):
    """A model with something to do when its parameters have changed."""

    def after_update(self) -> None:
        """Called right after the optimiser has stepped."""


@HOOKS.register_module()
class AlgorithmHook(Hook):
    """Tells the model where training stands, and when the optimiser steps.

    A model may have any of the methods ``set_progress(progress)`` (called before each
    iteration), ``before_update()`` and ``after_update()`` (called around each step of the
    optimiser, so not on iterations that only accumulate, nor when fp16 skips one). Part of
    memengine's Runner; models without these methods are left alone.
    """

    priority = 'VERY_HIGH'

    def before_train(self, runner: Any) -> None:
        """Hang ``before_update`` and ``after_update`` on the optimiser's own step."""
        model = unwrap(runner.model)
        wrapper = runner.optim_wrapper
        if isinstance(wrapper, OptimWrapperDict):  # an update is one step of each of them
            wrappers = list(wrapper.values())
            first, last = wrappers[0].optimizer, wrappers[-1].optimizer
        else:
            first = last = wrapper.optimizer
        if isinstance(model, ActsBeforeUpdate):
            first.register_step_pre_hook(lambda *_: model.before_update())
        if isinstance(model, ActsAfterUpdate):
            last.register_step_post_hook(lambda *_: model.after_update())

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Tell the model where training stands."""
        model = unwrap(runner.model)
        if isinstance(model, FollowsTraining):
            model.set_progress(progress_of(runner))
