"""Techniques that are applied to a model, from a config: one hook for all of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, ClassVar

from mmengine.hooks import Hook
from torch import Tensor, nn

from memengine.engine.step import unwrap
from memengine.registry import HOOKS
from memengine.technique import (
    Handle,
    Settings,
    StepInfo,
    Technique,
    in_order,
    settings_of,
    techniques,
)

_ENTRY = 'techniques'  # of checkpoints


class TechniqueHook(Hook):
    """Applies a technique to the model for the time of training.

    The config's key of the technique is short for it; each technique has one by its own name, such
    as ``DropITHook``, whose arguments are its settings. What was done in the first iteration is
    logged.

    Raises:
        ValueError: For settings that cannot be, when it cannot be applied, and after the first
            iteration when it did nothing, unless ``strict=False``.
    """

    technique: ClassVar[Technique[Any]]

    def __init__(self, *values: Any, **named: Any) -> None:
        given = inspect.signature(self.technique.settings).bind_partial(*values).arguments
        self.settings: Settings = self.technique.set_to({**given, **named})
        self._handle: Handle | None = None
        self._resumed: dict[str, Any] | None = None  # until it is applied, as MMEngine loads first
        self._is_reported = False

    def before_train(self, runner: Any) -> None:
        """Begin under MMEngine's own Runner; memengine's has done so before it loads weights."""
        if self._handle is None:
            apply_in_order(unwrap(runner.model), runner.hooks)

    @property
    def handle(self) -> Handle | None:
        """The technique at work, while it is."""
        return self._handle

    def apply(self, model: nn.Module) -> None:
        """Begin; called by :func:`apply_in_order`."""
        assert self.technique.apply is not None, 'hooks are made of such techniques only'
        self._handle = self.technique.apply(model, self.settings)
        self._is_reported = False
        self._go_on()

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Let the technique follow its schedule."""
        module: Any = unwrap(runner.model)

        def loss() -> Tensor:
            batch = module.data_preprocessor(data_batch, True)
            with runner.optim_wrapper.optim_context(module):
                losses = module(**batch, mode='loss')
            return module.parse_losses(losses)[0]

        if self._handle is not None:
            self._handle.before_step(StepInfo(runner.iter, loss, runner.logger.info))

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Say once what was done."""
        report = None if self._handle is None or self._is_reported else self._handle.report()
        if report is None:
            return
        self._is_reported = True
        if report.done:
            runner.logger.info(report.done)
        elif self.settings.strict:
            raise ValueError(f'{report.left}; or set strict=False to go on')
        if report.left:
            runner.logger.warning(report.left)

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Save what later steps follow from."""
        state = {} if self._handle is None else self._handle.run_state()
        if state:
            checkpoint.setdefault(_ENTRY, {})[self.technique.key] = state

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Go on from it, where a run is resumed."""
        if runner._resume:
            self._resumed = checkpoint.get(_ENTRY, {}).get(self.technique.key)
            self._go_on()

    def _go_on(self) -> None:
        if self._resumed and self._handle is not None:
            self._handle.load_run_state(self._resumed)
            self._resumed = None

    def after_train(self, runner: Any) -> None:
        """Leave the model as it was."""
        if self._handle is not None:
            self._handle.undo()
            self._handle = None


def apply_in_order(model: nn.Module, hooks: Iterable[Hook]) -> list[TechniqueHook]:
    """Apply the techniques of hooks in the one order."""
    found = [hook for hook in hooks if isinstance(hook, TechniqueHook)]
    order = [technique.key for technique in in_order(techniques().values())]
    found.sort(key=lambda hook: order.index(hook.technique.key))
    for hook in found:
        hook.apply(model)
    return found


def register_hooks() -> dict[str, type[TechniqueHook]]:
    """Make a hook for each technique that is applied to a built model, and register it."""
    hooks = {}
    for technique in techniques().values():
        name = technique.hook_name
        if technique.apply is None or technique.stage == 'before_wrap':
            continue
        if name not in HOOKS.module_dict:
            HOOKS.register_module(name=name, module=_hook_class(technique))
        hooks[name] = HOOKS.module_dict[name]
    return hooks


def _hook_class(technique: Technique[Any]) -> type[TechniqueHook]:
    arguments = '\n'.join(
        f'    {name}: {one.field.metadata["help"]}.'
        for name, one in settings_of(technique.settings).items()
    )
    attributes = {
        'technique': technique,
        '__doc__': f"Applies {technique.title} for the time of training.\n\nThe config's key "
        f'``{technique.key}`` is short for it.\n\nArgs:\n{arguments}\n',
        '__module__': __name__,
        '__signature__': inspect.signature(technique.settings),
    }
    return type(technique.hook_name, (TechniqueHook,), attributes)
