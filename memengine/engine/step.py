"""The step contract: one function carries out a training step, whatever wraps the model.

A model says how its loss is built, the OptimWrapper decides how the step is carried out::

    data --> targets (no gradient)          model.forward(..., mode='loss')
         --> embed (heavy, any slice)
         --> loss on the embeddings (light)
    loss --> backward, clipping, update     optim_wrapper.update_params(loss)

The algorithms' base class and every model wrapper call :func:`run_step`, because MMEngine's
wrappers never call the wrapped model's own ``train_step``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from mmengine.model import BaseModel, is_model_wrapper
from mmengine.optim import OptimWrapper
from torch import Tensor, nn

from memengine._torch_private.ops import do_not_compile
from memengine.techniques.modules.fetched_later import FetchedLater


@dataclass(frozen=True)
class Progress:
    """Where training stands, for quantities that follow a schedule.

    Attributes:
        iter: Iterations done.
        max_iters: Iterations in all.
        epoch: Epochs done (in iteration-based training, passes over the data).
        max_epochs: Epochs in all; a pass that is cut short counts.
    """

    iter: int
    max_iters: int
    epoch: int
    max_epochs: int


@runtime_checkable
class CountsPasses(Protocol):
    """A training loop that counts iterations, and knows how many passes over the data they are."""

    @property
    def passes(self) -> int:
        """Passes that are done."""

    @property
    def max_passes(self) -> int:
        """Passes in all."""


def progress_of(runner: Any) -> Progress:
    """Where the training of a runner stands.

    MMEngine's loop over iterations says that it is in epoch 0 for good.
    """
    epoch, max_epochs = runner.epoch, runner.max_epochs
    if isinstance(loop := runner.train_loop, CountsPasses):
        epoch, max_epochs = loop.passes, loop.max_passes
    return Progress(runner.iter, runner.max_iters, epoch, max_epochs)


@runtime_checkable
class StepRunner(Protocol):
    """What :func:`run_step` asks of an OptimWrapper; memengine's are such, MMEngine's are not."""

    def train_step(self, model: nn.Module, data: Any) -> dict[str, Tensor]:
        """Carry out one training step of a model, wrapped or not; scalars to log."""


@runtime_checkable
class SlicedModel(Protocol):
    """What a step in slices asks of a model; see :class:`memengine.models.Algorithm`."""

    additive: bool
    coupled: bool

    def targets(self, inputs: Any, data_samples: Any, size: Any) -> Any:
        """What is computed once per batch, without gradient."""

    def slices(self, inputs: Any, data_samples: Any, size: Any) -> list[Any]:
        """How a batch is cut."""

    def slice_loss(self, embeddings: Any, targets: Any, piece: Any) -> dict[str, Tensor]:
        """Additive losses of a slice."""

    def batch_losses(self, sums: dict[str, Tensor], targets: Any) -> dict[str, Tensor]:
        """What is logged of the sums of the additive losses."""

    def coupled_part(self, embeddings: Any, piece: Any) -> Any:
        """What the coupled loss reads of a slice's embeddings."""

    def coupled_loss(self, embeddings: Any, targets: Any, data_samples: Any) -> dict[str, Tensor]:
        """Losses in which samples meet."""

    def join(self, embeddings: Sequence[Any]) -> Any:
        """The towers' embeddings, as the coupled loss takes them."""

    def tower(self, name: str | None) -> nn.Module:
        """The encoder of that name."""

    def frozen(self, name: str | None) -> nn.Module | None:
        """What leads that encoder and has nothing to be trained."""


class LogVars(dict[str, Tensor]):
    """Scalars to log by name, copied to the host without waiting for their device.

    The copy is ordered when this is made, before the update: the guard that looks at the loss and
    the gradient waits for both, once.
    """

    @do_not_compile
    def __init__(self, log_vars: Mapping[str, Tensor]) -> None:
        super().__init__(log_vars)
        alike: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        for name, value in log_vars.items():
            if not value.is_cpu:
                alike.setdefault((value.device, value.dtype), {})[name] = value.detach()
        self._copied = [(list(v), FetchedLater(torch.stack([*v.values()]))) for v in alike.values()]

    def on_host(self) -> dict[str, Tensor]:
        """The scalars, on the CPU."""
        numbers = {
            name: number
            for names, copied in self._copied
            for name, number in zip(names, copied.tolist(), strict=True)
        }
        return {
            name: torch.tensor(numbers[name], dtype=value.dtype) if name in numbers else value
            for name, value in self.items()
        }


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside its wrapper (DDP, FSDP, ...), or the model itself."""
    return cast(nn.Module, model.module) if is_model_wrapper(model) else model


def run_step(model: nn.Module, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
    """Carry out one training step: forward, backward and, when due, the update.

    All network calls go through ``model``'s own ``forward``, so that DDP and FSDP see them.

    Args:
        model: The algorithm, wrapped or not.
        data: One batch as the data loader gave it.
        optim_wrapper: Decides how the step is carried out: precision, slices, accumulation,
            clipping and the update. One of MMEngine's runs the plain step.

    Returns:
        Scalars to log by name: the loss, its parts and what else the model reports.
    """
    log_vars = carry_out_step(model, data, optim_wrapper)
    return log_vars.on_host() if isinstance(log_vars, LogVars) else log_vars


def carry_out_step(model: nn.Module, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
    """The same, with what is logged as it is: on the model's device, with the loss's graph."""
    if isinstance(optim_wrapper, StepRunner):
        return optim_wrapper.train_step(model, data)
    return plain_step(model, data, optim_wrapper)


def plain_step(
    model: nn.Module,
    data: Any,
    optim_wrapper: OptimWrapper,
    backward_context: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Tensor]:
    """Forward, backward and update of the whole batch, by MMEngine's interface.

    Args:
        model, data: As in :func:`run_step`.
        optim_wrapper: Any that has ``optim_context`` and ``update_params``.
        backward_context: Called with the model; the context of backward. DDP asks in forward
            whether gradients are to be reduced, FSDP in backward.
    """
    module = cast(BaseModel, unwrap(model))
    with optim_wrapper.optim_context(model):
        batch = module.data_preprocessor(data, True)
        losses = (
            model(**batch, mode='loss') if isinstance(batch, dict) else model(*batch, mode='loss')
        )
    loss, log_vars = module.parse_losses(losses)
    with backward_context(model):
        optim_wrapper.update_params(loss)
    return log_vars
