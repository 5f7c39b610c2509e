"""A training step as prediction and measurement take it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer


@dataclass
class TrainingStep:
    """One step of training: forward, backward and update.

    Attributes:
        run: Carries it out; called several times, as the optimiser has its state after the first.
        model: What is trained. Its parts that are not trained, such as a teacher, belong to it.
        optimizer: What updates it.
        batch: What ``run`` is about: tensors in containers.
        buckets: What DDP holds beside gradients: copies of them, which ranks exchange.
        is_settled: Whether nothing decides in the first step how those that follow are carried out.
        iterations: How often ``run`` goes through the batch.
    """

    run: Callable[[], Any]
    model: nn.Module
    optimizer: Optimizer | None = None
    batch: Any = None
    buckets: Any = None
    is_settled: bool = False
    iterations: int = 1
