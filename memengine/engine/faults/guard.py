"""Whether a step may be carried out: its loss and its gradient are finite, on all ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from memengine.techniques.sharding.clipping import local_part

__all__ = ['BadStep', 'Guarded', 'OnNonFinite', 'StepGuard']

OnNonFinite = Literal['stop', 'skip', 'rollback']


@dataclass
class BadStep:
    """What is known of a step that was refused.

    Attributes:
        loss: The rank's own.
        grad_norm: Norm of the gradients that this rank holds or shares.
        gradient: Digest of the rank's gradients, bit for bit; see :func:`gradient_digest`.
        log_vars: What the step would have logged.
    """

    loss: float
    grad_norm: float
    gradient: str
    log_vars: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if math.isfinite(self.loss) and math.isfinite(self.grad_norm):
            return "another rank's loss or gradient is not finite"
        if math.isfinite(self.loss):
            return f'the norm of the gradient is {self.grad_norm} (the loss is {self.loss:.4g})'
        return f'the loss is {self.loss}'


class StepGuard:
    """Decides before an update whether it may be carried out, the same on all ranks.

    Args:
        most_overflows: Steps in a row that a gradient scaler may skip. By then it has halved its
            scale as often: a gradient that is not finite at 2**-24 of a scale is no overflow of it.

    Attributes:
        bad_step: The present iteration's, if it was refused.
        grad_norm: Of the last step that was looked at.
        refused: Steps that were refused since the last checkpoint that was newer than one before.
        has_updated: Whether a step has been carried out since the last checkpoint, and not taken
            back.
    """

    def __init__(self, most_overflows: int = 24) -> None:
        self.most_overflows = most_overflows
        self.bad_step: BadStep | None = None
        self.grad_norm = 0.0
        self.refused = 0
        self.has_updated = False
        self._overflows = 0

    def note_checkpoint(self) -> None:
        """A checkpoint was written: what was refused before it counts on if nothing else was."""
        if self.has_updated:
            self.refused, self.has_updated = 0, False

    def passes(
        self,
        loss: Tensor,
        grad_norm: Tensor,
        parameters: Iterable[Tensor],
        may_overflow: bool = False,
    ) -> bool:
        """Whether loss and gradient are finite on all ranks; every rank must ask.

        Args:
            loss: Scalar.
            grad_norm: Of all gradients together, scalar.
            parameters: Whose gradients it is the norm of.
            may_overflow: Whether a gradient scaler takes care of gradients that are not finite, as
                it is let to ``most_overflows`` times.

        Cost: one synchronisation with the device, and with several ranks an all-reduce of two
        numbers.
        """
        dtype = torch.promote_types(torch.promote_types(loss.dtype, grad_norm.dtype), torch.float32)
        loss = loss.detach().to(dtype)
        figures = torch.stack([loss, grad_norm.detach().to(loss)])
        is_bad = (~figures.isfinite()).to(dtype)
        if dist.is_initialized():
            dist.all_reduce(is_bad, dist.ReduceOp.MAX)
        own_loss, self.grad_norm, bad_loss, bad_gradient = torch.cat([figures, is_bad]).tolist()
        if may_overflow and not bad_loss:
            self._overflows = self._overflows + 1 if bad_gradient else 0
            if self._overflows <= self.most_overflows:
                return not bad_gradient
        if not (bad_loss or bad_gradient):
            return True
        self.refused += 1
        self.bad_step = BadStep(own_loss, self.grad_norm, gradient_digest(parameters))
        return False

    def to_log(self, log_vars: dict[str, Any]) -> dict[str, Any]:
        """What a step logs: nothing if it was refused, as one NaN would spoil every mean."""
        if self.bad_step is None:
            return log_vars
        self.bad_step.log_vars = log_vars
        return {}


def gradient_digest(parameters: Iterable[Tensor]) -> str:
    """A digest of gradients in which all NaNs are alike, as their bits mean nothing."""
    digest = hashlib.blake2b(digest_size=16)
    for grad in [parameter.grad for parameter in parameters if parameter.grad is not None]:
        local = local_part(grad).detach().to_dense()
        same_nans = torch.where(local.isnan(), torch.nan, local).cpu().reshape(-1)
        digest.update(same_nans.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@runtime_checkable
class Guarded(Protocol):
    """An optimiser wrapper that asks a guard before each update; memengine's do."""

    guard: StepGuard | None
    on_nonfinite: OnNonFinite
    nonfinite_limit: int
    precision: Any
    updates_in_backward: bool

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes that a step is cut into, by their settings."""

    @property
    def accumulative_counts(self) -> int:
        """Iterations to an update."""
