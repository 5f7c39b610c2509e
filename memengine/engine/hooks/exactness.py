"""A guard of the promise: now and then a step is carried out also plainly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from mmengine.hooks import Hook
from torch.nn.parallel import DistributedDataParallel

from memengine.engine.checkpoint.state import is_sharded_model
from memengine.engine.faults.exactness import Gradients, PlainStep, difference, gradients_of
from memengine.engine.hooks.batches import count_images
from memengine.engine.hooks.technique import TechniqueHook
from memengine.engine.optim.optim_wrapper import OptimWrapper
from memengine.engine.step import unwrap
from memengine.technique import Handle
from memengine.techniques.optimizer_memory.in_backward import TECHNIQUE as IN_BACKWARD
from memengine.techniques.sharding.shard_model import TECHNIQUE as SHARDING

# Far above what another order of sums makes of one parameter's gradient: slices of convnext_atto
# (layer scales of 1e-6) gave 2e-6 in fp32 and 0.07 in bf16, those of five others a tenth of it.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 0.3}


class ExactnessError(RuntimeError):
    """The gradient of a step is not that of the plain one."""


class ExactnessHook(Hook):
    """Compares the gradient of every n-th step with that of the plain step, before the update.

    The config's key ``verify_exactness`` is short for it. What is learned stays the same, bit for
    bit. The figure is logged as ``exactness/error``.

    Args:
        every: Iterations from one comparison to the next; the first iteration is compared.
        samples: Of a batch, on which both are carried out beside the step; None compares the step
            itself, until the plain one runs out of memory.
        tolerance: Largest relative error of any parameter's gradient; None for 1e-3, in fp16 0.05
            and in bf16 0.3, and with lossy techniques for any.

    Attributes:
        plain: Finds the plain gradient, while training goes on.

    Raises:
        ValueError: For a setting out of range; before training, when there is no plain step.
        ExactnessError: In training, beyond the tolerance, on all ranks.

    Cost: in those iterations the plain step's forward and backward, its memory, and a copy each of
    what the model holds and of the gradient. In others nothing.
    """

    priority = 'LOWEST'  # what others draw and set before a step is there

    def __init__(
        self, every: int = 1000, samples: int | None = None, tolerance: float | None = None
    ) -> None:
        for name, value in (('every', every), ('samples', samples)):
            if value is not None and value < 1:
                raise ValueError(f'verify_exactness.{name} must be at least 1, got {value}')
        if tolerance is not None and not tolerance > 0:
            raise ValueError(f'verify_exactness.tolerance must be positive, got {tolerance}')
        self.every, self.samples, self.tolerance = every, samples, tolerance
        self._wrapper: Any = None
        self.plain: PlainStep | None = None
        self._limit, self._words = math.inf, ''

    @classmethod
    def of_key(cls, value: Any) -> dict[str, Any] | None:
        """What the config's key ``verify_exactness`` stands for; None when it is off."""
        if not value:
            return None
        return dict(type=cls, **(value if isinstance(value, Mapping) else {}))

    def before_train(self, runner: Any) -> None:
        """Find out what is to be compared.

        Raises:
            ValueError: When there is no plain step to be had.
        """
        self._wrapper, module = runner.optim_wrapper, unwrap(runner.model)
        if not isinstance(self._wrapper, OptimWrapper):
            raise ValueError(
                f'verify_exactness: optim_wrapper is {type(self._wrapper).__name__}, of which it '
                "does not know when a gradient is whole; use memengine's OptimWrapper, or one in "
                'slices'
            )
        if self._wrapper.updates_in_backward:
            raise IN_BACKWARD.refusal('verify_exactness')
        if is_sharded_model(module):
            raise SHARDING.refusal('verify_exactness')
        hooks = [hook for hook in runner.hooks if isinstance(hook, TechniqueHook)]
        applied = [(hook.technique, hook.handle) for hook in hooks if hook.handle is not None]
        for technique, handle in applied:
            if type(handle).paused is Handle.paused:
                raise ValueError(
                    f'verify_exactness and {technique.key} do not go together: '
                    f'{type(handle).__name__} has no method paused(), so there is no plain step; '
                    'define it, or leave one of the two out'
                )
        lossy = [technique.key for technique, _ in applied if technique.exactness == 'lossy']
        self.plain = PlainStep(
            self._wrapper,
            module,
            [handle for _, handle in applied],
            self.samples,
            runner.logger.warning,
        )
        if self.tolerance is None:
            self._limit = math.inf if lossy else _TOLERANCES[self._wrapper.precision.dtype]
        else:
            self._limit = self.tolerance
        self._words = f', of which {" and ".join(lossy)} may be the cause' if lossy else ''

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Find the plain gradient."""
        if runner.iter % self.every:
            return
        plain = self.plain
        assert plain is not None
        size = count_images(data_batch, runner.train_dataloader)
        before = [None if p.grad is None else p.grad.clone() for p in plain.parameters]
        expected = plain.gradient(data_batch, size)
        if plain.samples is not None:
            self._judge(runner, plain.techniques_gradient(data_batch, size), expected)
            return
        for gradient, earlier in zip(expected, before, strict=True):
            if earlier is not None:
                gradient += earlier
        if isinstance(runner.model, DistributedDataParallel) and self._wrapper.should_sync():
            ranks = dist.get_world_size(runner.model.process_group)
            for gradient in expected:
                dist.all_reduce(gradient, group=runner.model.process_group)
                gradient /= ranks

        def compare() -> None:
            self._wrapper.on_gradient = None
            self._judge(runner, gradients_of(plain.parameters), expected)

        self._wrapper.on_gradient = compare

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Refuse a step that has not asked.

        Raises:
            ValueError: When the step was carried out by something else.
        """
        if self._wrapper.on_gradient is not None:
            raise ValueError(
                f'verify_exactness: {type(unwrap(runner.model)).__name__}.train_step has not '
                'called the update of optim_wrapper, so there was nothing to compare; have it call '
                'memengine.engine.run_step'
            )

    def _judge(self, runner: Any, actual: Gradients, expected: Gradients) -> None:
        module = unwrap(runner.model)
        found = difference(module, actual, expected)
        may_overflow = self._wrapper.precision.scaler is not None
        if all(found.not_finite) or (may_overflow and any(found.not_finite)):
            runner.logger.warning(
                f'verify_exactness: the gradient of iteration {runner.iter + 1} is not finite: it '
                'is not compared'
            )
            return
        runner.message_hub.update_scalar('train/exactness/error', found.error)
        assert self.plain is not None
        part = '' if self.plain.samples is None else f' of {self.plain.samples} samples'
        what = (
            f"the gradient{part} differs from the plain step's by {found.error:.1e} "
            f'({found.parameter}){self._words}'
        )
        if not found.error <= self._limit:
            raise ExactnessError(
                f'{what} in iteration {runner.iter + 1}, more than verify_exactness.tolerance='
                f'{self._limit:g}: training stops before the update. Leave out one technique after '
                'the other to see which it is, and please report it'
            )
        runner.logger.info(f'Exactness, iteration {runner.iter + 1}: {what}')
