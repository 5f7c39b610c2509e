"""Accumulation within a step: an additive loss slice by slice, with nothing computed twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from memengine._torch_private.ops import pytree
from memengine.technique import Settings, Technique, setting
from memengine.techniques.slices.sliced_step import Context, Losses, sliced_step
from memengine.techniques.slices.tower import Tower


def additive_step(
    slices: Sequence[Any],
    loss_fn: Callable[[Any], Losses],
    *,
    modules: Sequence[nn.Module] = (),
    weights: Sequence[float] | None = None,
    context: Context = nullcontext,
    backward: Callable[[Tensor], Any] = Tensor.backward,
) -> Any:
    """Run slice -> loss -> backward one after another: the batch's gradient, a slice's memory.

    :func:`~memengine.techniques.sliced_step` without a coupled loss.

    Args:
        slices: The batch in slices, of any kind.
        loss_fn: A slice to its loss, or losses by name: those with ``loss`` in their name are
            summed.
        modules: Modules that ``loss_fn`` calls. Those wrapped by DDP reduce their gradients in the
            last slice's backward only; WeightNormLinear layers in them see to their weight once.
        weights: Factor of each slice's losses; None for 1. A loss that is the mean over a
            slice's samples needs ``len(slice) / len(batch)``.
        context, backward: As of ``sliced_step``.

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
    tower = Tower(
        nn.ModuleList(modules),
        list(zip(slices, factors, strict=True)),
        encode=lambda _, weighted: loss_fn(weighted[0]),
    )
    return sliced_step(
        tower,
        slice_loss=lambda losses, weighted: pytree.tree_map(lambda x: x * weighted[1], losses),
        context=context,
        backward=backward,
    ).additive


@dataclass(frozen=True)
class AccumulationSettings(Settings):
    """Settings of accumulation within an iteration, as ``optim_wrapper`` takes them."""

    micro_batch_size: float | Literal['auto'] = setting(
        help='most images in a slice, or most crops of the largest size', unit='images', low=1
    )


TECHNIQUE = Technique(
    key='accumulation',
    title='accumulation within an iteration',
    settings=AccumulationSettings,
    switch='optim_wrapper.type=AccumulationOptimWrapper optim_wrapper.micro_batch_size=16',
    call='memengine.techniques.additive_step',
    loss='additive',
    use_when='the loss is additive (DINO, classification) and a batch does not fit',
    saves='activations: all but those of one slice',
    price='none',
    page='accumulation.md',
    example=AccumulationSettings(micro_batch_size=3),
)
