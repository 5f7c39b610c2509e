"""What an algorithm is: the step contract's parts, as methods."""

from __future__ import annotations

from typing import Any

from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from torch import Tensor

from memengine.engine.step import Progress, run_step

__all__ = ['Algorithm', 'Embeddings']

Embeddings = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


class Algorithm(BaseModel):
    """A model that says how its loss is built.

    Subclasses define :meth:`embed`, :meth:`embedding_loss` and :meth:`features`, and if need
    be :meth:`targets`, :meth:`set_progress`, :meth:`before_update` and :meth:`after_update`.

    Attributes:
        coupled: Whether samples of a batch meet in the loss, so that it is not the mean of the
            losses of its parts. Such a model cannot be trained by accumulation.
    """

    coupled: bool = True

    def embed(self, inputs: Any, data_samples: Any = None) -> Embeddings:
        """The heavy part: inputs (any slice of the batch) to their embeddings."""
        raise NotImplementedError

    def embedding_loss(
        self, embeddings: Any, targets: Any, data_samples: Any = None
    ) -> dict[str, Tensor]:
        """The light part: all embeddings of the batch to losses, and other scalars to log."""
        raise NotImplementedError

    def features(self, inputs: Tensor) -> Tensor:
        """Images [B, C, H, W] to the features [B, D] that are evaluated."""
        raise NotImplementedError

    def targets(self, inputs: Any, data_samples: Any = None) -> Any:
        """What is computed once per batch, without gradient, before any slice is embedded."""
        return None

    def set_progress(self, progress: Progress) -> None:
        """Take note of where training stands; called before each iteration."""

    def before_update(self) -> None:
        """Called right before the optimiser steps, gradients being there."""

    def after_update(self) -> None:
        """Called right after the optimiser has stepped."""

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = 'tensor') -> Any:
        """One of three things.

        Args:
            inputs: Images [B, C, H, W], or a list of views of the batch.
            data_samples: Dict of tensors by sample, e.g. ``label`` [B].
            mode: ``'tensor'`` gives embeddings, ``'loss'`` a dict of losses and ``'predict'`` a
                list with ``{'feature': [D]}`` for each sample.

        Raises:
            ValueError: For another mode.
        """
        if mode == 'tensor':
            return self.embed(inputs, data_samples)
        if mode == 'loss':
            targets = self.targets(inputs, data_samples)
            return self.embedding_loss(self.embed(inputs, data_samples), targets, data_samples)
        if mode == 'predict':
            return [{'feature': feature} for feature in self.features(inputs)]
        raise ValueError(f"mode must be 'tensor', 'loss' or 'predict', got {mode!r}")

    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        """Carry out one training step; see :func:`memengine.engine.step.run_step`."""
        return run_step(self, data, optim_wrapper)

    def init_weights(self) -> None:
        """Initialise as ``init_cfg`` says; the parts have initialised themselves."""
        if self.init_cfg:
            super().init_weights()
