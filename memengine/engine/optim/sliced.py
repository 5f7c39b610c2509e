"""Steps in slices: a batch of any size in the memory of one slice, with the plain step's gradient.

The techniques are those of :mod:`memengine.techniques.slices`; here they are given the model's
slices and this engine's precision and synchronisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeAlias

from mmengine.logging import MMLogger
from torch import Tensor, nn
from torch.optim import Optimizer

from memengine.engine.optim.kept_graphs import KeptGraphs
from memengine.engine.optim.optim_wrapper import OptimWrapper
from memengine.engine.step import unwrap
from memengine.registry import OPTIM_WRAPPERS
from memengine.techniques.modules.running_statistics import layers_with_batch_statistics
from memengine.techniques.slices.grad_cache import Tower, cached_step
from memengine.techniques.slices.out_of_memory import run_until_it_fits
from memengine.techniques.slices.slicing import Context, additive_step

__all__ = ['AccumulationOptimWrapper', 'GradCacheOptimWrapper']

Size: TypeAlias = float | Mapping[str, int]


def _check_size(setting: str, size: Any, fractions: bool = False) -> None:
    sizes = size.values() if isinstance(size, Mapping) else [size]
    kinds = (int, float) if fractions else int
    for number in sizes:
        if not isinstance(number, kinds) or isinstance(number, bool) or number < 1:
            raise ValueError(f'{setting} must be a number of images, at least 1, got {size!r}')


def _of_tower(size: Size, name: str | None) -> int:
    return size[name or ''] if isinstance(size, Mapping) else int(size)


def _halved(setting: str, size: Size) -> Size | None:
    """Half the size, said in the log; None when it is 1 already."""
    half: Size = (
        {tower: max(number // 2, 1) for tower, number in size.items()}
        if isinstance(size, Mapping)
        else max(int(size / 2), 1)
    )
    if half == size:
        return None
    MMLogger.get_current_instance().warning(
        f'Out of memory: {setting} goes from {size} to {half}. The step is repeated, and the run '
        f'goes on as one with optim_wrapper.{setting}={half}.'
    )
    return half


def _sliceable(model: nn.Module, wrapper: OptimWrapper) -> Any:
    """The bare model, if it says how it is cut into slices."""
    module = unwrap(model)
    if not hasattr(module, 'slices') or not hasattr(module, 'coupled'):
        raise ValueError(
            f'{type(wrapper).__name__}: {type(module).__name__} does not say how a batch of it is '
            'cut into slices; derive it from memengine.models.Algorithm, or use OptimWrapper'
        )
    return module


def _tell_of_batch_statistics(module: nn.Module) -> None:
    layers = layers_with_batch_statistics(module)
    if layers:
        MMLogger.get_current_instance().warning(
            f'{len(layers)} BatchNorm layers ({layers[0]}, ...) normalise by the statistics of '
            'each slice and not of the batch, as they would on as many ranks: the size of the '
            'slices has a part in what is learned. Layers in eval mode or other norms have not.'
        )


def _encode(model: nn.Module, piece: Any) -> Any:
    return model(piece.inputs, piece.data_samples, mode='tensor')


@OPTIM_WRAPPERS.register_module()
class AccumulationOptimWrapper(OptimWrapper):
    """Carries an additive loss out slice by slice, within one iteration.

    Args:
        optimizer: The optimiser.
        micro_batch_size: Most images in a slice; for multi-crop, most crops of the largest size,
            or as many smaller ones as have no more pixels (there 1.5 makes room for more of the
            smaller ones). Halved when a step runs out of memory;
            see :func:`memengine.techniques.slices.out_of_memory.run_until_it_fits`.
        **kwargs: As :class:`OptimWrapper`'s; ``accumulative_counts`` goes on meaning iterations.

    Raises:
        ValueError: For a size below 1; in a step, when samples meet in the model's loss, or it
            does not say how it is sliced.

    Cost: saved bytes of one slice; nothing is computed twice. Gradients are reduced over ranks
    once, in the last slice. BatchNorm: see
    :func:`memengine.techniques.slices.slicing.additive_step`.
    """

    def __init__(self, optimizer: Optimizer, micro_batch_size: float, **kwargs: Any) -> None:
        _check_size('micro_batch_size', micro_batch_size, fractions=True)
        super().__init__(optimizer, **kwargs)
        self.micro_batch_size = micro_batch_size
        self._is_first_step = True

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
        if self._is_first_step:
            _tell_of_batch_statistics(module)
            self._is_first_step = False

        def step(exchange: Context) -> Any:
            with exchange(), self.precision.autocast():
                targets = module.targets(inputs, data_samples, self.micro_batch_size)
            sums = additive_step(
                module.slices(inputs, data_samples, self.micro_batch_size),
                lambda piece: module.slice_loss(_encode(model, piece), targets, piece),
                modules=[model],
                context=self.precision.autocast,
                backward=self.add_gradient,
                exchange=exchange,
            )
            return sums, targets

        return module.batch_losses(*run_until_it_fits(step, self._shrink, model))

    def _shrink(self) -> bool:
        half = _halved('micro_batch_size', self.micro_batch_size)
        if isinstance(half, (int, float)):
            self.micro_batch_size = half
        return half is not None


@OPTIM_WRAPPERS.register_module()
class GradCacheOptimWrapper(OptimWrapper):
    """Carries a coupled loss (SimCLR, SupCon, CLIP, ...) out in the memory of one slice.

    Args:
        optimizer: The optimiser.
        chunk_size: Most images in a slice; for models with several towers also a dict by tower.
            Halved when a step runs out of memory; see
            :func:`memengine.techniques.slices.out_of_memory.run_until_it_fits`.
        keep_graph: Slices whose graph is kept from the first pass and not computed again;
            ``'auto'`` for as many as memory has room for, measured in the first iterations.
        forward_chunk_size: Most images in a forward of the graph-free pass, if more than
            ``chunk_size``. Refused for models that draw random numbers or use batch statistics.
        **kwargs: As :class:`OptimWrapper`'s.

    Raises:
        ValueError: For a size below 1, a negative ``keep_graph``, or a ``forward_chunk_size``
            that does not hold two chunks; in a step, when the model's loss is additive, or it does
            not say how it is sliced.

    Cost: one extra forward of each slice but the ``keep_graph`` last; see
    :func:`memengine.techniques.slices.grad_cache.cached_step`, also for randomness and BatchNorm.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        chunk_size: int | Mapping[str, int],
        keep_graph: int | str = 0,
        forward_chunk_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        _check_size('chunk_size', chunk_size)
        if forward_chunk_size is not None:
            _check_size('forward_chunk_size', forward_chunk_size)
            largest = max(chunk_size.values()) if isinstance(chunk_size, Mapping) else chunk_size
            if forward_chunk_size < largest:
                raise ValueError(
                    f'forward_chunk_size={forward_chunk_size} is less than chunk_size={largest}; '
                    'leave it out, or set it to a multiple of chunk_size'
                )
            smallest = min(chunk_size.values()) if isinstance(chunk_size, Mapping) else chunk_size
            if largest < forward_chunk_size < 2 * smallest:
                raise ValueError(
                    f'forward_chunk_size={forward_chunk_size} does not hold two chunks of '
                    f'{smallest}, so no forward would be larger; leave it out, or set it to a '
                    'multiple of chunk_size'
                )
        super().__init__(optimizer, **kwargs)
        self.chunk_size: Size = chunk_size
        self._is_first_step = True
        self.forward_chunk_size = forward_chunk_size
        self.kept_graphs = KeptGraphs(keep_graph)

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
        if self._is_first_step:
            _tell_of_batch_statistics(module)
            self._is_first_step = False

        def step(exchange: Context) -> Any:
            with exchange(), self.precision.autocast():
                targets = module.targets(inputs, data_samples, self.chunk_size)
            return cached_step(
                self._towers(model, module, inputs, data_samples),
                lambda *parts: module.embedding_loss(module.join(parts), targets, data_samples),
                keep_graph=self.kept_graphs.number,
                context=self.precision.autocast,
                backward=self.add_gradient,
                exchange=exchange,
            )

        def shrink() -> bool:
            return self._shrink(len(module.slices(inputs, data_samples, self.chunk_size)))

        updated = self._inner_count >= self._accumulative_counts
        with self.kept_graphs.measured(model, updated):
            return run_until_it_fits(step, shrink, model)

    def _towers(self, model: nn.Module, module: Any, inputs: Any, data_samples: Any) -> list[Tower]:
        pieces = module.slices(inputs, data_samples, self.chunk_size)
        return [
            Tower(
                model,
                list(some),
                _encode,
                slices_per_forward=self._slices_per_forward(name),
                part=module.tower(name),
                frozen=module.frozen(name),
                join=lambda group: group[0].merged(group[1:]),
            )
            for name, some in groupby(pieces, key=attrgetter('tower'))
        ]

    def _slices_per_forward(self, name: str | None) -> int:
        return (self.forward_chunk_size or 1) // _of_tower(self.chunk_size, name) or 1

    def _shrink(self, slices: int) -> bool:
        if self.kept_graphs.halve(slices):
            return True
        half = _halved('chunk_size', self.chunk_size)
        self.chunk_size = half or self.chunk_size
        return half is not None
