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

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

from mmengine.model import BaseModel, is_model_wrapper
from mmengine.optim import OptimWrapper
from torch import Tensor, nn

__all__ = ['Progress', 'run_step', 'unwrap']


@dataclass(frozen=True)
class Progress:
    """Where training stands, for quantities that follow a schedule.

    Attributes:
        iter: Iterations done.
        max_iters: Iterations in all.
        epoch: Epochs done (in iteration-based training, passes over the data).
        max_epochs: Epochs in all.
    """

    iter: int
    max_iters: int
    epoch: int
    max_epochs: int


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside its wrapper (DDP, FSDP, ...), or the model itself."""
    return cast(nn.Module, model.module) if is_model_wrapper(model) else model


def run_step(model: nn.Module, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
    """Carry out one training step: forward, backward and, when due, the update.

    An OptimWrapper with a method ``carry_out`` (``AccumulationOptimWrapper``,
    ``GradCacheOptimWrapper``) runs the batch in slices. All network calls go through ``model``'s
    own ``forward``, so that DDP and FSDP see them.

    Args:
        model: The algorithm, wrapped or not.
        data: One batch as the data loader gave it.
        optim_wrapper: Decides about precision, accumulation, clipping and the update.

    Returns:
        Scalars to log by name: the loss, its parts and what else the model reports.
    """
    module = cast(BaseModel, unwrap(model))
    if hasattr(optim_wrapper, 'carry_out'):
        with optim_wrapper.sync_context(model):
            losses = optim_wrapper.carry_out(model, **module.data_preprocessor(data, True))
        _, log_vars = module.parse_losses(losses)
        optim_wrapper.finish_step()
        return log_vars
    with optim_wrapper.optim_context(model):
        batch = module.data_preprocessor(data, True)
        losses = (
            model(**batch, mode='loss') if isinstance(batch, dict) else model(*batch, mode='loss')
        )
    loss, log_vars = module.parse_losses(losses)
    # DDP asks in forward whether gradients are to be reduced, FSDP in backward.
    with getattr(optim_wrapper, 'sync_context', nullcontext)(model):
        optim_wrapper.update_params(loss)
    return log_vars
