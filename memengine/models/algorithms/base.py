"""What an algorithm is: the step contract's parts, as methods; and the figure that many log.

Shapes: B samples, V views of each; N rows, D width of their features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from mmengine.model import BaseModel, BaseModule, PretrainedInit, initialize
from mmengine.optim import OptimWrapper
from torch import Tensor, nn
from torch.nn import functional as F

from memengine.engine.step import LogVars, Progress, run_step
from memengine.registry import PreprocessorConfig
from memengine.techniques.slices.slicing import Slice, join_slices, slice_views

Embeddings = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


def rows_of(inputs: Tensor | Sequence[Tensor]) -> Tensor:
    """A view [B, ...] as it is, several views as the rows of their concatenation [V * B, ...]."""
    return inputs if isinstance(inputs, Tensor) else torch.cat(list(inputs))


@torch.no_grad()
def feature_moments(features: Tensor) -> dict[str, Tensor]:
    """Sums over l2-normalised features [N, D]: of rows, values [D] and squares [D], in float64."""
    directions = F.normalize(features.double(), dim=-1)
    return {
        'rows': directions.new_full((), len(directions)),
        'feature_sum': directions.sum(dim=0),
        'feature_square_sum': directions.square().sum(dim=0),
    }


@torch.no_grad()
def feature_std(sums: Mapping[str, Tensor]) -> Tensor:
    """Mean standard deviation of the normalised features times sqrt(D), from their moments.

    1 when they are isotropic, 0 when all are alike. Scalar; 0 for a single row.
    """
    rows, total, squares = sums['rows'], sums['feature_sum'], sums['feature_square_sum']
    variance = (squares - total.square() / rows).clamp_min(0) / (rows - 1).clamp_min(1)
    return variance.sqrt().mean() * math.sqrt(len(total))


@torch.no_grad()
def feature_rank(features: Tensor) -> Tensor:
    """Number of dimensions in which l2-normalised, centred features [N, D] are spread.

    The participation ratio (sum)^2 / (sum of squares) of the eigenvalues of their covariance: at
    most min(N - 1, D), 1 when all lie on a line; 0 for a single row. Scalar.

    Cost: N D min(N, D) multiply-adds and min(N, D)^2 values in float64; no synchronisation.

    Source: Garrido et al., RankMe (2023), for the sign; theirs is the entropy of the singular
    values, which needs a decomposition.
    """
    directions = F.normalize(features.double(), dim=-1)
    centred = directions - directions.mean(dim=0)
    rows, width = centred.shape
    gram = centred @ centred.T if rows < width else centred.T @ centred  # the same eigenvalues
    return gram.trace().square() / gram.square().sum().clamp_min(torch.finfo(gram.dtype).tiny)


def spread(features: Tensor, with_rank: bool = True) -> dict[str, Tensor]:
    """What is logged of how features [N, D] are spread, which tells whether they have collapsed."""
    figures = {'feature_std': feature_std(feature_moments(features))}
    return {**figures, 'feature_rank': feature_rank(features)} if with_rank else figures


class Algorithm(BaseModel):
    """A model that says how its loss is built, and how it is cut into slices.

    Subclasses define :meth:`embed`, :meth:`embedding_loss` and :meth:`features`, and if need
    be :meth:`targets`, :meth:`set_progress`, :meth:`before_update` and :meth:`after_update`.

    A loss may have additive terms, which are sums over slices of the batch, coupled ones, in which
    samples meet, or both. How a step is carried out in slices, in the order of the calls::

        targets = model.targets(inputs, data_samples, size)               # once
        for piece in model.slices(inputs, data_samples, size):
            embeddings = model(piece.inputs, piece.data_samples, mode='tensor')
            losses = model.slice_loss(embeddings, targets, piece)         # additive terms
            part = model.coupled_part(embeddings, piece)                  # if piece.coupled
        model.batch_losses(sums of the losses over the slices, targets)   # additive, for the log
        model.coupled_loss(model.join(all parts), targets, data_samples)  # coupled terms

    :meth:`embedding_loss` is all of it on the whole batch, which is the plain step.

    Args:
        data_preprocessor: Config of MMEngine's data preprocessor; by default data are moved to
            the model's device.
        init_cfg: MMEngine's initialisation config.

    Attributes:
        coupled: Whether the loss has terms in which samples of a batch meet, so that it is not the
            sum of the losses of its parts. Such a model cannot be trained by accumulation.
        additive: Whether the loss has terms that are sums over slices; those are
            :meth:`slice_loss`. By default they are all there is, or there are none.
    """

    coupled: bool = True
    is_init: bool  # MMEngine's: whether init_weights() has been called

    def __init__(
        self,
        data_preprocessor: PreprocessorConfig | nn.Module | None = None,
        init_cfg: dict[str, Any] | None = None,
    ) -> None:
        if data_preprocessor is None:
            data_preprocessor = {'type': 'BaseDataPreprocessor', 'non_blocking': True}
        super().__init__(data_preprocessor, init_cfg)
        self.data_preprocessor.register_forward_pre_hook(self._check_before_it_moves)
        self._frozen_parts: list[nn.Module] = []

    def freeze(self, part: nn.Module) -> None:
        """Fix a part for good: its parameters, and its dropout and batch statistics (eval mode)."""
        self._frozen_parts.append(part.requires_grad_(False).eval())

    def train(self, mode: bool = True) -> Algorithm:
        """Switch training mode; frozen parts stay out of it."""
        super().train(mode)
        for part in self._frozen_parts:
            part.eval()
        return self

    @property
    def additive(self) -> bool:
        """See above."""
        return not self.coupled

    def embed(self, inputs: Any, data_samples: Any = None) -> Embeddings:
        """The heavy part: inputs (the batch, or any slice of it) to their embeddings.

        Row i of an embedding belongs to row i of the inputs; several views of one size (a list of
        tensors, of any number of rows each) are the rows of their concatenation.
        """
        raise self._missing('embed', 'inputs to embeddings')

    def embedding_loss(
        self, embeddings: Any, targets: Any, data_samples: Any = None
    ) -> dict[str, Tensor]:
        """The light part: all embeddings of the batch to all losses, and other scalars to log."""
        raise self._missing('embedding_loss', 'embeddings to losses')

    def features(self, inputs: Tensor) -> Tensor:
        """Images [B, C, H, W] to the features [B, D] that are evaluated."""
        raise self._missing('features', 'images to the features that are evaluated')

    def targets(self, inputs: Any, data_samples: Any = None, size: Any = None) -> Any:
        """What is computed once per batch, without gradient, before any slice is embedded.

        Args:
            inputs: Of the batch.
            data_samples: Of the batch.
            size: As for :meth:`slices`; a network that is run here takes no more rows at a time.
        """
        return None

    def slices(self, inputs: Any, data_samples: Any, size: Any) -> list[Slice]:
        """How a batch is cut: one view by sample, views of one size by their rows.

        Args:
            inputs: Of the batch.
            data_samples: Of the batch.
            size: Most rows (images) in a slice; a model with several towers also takes a dict of
                sizes by tower.

        Returns:
            Slices that hold every row once, in order.
        """
        return slice_views(inputs, data_samples, size)

    def slice_loss(self, embeddings: Any, targets: Any, piece: Slice) -> dict[str, Tensor]:
        """Losses of a slice, whose sums over all slices are the batch's; if ``additive``.

        Entries without ``loss`` in their name are summed too, and may have any shape.
        """
        raise self._missing('slice_loss', "a slice's embeddings to its part of the losses")

    def _missing(self, method: str, purpose: str) -> NotImplementedError:
        return NotImplementedError(
            f'{type(self).__name__} does not define {method}(): {purpose}; see '
            'memengine.models.Algorithm'
        )

    def batch_losses(self, sums: dict[str, Tensor], targets: Any) -> dict[str, Tensor]:
        """What is logged of the sums of :meth:`slice_loss`, as :meth:`embedding_loss` gives it."""
        return sums

    def coupled_part(self, embeddings: Any, piece: Slice) -> Any:
        """What :meth:`coupled_loss` reads of a slice's embeddings; by default all of them.

        Only slices with ``coupled`` set are asked. Tensors hold samples in dimension 0; those of
        slices are concatenated in the slices' order.
        """
        return embeddings

    def coupled_loss(
        self, embeddings: Any, targets: Any, data_samples: Any = None
    ) -> dict[str, Tensor]:
        """Losses in which samples meet, of what is read of all slices; if ``coupled``.

        By default :meth:`embedding_loss`, which is right where there are no others.
        """
        if self.additive:
            raise self._missing('coupled_loss', 'what couples samples, without the additive losses')
        return self.embedding_loss(embeddings, targets, data_samples)

    def join(self, embeddings: Sequence[Any]) -> Any:
        """Embeddings of slices, in their order, to embeddings as :meth:`coupled_loss` takes them.

        Dicts need not have the same keys: each entry is joined from the slices that have it.
        """
        if not all(isinstance(part, dict) for part in embeddings):
            return join_slices(embeddings)
        names = dict.fromkeys(name for part in embeddings for name in part)
        return {
            name: join_slices([part[name] for part in embeddings if name in part]) for name in names
        }

    def tower(self, name: str | None) -> nn.Module:
        """The encoder that slices with this ``tower`` go through, to see whether it is trained."""
        return self

    def frozen(self, name: str | None) -> nn.Module | None:
        """What leads that encoder and has nothing to be trained; called once in each forward."""
        return None

    def set_progress(self, progress: Progress) -> None:
        """Take note of where training stands; called before each iteration."""

    def before_update(self) -> None:
        """Called right before the optimiser steps, gradients being there."""

    def after_update(self) -> None:
        """Called right after the optimiser has stepped."""

    def check_batch(self, data_samples: Any) -> None:
        """Raise ValueError for a batch that cannot be learned from, where it still is the host's.

        Called before a batch moves to the model's device, which then is not waited for.
        """

    def _check_before_it_moves(self, preprocessor: nn.Module, given: tuple[Any, ...]) -> None:
        data, is_training = (*given, False)[:2]
        if is_training and isinstance(data, Mapping):
            self.check_batch(data.get('data_samples'))

    def parse_losses(self, losses: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and what is logged, which is on its way to the host before the update is."""
        loss, log_vars = super().parse_losses(losses)
        return loss, LogVars(log_vars)

    def predict(self, inputs: Any, data_samples: Any = None) -> list[dict[str, Tensor]]:
        """What metrics get of each sample."""
        return [{'feature': feature} for feature in self.features(inputs)]

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = 'tensor') -> Any:
        """One of three things.

        Args:
            inputs: Images [B, C, H, W], or a list of views of the batch.
            data_samples: Dict of tensors by sample, e.g. ``label`` [B].
            mode: ``'tensor'`` gives embeddings, ``'loss'`` a dict of losses and ``'predict'`` a
                list with a dict (``{'feature': [D]}``) for each sample.
        """
        if mode == 'tensor':
            return self.embed(inputs, data_samples)
        if mode == 'loss':
            targets = self.targets(inputs, data_samples)
            return self.embedding_loss(self.embed(inputs, data_samples), targets, data_samples)
        if mode == 'predict':
            return self.predict(inputs, data_samples)
        raise ValueError(f"mode must be 'tensor', 'loss' or 'predict', got {mode!r}")

    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        """Carry out one training step; see :func:`memengine.engine.step.run_step`."""
        return run_step(self, data, optim_wrapper)

    def after_init(self) -> None:
        """Called when parameters have been given the values that they start from.

        That is where the model was built without any (on ``meta``), and where ``init_cfg`` or a
        part of MMEngine's kind has drawn others.
        """

    def init_weights(self) -> None:
        """Initialise once, as ``init_cfg`` says, and parts of MMEngine's kind as they say.

        All others have initialised themselves. The order is MMEngine's: what a part says comes
        after what the algorithm does, but for ``Pretrained``.
        """
        if self.is_init:
            return
        configs = [self.init_cfg] if isinstance(self.init_cfg, dict) else self.init_cfg or []
        read = [config for config in configs if config['type'] in ('Pretrained', PretrainedInit)]
        drawn = [config for config in configs if config not in read]
        parts = [part for part in _initializers_in(self) if not part.is_init]
        initialize(self, drawn)
        for part in parts:
            part.init_weights()
        if drawn or parts:
            self.after_init()
        initialize(self, read)
        self.is_init = True


def _initializers_in(module: nn.Module) -> Iterator[BaseModule]:
    """The outermost of MMEngine's modules within that say what they start from.

    Those that do not would have a timm model inside draw anew what it has loaded.
    """
    for child in module.children():
        kind: Any = type(child)
        is_one = isinstance(child, BaseModule)
        if is_one and (child.init_cfg or kind.init_weights is not BaseModule.init_weights):
            yield child
        else:
            yield from _initializers_in(child)
