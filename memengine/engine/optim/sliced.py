"""Steps in slices: a batch of any size in the memory of one slice, with the plain step's gradient.

The techniques are :mod:`memengine.techniques.slicing` and :mod:`memengine.techniques.grad_cache`;
here they are given the model's slices and this engine's precision and synchronisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from memengine.engine.optim.optim_wrapper import OptimWrapper
from memengine.engine.step import unwrap
from memengine.registry import OPTIM_WRAPPERS
from memengine.techniques.grad_cache import Tower, cached_step
from memengine.techniques.slicing import additive_step

__all__ = ['AccumulationOptimWrapper', 'GradCacheOptimWrapper']


def _check_size(setting: str, size: Any) -> None:
    sizes = size.values() if isinstance(size, Mapping) else [size]
    for number in sizes:
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f'{setting} must be a number of images, at least 1, got {size!r}')


def _sliceable(model: nn.Module, wrapper: OptimWrapper) -> Any:
    """The bare model, if it says how it is cut into slices."""
    module = unwrap(model)
    if not hasattr(module, 'slices') or not hasattr(module, 'coupled'):
        raise ValueError(
            f'{type(wrapper).__name__}: {type(module).__name__} does not say how a batch of it is '
            'cut into slices; derive it from memengine.models.Algorithm, or use OptimWrapper'
        )
    return module


def _encode(model: nn.Module, piece: Any) -> Any:
    return model(piece.inputs, piece.data_samples, mode='tensor')


@OPTIM_WRAPPERS.register_module()
class AccumulationOptimWrapper(OptimWrapper):
    """Carries an additive loss out slice by slice, within one iteration.

    Args:
        optimizer: The optimiser.
        micro_batch_size: Most images in a slice; for multi-crop, most crops of the largest size,
            or as many smaller ones as have no more pixels.
        **kwargs: As :class:`OptimWrapper`'s; ``accumulative_counts`` goes on meaning iterations.

    Raises:
        ValueError: For a size below 1; in a step, when samples meet in the model's loss, or it
            does not say how it is sliced.

    Cost: saved bytes of one slice; nothing is computed twice. Gradients are reduced over ranks
    once, in the last slice. BatchNorm: see
    :func:`memengine.techniques.slicing.additive_step`.
    """

    def __init__(self, optimizer: Optimizer, micro_batch_size: int, **kwargs: Any) -> None:
        _check_size('micro_batch_size', micro_batch_size)
        super().__init__(optimizer, **kwargs)
        self.micro_batch_size = micro_batch_size

    def carry_out(
        self, model: nn.Module, inputs: Any, data_samples: Any = None
    ) -> dict[str, Tensor]:
        """Add the batch's gradient; the losses, without graph."""
        module = _sliceable(model, self)
        if module.coupled:
            raise ValueError(
                f'AccumulationOptimWrapper: samples meet in the loss of {type(module).__name__}, '
                'so slices of the batch would train another objective; use '
                "optim_wrapper.type='GradCacheOptimWrapper' with chunk_size="
                f'{self.micro_batch_size}'
            )
        with self.precision.autocast():
            targets = module.targets(inputs, data_samples)
        sums = additive_step(
            module.slices(inputs, data_samples, self.micro_batch_size),
            lambda piece: module.slice_loss(_encode(model, piece), targets, piece),
            modules=[model],
            context=self.precision.autocast,
            backward=self.add_gradient,
        )
        return module.batch_losses(sums, targets)


@OPTIM_WRAPPERS.register_module()
class GradCacheOptimWrapper(OptimWrapper):
    """Carries a coupled loss (SimCLR, SupCon, CLIP, ...) out in the memory of one slice.

    Args:
        optimizer: The optimiser.
        chunk_size: Most images in a slice; for models with several towers also a dict by tower.
        keep_graph: Slices whose graph is kept from the first pass and not computed again.
        **kwargs: As :class:`OptimWrapper`'s.

    Raises:
        ValueError: For a size below 1 or a negative ``keep_graph``; in a step, when the model's
            loss is additive, or it does not say how it is sliced.

    Cost: one extra forward of each slice but the ``keep_graph`` last; see
    :func:`memengine.techniques.grad_cache.cached_step`, also for randomness and BatchNorm.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        chunk_size: int | Mapping[str, int],
        keep_graph: int = 0,
        **kwargs: Any,
    ) -> None:
        _check_size('chunk_size', chunk_size)
        if keep_graph < 0:
            raise ValueError(f'keep_graph must be a number of slices, got {keep_graph}')
        super().__init__(optimizer, **kwargs)
        self.chunk_size = chunk_size
        self.keep_graph = keep_graph

    def carry_out(
        self, model: nn.Module, inputs: Any, data_samples: Any = None
    ) -> dict[str, Tensor]:
        """Add the batch's gradient; the losses, without graph."""
        module = _sliceable(model, self)
        if not module.coupled:
            size = self.chunk_size if isinstance(self.chunk_size, int) else 16
            raise ValueError(
                f'GradCacheOptimWrapper: the loss of {type(module).__name__} is additive, so its '
                'slices need no second forward; use '
                f"optim_wrapper.type='AccumulationOptimWrapper' with micro_batch_size={size}"
            )
        with self.precision.autocast():
            targets = module.targets(inputs, data_samples)
        pieces = module.slices(inputs, data_samples, self.chunk_size)
        towers = [
            Tower(model, list(some), _encode, part=module.tower(name))
            for name, some in groupby(pieces, key=attrgetter('tower'))
        ]

        def loss(*embeddings: Any) -> dict[str, Tensor]:
            return module.embedding_loss(module.join(embeddings), targets, data_samples)

        return cached_step(
            towers,
            loss,
            keep_graph=self.keep_graph,
            context=self.precision.autocast,
            backward=self.add_gradient,
        )
