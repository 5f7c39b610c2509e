"""Slices of a batch, and the step that runs additive losses slice by slice.

A loss is additive when the sum of its slices' losses is the batch's loss (classification; DINO
once the teacher's targets are there). Where samples see each other (SimCLR, SupCon, CLIP) it is
not, and :mod:`memengine.techniques.slices.grad_cache` is the technique to use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from memengine._torch_private.ops import pytree
from memengine.techniques.layers.weight_norm import shared_weights

__all__ = [
    'Losses',
    'SyncOnce',
    'additive_step',
    'detached',
    'join_slices',
    'split_batch',
    'tensors_in',
    'total_loss',
]

Losses: TypeAlias = Tensor | Mapping[str, Tensor]
Context: TypeAlias = Callable[[], AbstractContextManager[Any]]


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors in nested dicts, lists and tuples."""
    if isinstance(tree, Mapping) and not isinstance(tree, dict):
        tree = dict(tree)
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def split_batch(batch: Any, size: int) -> list[Any]:
    """Cut a batch into consecutive slices of ``size`` samples, the last one smaller.

    Args:
        batch: A tensor, or dicts, lists and tuples of tensors (any Mapping at the top), each
            with the samples in dimension 0. None and booleans go with every slice.
        size: Samples per slice.

    Returns:
        Slices of the batch's structure, which hold views of its tensors.

    Raises:
        ValueError: For a size below 1, tensors of different length, or none at all.
        TypeError: For anything that is neither a tensor nor None nor a boolean.
    """
    if size < 1:
        raise ValueError(f'the size of a slice must be at least 1 sample, got {size}')
    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        batch = dict(batch)
    leaves, structure = pytree.tree_flatten(batch)
    for leaf in leaves:
        if not (leaf is None or isinstance(leaf, (Tensor, bool))):
            raise TypeError(
                f'a {type(leaf).__name__} in the batch cannot be cut into slices; pass tensors '
                'with the samples in dimension 0, or cut the batch yourself (split_input_fn)'
            )
    shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
    lengths = {shape[:1] for shape in shapes}
    if not shapes:
        raise ValueError('the batch holds no tensor')
    if len(lengths) > 1 or () in lengths:
        raise ValueError(f'all tensors need the same samples in dimension 0, got shapes {shapes}')
    samples = shapes[0][0]
    return [
        pytree.tree_unflatten(
            [leaf[start : start + size] if isinstance(leaf, Tensor) else leaf for leaf in leaves],
            structure,
        )
        for start in range(0, samples, size)
    ]


def join_slices(slices: Sequence[Any]) -> Any:
    """Put slices of one structure together again; the reverse of :func:`split_batch`.

    Raises:
        TypeError: For anything that is neither a tensor nor None nor a boolean.
    """
    if len(slices) == 1:
        return slices[0]
    columns, structures = zip(*map(pytree.tree_flatten, slices), strict=True)
    return pytree.tree_unflatten(
        [_join(leaves) for leaves in zip(*columns, strict=True)], structures[0]
    )


def _join(leaves: tuple[Any, ...]) -> Any:
    if isinstance(leaves[0], Tensor):
        return torch.cat(leaves)
    if leaves[0] is None or isinstance(leaves[0], bool):
        return leaves[0]
    raise TypeError(f'slices with a {type(leaves[0]).__name__} in them cannot be joined')


def total_loss(losses: Losses) -> Tensor:
    """The scalar to run backward from.

    Args:
        losses: The loss, or losses by name: those with ``loss`` in their name are summed, other
            entries are for the log (MMEngine's rule).

    Raises:
        ValueError: When a loss is not a scalar, or no entry is a loss.
    """
    parts = losses
    if isinstance(losses, Mapping):
        parts = {name: value for name, value in losses.items() if 'loss' in name}
        if not parts:
            raise ValueError(f'no entry of the losses is named a loss, got {sorted(losses)}')
    else:
        parts = {'loss': losses}
    for name, part in parts.items():
        if not isinstance(part, Tensor) or part.numel() != 1:
            what = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
            raise ValueError(f'{name} must be a scalar tensor, got {what}')
    total, *others = (part.reshape(()) for part in parts.values())
    return sum(others, start=total)


def detached(losses: Losses) -> Any:
    """The losses without their graph."""
    return pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, losses)


class SyncOnce:
    """Lets modules that reduce gradients across ranks (DDP) do so in their last backward only.

    Until a module's last graph, forward and backward run in its ``no_sync()``. Modules without
    that method have nothing to synchronise.

    Args:
        graphs: The modules in the order in which their graphs are built; one entry per graph.
    """

    def __init__(self, graphs: Iterable[nn.Module]) -> None:
        self._left = Counter(graph for graph in graphs if hasattr(graph, 'no_sync'))

    @contextmanager
    def graph(self, module: nn.Module) -> Iterator[bool]:
        """Around the forward (and backward) of the module's next graph.

        Yields:
            Whether gradients are synchronised in it.
        """
        last = self._left[module] == 1
        self._left[module] -= 1
        with ExitStack() as stack:
            if self._left[module] > 0:
                stack.enter_context(module.no_sync())  # type: ignore[operator]
            yield last

    @contextmanager
    def loss(self) -> Iterator[None]:
        """Around a backward through graphs of any of the modules."""
        with ExitStack() as stack:
            for module, left in self._left.items():
                if left > 0:
                    stack.enter_context(module.no_sync())  # type: ignore[operator]
            yield


def additive_step(
    slices: Sequence[Any],
    loss_fn: Callable[[Any], Losses],
    *,
    modules: Sequence[nn.Module] = (),
    weights: Sequence[float] | None = None,
    context: Context = nullcontext,
    backward: Callable[[Tensor], Any] = Tensor.backward,
    exchange: Context = nullcontext,
) -> Any:
    """Run slice -> loss -> backward one after another: the batch's gradient, a slice's memory.

    Args:
        slices: The batch in slices, of any kind.
        loss_fn: A slice to its loss, or losses by name (see :func:`total_loss`).
        modules: Modules that ``loss_fn`` calls. Those wrapped by DDP reduce their gradients in the
            last slice's backward only; WeightNormLinear layers in them see to their weight once.
        weights: Factor of each slice's losses; None for 1. A loss that is the mean over a
            slice's samples needs ``len(slice) / len(batch)``.
        context: Makes the context of forward, e.g. ``lambda: torch.autocast('cuda')``.
        backward: Runs backward from a slice's loss, e.g. with a gradient scaler.
        exchange: Makes the context of the last backward, in which ranks exchange gradients. See
            :func:`~memengine.techniques.slices.out_of_memory.run_until_it_fits`.

    Returns:
        Sum of the (weighted) losses over the slices, without graph, in the form of ``loss_fn``.

    Raises:
        ValueError: When there is no slice, or not one weight per slice.

    Cost: bytes saved for backward are those of the largest slice; no extra computation.
    BatchNorm's batch statistics are each slice's own (as those of that many unsynchronised
    ranks), its running statistics are updated once per slice. Gradient hooks fire once per slice.
    """
    if not slices:
        raise ValueError('there is no slice to run')
    factors = [1.0] * len(slices) if weights is None else list(weights)
    if len(factors) != len(slices):
        raise ValueError(f'expected one weight per slice, got {len(factors)} for {len(slices)}')
    sync = SyncOnce(module for module in modules for _ in slices)
    totals: Any = None
    with shared_weights(modules) as before_the_last:
        for number, (piece, factor) in enumerate(zip(slices, factors, strict=True), start=1):
            if number == len(slices):
                before_the_last()
            with ExitStack() as stack:
                for module in modules:
                    stack.enter_context(sync.graph(module))
                with context():
                    losses = pytree.tree_map(lambda value, f=factor: value * f, loss_fn(piece))
                if number == len(slices):
                    stack.enter_context(exchange())
                backward(total_loss(losses))
            done = detached(losses)
            totals = done if totals is None else pytree.tree_map(torch.add, totals, done)
    return totals
