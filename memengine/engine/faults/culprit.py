"""Where in a step the first NaN or infinity comes up: module, parameter, slice and samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from memengine._torch_private.ops import pytree
from memengine.engine.step import SlicedModel
from memengine.techniques.sharding.clipping import local_part
from memengine.techniques.slices.multi_crop import CropSlice


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


@runtime_checkable
class Embeds(Protocol):
    """A model whose loss is built on embeddings, row by row those of its samples."""

    def embed(self, inputs: Any, data_samples: Any = None) -> Any:
        """See :class:`memengine.models.Algorithm`."""


@contextmanager
def watched(model: nn.Module, batch: Any) -> Iterator[Culprit]:
    """Look at every output and gradient of a step.

    Cost: a synchronisation for each module and parameter.
    """
    watch = _Watch(model, batch)
    handles = [*watch.attach()]
    try:
        yield watch.culprit
    finally:
        for handle in handles:
            handle.remove()
        for name in ('slices', 'embed'):
            vars(model).pop(name, None)


class _Watch:
    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.model = model
        data_samples = batch.get('data_samples') if isinstance(batch, Mapping) else None
        inputs = batch.get('inputs', batch) if isinstance(batch, Mapping) else batch
        first = next((x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)), None)
        self.one_by_one = isinstance(data_samples, list)  # images of their own sizes
        if isinstance(data_samples, list):
            self.batch_size, self.views = len(data_samples), 1
        else:
            self.batch_size = 0 if first is None or not first.ndim else len(first)
            self.views = len(inputs) if isinstance(inputs, (list, tuple)) else 1
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
        if isinstance(self.model, Embeds):
            embed = self.model.embed

            def embed_and_look(*args: Any, **kwargs: Any) -> Any:
                embeddings = embed(*args, **kwargs)
                self._look_at_embeddings(embeddings)
                return embeddings

            vars(self.model)['embed'] = embed_and_look
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
        tensors = _tensors(inputs)
        bad = [index for index, tensor in enumerate(tensors) if not _is_finite(tensor)]
        if bad and self.culprit.module is None:
            self.culprit.in_data, self.culprit.slice = True, self._current
            if self.one_by_one:
                samples, _ = self._samples_of_rows(self._current)
                self.culprit.samples = [samples[index] for index in bad]
            else:
                self._note_samples(tensors[bad[0]], self._current)

    def _look_at_embeddings(self, embeddings: Any) -> None:
        """Where modules see samples one by one, or windows of them, these tell whose is bad."""
        for tensor in _tensors(embeddings):
            if not _is_finite(tensor) and self._current == self.culprit.slice:
                self._note_samples(tensor, self._current)

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
        samples, views = self._samples_of_rows(number)
        if self.culprit.samples or not tensor.ndim or not samples or len(tensor) % len(samples):
            return
        if len(tensor) > views * len(samples):  # rows of windows, or of proposals
            return
        bad = ~tensor.detach().reshape(len(tensor), -1).isfinite().all(1)
        rows = bad.nonzero().flatten().tolist()
        self.culprit.samples = sorted({samples[row % len(samples)] for row in rows})

    def _samples_of_rows(self, number: int | None) -> tuple[Sequence[int], int]:
        """Which samples the rows of a slice are of, over and over, and how often at most."""
        if number is None:
            return range(self.batch_size), self.views
        rows = self._pieces[number].rows
        if isinstance(rows, CropSlice):
            return rows.samples, max(len(rows.crops), 1)
        return [row % self.batch_size for row in rows], 1


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
