"""Steps in slices: a batch of any size in the memory of one slice, with the plain step's gradient.

The techniques are those of :mod:`memengine.techniques.slices`; here they are given the model's
slices and this engine's precision and synchronisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal, TypeAlias

from mmengine.logging import MMLogger
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer

from memengine.engine.distributed.processes import cpu_group
from memengine.engine.optim.kept_graphs import KeptGraphs
from memengine.engine.optim.optim_wrapper import OptimWrapper
from memengine.engine.step import SlicedModel, unwrap
from memengine.registry import OPTIM_WRAPPERS
from memengine.techniques.modules.running_statistics import layers_with_batch_statistics
from memengine.techniques.slices.out_of_memory import run_until_it_fits
from memengine.techniques.slices.sliced_step import sliced_step
from memengine.techniques.slices.tower import Tower

Size: TypeAlias = float | Mapping[str, int]


def _check_size(setting: str, size: Any) -> None:
    if size == 'auto':
        raise ValueError(
            f"{setting}='auto' is planned when memengine's Runner is built from a config, before "
            'its OptimWrapper is; here give the number of images'
        )
    sizes = size.values() if isinstance(size, Mapping) else [size]
    for number in sizes:
        if not isinstance(number, (int, float)) or isinstance(number, bool) or number < 1:
            raise ValueError(f'{setting} must be a number of images, at least 1, got {size!r}')


def _sliced_model(model: nn.Module, wrapper: OptimWrapper) -> SlicedModel:
    """The bare model, if it says how it is cut into slices."""
    module = unwrap(model)
    if not isinstance(module, SlicedModel):
        raise ValueError(
            f'{type(wrapper).__name__}: {type(module).__name__} does not say how a batch of it is '
            'cut into slices; derive it from memengine.models.Algorithm, or use OptimWrapper'
        )
    return module


def _warn_of_batch_statistics(module: nn.Module) -> None:
    layers = layers_with_batch_statistics(module)
    if layers:
        MMLogger.get_current_instance().warning(
            f'{len(layers)} BatchNorm layers ({layers[0]}, ...) normalise by the statistics of '
            'each slice and not of the batch, as they would on as many ranks: the size of the '
            'slices has a part in what is learned. Layers in eval mode or other norms have not.'
        )


def _encode(model: nn.Module, piece: Any) -> Any:
    return model(piece.inputs, piece.data_samples, mode='tensor')


class _SlicedOptimWrapper(OptimWrapper):
    """A step in slices; subclasses say which losses it is for."""

    def __init__(
        self,
        optimizer: Optimizer,
        setting: str,
        size: Any,
        keep_graph: int | str = 0,
        forward_chunk_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        _check_size(setting, size)
        super().__init__(optimizer, **kwargs)
        self.setting = setting
        self.size: Size = size
        self.kept_graphs = KeptGraphs(keep_graph)
        self.forward_chunk_size = forward_chunk_size
        self._is_first_step = True
        self._coupled_slices = 0  # of the last step

    @property
    def sizes(self) -> dict[str, Any]:
        """The size of slices by its setting: memory may have made it smaller."""
        return {self.setting: self.size}

    def _carry_out(self, model: nn.Module, data: Any) -> dict[str, Tensor]:
        module: Any = _sliced_model(model, self)
        self._check(module)
        if self._is_first_step:
            _warn_of_batch_statistics(module)
            self._is_first_step = False
        with self.precision.autocast():  # as in the plain step
            batch = module.data_preprocessor(data, True)
        with self.sync_context(model):
            losses = self._add_gradient_of(model, module, **batch)
        loss, log_vars = module.parse_losses(losses)
        self.finish_step(loss)
        return log_vars

    def update_params(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Refuse a loss of the whole batch, whose graph is in memory already."""
        raise ValueError(
            f'{type(self).__name__}: the step was carried out by a train_step that is not '
            f"memengine's, on the whole batch at once, so {self.setting}={self.size} would do "
            'nothing. Derive the model from memengine.models.Algorithm, or have its train_step '
            'call memengine.engine.run_step, and keep it out of wrappers of other libraries; else '
            "use optim_wrapper.type='OptimWrapper'"
        )

    def _check(self, module: SlicedModel) -> None:
        """Refuse a model whose loss is of another kind."""
        raise NotImplementedError

    def _add_gradient_of(
        self, model: nn.Module, module: SlicedModel, inputs: Any, data_samples: Any = None
    ) -> dict[str, Tensor]:
        """Add the batch's gradient, in smaller slices if memory wants it; the losses."""
        step = partial(self._sliced_step, model, module, inputs, data_samples)
        updated = self._inner_count >= self._accumulative_counts
        kept = self.kept_graphs
        with nullcontext() if kept.decided else kept.measured(model, updated):
            group = cpu_group('running out of memory') if dist.is_initialized() else None
            return run_until_it_fits(step, self._shrink, model, group, (inputs, data_samples))

    def _sliced_step(
        self, model: nn.Module, module: SlicedModel, inputs: Any, data_samples: Any
    ) -> dict[str, Tensor]:
        with self.precision.autocast():
            targets = module.targets(inputs, data_samples, self.size)
        slices = module.slices(inputs, data_samples, self.size)
        self._coupled_slices = sum(piece.coupled for piece in slices)

        def coupled_loss(*embeddings: Any) -> Any:
            return module.coupled_loss(module.join(embeddings), targets, data_samples)

        def slice_loss(embeddings: Any, piece: Any) -> Any:
            return module.slice_loss(embeddings, targets, piece)

        towers = [
            Tower(
                model,
                list(pieces),
                _encode,
                slices_per_forward=self._slices_per_forward(name),
                part=module.tower(name),
                frozen=module.frozen(name),
                join=lambda group: group[0].merged(group[1:]),
                coupled=attrgetter('coupled'),
                coupled_part=module.coupled_part,
            )
            for name, pieces in groupby(slices, key=attrgetter('tower'))
        ]
        losses = sliced_step(
            towers,
            coupled_loss if module.coupled else None,
            slice_loss if module.additive else None,
            keep_graph=self.kept_graphs.number,
            context=self.precision.autocast,
            backward=self.add_gradient,
        )
        additive = module.batch_losses(losses.additive, targets) if module.additive else {}
        return {**additive, **(losses.coupled or {})}

    def _slices_per_forward(self, tower: str | None) -> int:
        if self.forward_chunk_size is None:
            return 1
        size = self.size[tower or ''] if isinstance(self.size, Mapping) else self.size
        return self.forward_chunk_size // int(size) or 1

    def _shrink(self) -> bool:
        return self.kept_graphs.halve(self._coupled_slices) or self._halve()

    def _halve(self) -> bool:
        """Halve the slices, said in the log; False when they are of one image already."""
        size = self.size
        half: Size = (
            {tower: max(number // 2, 1) for tower, number in size.items()}
            if isinstance(size, Mapping)
            else max(int(size / 2), 1)
        )
        if half == size:
            return False
        self.size = half
        MMLogger.get_current_instance().warning(
            f'Out of memory: {self.setting} goes from {size} to {half}. The step is repeated, and '
            f'the run goes on as one with optim_wrapper.{self.setting}={half}.'
        )
        return True


@OPTIM_WRAPPERS.register_module()
class AccumulationOptimWrapper(_SlicedOptimWrapper):
    """Carries an additive loss out slice by slice, within one iteration.

    Args:
        optimizer: The optimiser.
        micro_batch_size: Most images in a slice; for multi-crop, most crops of the largest size,
            or as many smaller ones as have no more pixels (there 1.5 makes room for more of the
            smaller ones). Halved when a step runs out of memory;
            see :func:`memengine.techniques.slices.out_of_memory.run_until_it_fits`. In a config
            also ``'auto'``, which is planned when training starts.
        **kwargs: As :class:`OptimWrapper`'s; ``accumulative_counts`` goes on meaning iterations.

    Raises:
        ValueError: For a size below 1; in a step, when samples meet in the model's loss, or it
            does not say how it is sliced.

    Cost: saved bytes of one slice; nothing is computed twice. Gradients are reduced over ranks
    once, in the last slice. BatchNorm: see
    :func:`memengine.techniques.additive_step`.
    """

    def __init__(
        self, optimizer: Optimizer, micro_batch_size: float | Literal['auto'], **kwargs: Any
    ) -> None:
        super().__init__(optimizer, 'micro_batch_size', micro_batch_size, **kwargs)

    def _check(self, module: SlicedModel) -> None:
        if module.coupled:
            raise ValueError(
                f'AccumulationOptimWrapper: samples meet in the loss of {type(module).__name__}, '
                'so slices of the batch would train another objective; use '
                "optim_wrapper.type='GradCacheOptimWrapper' with chunk_size="
                f'{self.size}'
            )


@OPTIM_WRAPPERS.register_module()
class GradCacheOptimWrapper(_SlicedOptimWrapper):
    """Carries a coupled loss (SimCLR, SupCon, CLIP, ...) out in the memory of one slice.

    A loss may have additive terms beside the coupled ones (DINO with KoLeo): each slice adds the
    gradient of both in one backward, and those that no coupled term reads are embedded once.

    Args:
        optimizer: The optimiser.
        chunk_size: Most images in a slice; for models with several towers also a dict by tower,
            for multi-crop as ``micro_batch_size`` of :class:`AccumulationOptimWrapper`; in a config
            also ``'auto'``, as there, with which ``keep_graph`` is planned, too.
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

    Cost: one extra forward of each slice that the coupled loss reads but the ``keep_graph`` last;
    see :func:`memengine.techniques.sliced_step`, also for randomness and BatchNorm.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        chunk_size: Size | Literal['auto'],
        keep_graph: int | str = 0,
        forward_chunk_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            optimizer, 'chunk_size', chunk_size, keep_graph, forward_chunk_size, **kwargs
        )
        if forward_chunk_size is None:
            return
        _check_size('forward_chunk_size', forward_chunk_size)
        sizes = self.size.values() if isinstance(self.size, Mapping) else [self.size]
        smallest, largest = min(sizes), max(sizes)
        if forward_chunk_size < largest:
            raise ValueError(
                f'forward_chunk_size={forward_chunk_size} is less than chunk_size={largest}; '
                'leave it out, or set it to a multiple of chunk_size'
            )
        if largest < forward_chunk_size < 2 * smallest:
            raise ValueError(
                f'forward_chunk_size={forward_chunk_size} does not hold two chunks of '
                f'{smallest}, so no forward would be larger; leave it out, or set it to a '
                'multiple of chunk_size'
            )

    def _check(self, module: SlicedModel) -> None:
        if not module.coupled:
            size = self.size if isinstance(self.size, (int, float)) else 16
            raise ValueError(
                f'GradCacheOptimWrapper: the loss of {type(module).__name__} is additive, so its '
                'slices need no second forward; use '
                f"optim_wrapper.type='AccumulationOptimWrapper' with micro_batch_size={size}"
            )
