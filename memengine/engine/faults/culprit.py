"""Where in a step the first NaN or infinity comes up: module, parameter, slice and samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from memengine._torch_private.ops import pytree
from memengine.engine.step import SlicedModel
from memengine.techniques.sharding.clipping import local_part
from memengine.techniques.slices.multi_crop import CropSlice

__all__ = ['Culprit', 'watched']


@dataclass
class Culprit:
    """What was seen first, each None if it was not seen.

    Attributes:
        in_data: Whether what went into the model was not finite already.
        module: Whose output was not finite.
        gradient_of: The module to whose output a gradient came that was not finite; looked for
            where all outputs are finite.
        parameter: Whose gradient was not finite.
        slice: Number of the slice, from 0, in which module or gradient were seen.
        slices: How many there were.
        samples: Positions in the batch of what was not finite there.
    """

    in_data: bool = False
    module: str | None = None
    gradient_of: str | None = None
    parameter: str | None = None
    slice: int | None = None
    slices: int = 0
    samples: list[int] = field(default_factory=list)


@contextmanager
def watched(model: nn.Module, batch_size: int) -> Iterator[Culprit]:
    """Look at every output and gradient of a step.

    Args:
        model: The bare model.
        batch_size: Samples of this rank's batch.

    Cost: a synchronisation for each module and parameter.
    """
    watch = _Watch(model, batch_size)
    handles = [*watch.attach()]
    try:
        yield watch.culprit
    finally:
        for handle in handles:
            handle.remove()
        vars(model).pop('slices', None)


class _Watch:
    def __init__(self, model: nn.Module, batch_size: int) -> None:
        self.model = model
        self.batch_size = batch_size
        self.culprit = Culprit()
        self._pieces: list[Any] = []
        self._current: int | None = None  # slice

    def attach(self) -> Iterator[Any]:
        if isinstance(self.model, SlicedModel):
            cut: Callable[..., list[Any]] = self.model.slices

            def slices(*args: Any, **kwargs: Any) -> list[Any]:
                self._pieces = cut(*args, **kwargs)
                self.culprit.slices = len(self._pieces)
                return self._pieces

            vars(self.model)['slices'] = slices
        yield self.model.register_forward_pre_hook(self._begin, with_kwargs=True)
        for name, module in self.model.named_modules():
            if name.partition('.')[0] == 'data_preprocessor':
                continue
            yield module.register_forward_hook(partial(self._look_at_output, name))
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                look = partial(self._look_at_parameter, name)
                yield parameter.register_post_accumulate_grad_hook(look)

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = kwargs.get('inputs', args[0] if args else None)
        start = _start_of(inputs)
        found = [i for i, piece in enumerate(self._pieces) if _start_of(piece.inputs) == start]
        self._current = found[0] if found and start is not None else None
        bad = [tensor for tensor in _tensors(inputs) if not _is_finite(tensor)]
        if bad and self.culprit.module is None:
            self.culprit.in_data, self.culprit.slice = True, self._current
            self._note_samples(bad[0], self._current)

    def _look_at_output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in _tensors(output):
            if not _is_finite(tensor):
                if self.culprit.module is None:
                    self.culprit.module, self.culprit.slice = name, self._current
                if self._current == self.culprit.slice:
                    self._note_samples(tensor, self._current)
            elif tensor.requires_grad and self.culprit.module is None:
                tensor.register_hook(partial(self._look_at_gradient, name, self._current))
        if not name:  # what comes now, such as a loss of all slices, is of none
            self._current = None

    def _look_at_gradient(self, name: str, number: int | None, gradient: Tensor) -> None:
        if self.culprit.module is not None or _is_finite(gradient):
            return
        if self.culprit.gradient_of is None:
            self.culprit.gradient_of = name
            self.culprit.slice = number
        if number == self.culprit.slice:
            self._note_samples(gradient, number)

    def _look_at_parameter(self, name: str, parameter: nn.Parameter) -> None:
        gradient: Any = parameter.grad
        if self.culprit.parameter is None and not _is_finite(gradient):
            self.culprit.parameter = name

    def _note_samples(self, tensor: Tensor, number: int | None) -> None:
        """The samples of the rows that are not finite, where rows are those of samples."""
        samples = self._samples_of_rows(number)
        if self.culprit.samples or not tensor.ndim or not samples or len(tensor) % len(samples):
            return
        bad = (
            (~tensor.detach().flatten(1).isfinite()).any(1)
            if tensor.ndim > 1
            else (~tensor.detach().isfinite())
        )
        rows = bad.nonzero().flatten().tolist()
        self.culprit.samples = sorted({samples[row % len(samples)] for row in rows})

    def _samples_of_rows(self, number: int | None) -> Sequence[int]:
        if number is None:
            return range(self.batch_size)
        rows = self._pieces[number].rows
        if isinstance(rows, CropSlice):
            return rows.samples
        return [row % self.batch_size for row in rows]


def _tensors(tree: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(tree)
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def _start_of(inputs: Any) -> tuple[Any, ...] | None:
    """Where a slice's first tensor begins in memory, which tells slices of a batch apart."""
    first = next((x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)), None)
    return None if first is None else (first.data_ptr(), first.shape[1:])


def _is_finite(tensor: Tensor) -> bool:
    local = local_part(tensor)
    return bool(local.detach().isfinite().all())
