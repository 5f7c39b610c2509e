"""Slices of a multi-crop batch: sets of (crop, sample) of one resolution.

Shapes: V crops of B samples each, G = 2 of them global (first), K prototypes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memengine.losses.dino import DINOLoss, combine_targets
from memengine.techniques.slices.accumulation_within_iteration import additive_step
from memengine.techniques.slices.sliced_step import Context
from memengine.techniques.slices.slicing import even_parts


@dataclass(frozen=True)
class CropSlice:
    """Some consecutive crops, all of one size, of some consecutive samples.

    Args:
        crops: Indices of the crops.
        samples: Indices of the samples.
    """

    crops: range
    samples: range

    def take(self, crops: Sequence[Tensor]) -> Tensor:
        """The slice of a batch given crop by crop, V x [B, ...], as [crops * samples, ...].

        A slice of one crop is a view, of several a copy.
        """
        parts = [crops[index][self._rows] for index in self.crops]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def targets(self, probabilities: Tensor) -> Tensor:
        """What the slice's crops are compared with, to be broadcast over them.

        Args:
            probabilities: Of the teacher's views, [G, B, K].

        Returns:
            [crops or 1, samples, K], as :func:`~memengine.losses.dino.combine_targets` gives it:
            computed for the slice, so that autograd keeps no other slice's.
        """
        views = probabilities[:, self._rows]  # [G, samples, K]
        if self.crops.start >= len(views):
            return views.sum(dim=0, keepdim=True)
        combined = combine_targets(views)  # [G + 1, samples, K]
        return combined[[min(crop, len(views)) for crop in self.crops]]

    @property
    def _rows(self) -> slice:
        return slice(self.samples.start, self.samples.stop)


def plan_slices(
    sizes: Sequence[tuple[int, int]], batch_size: int, micro_batch_size: float
) -> list[CropSlice]:
    """Cut a multi-crop batch into few, large and even slices of one resolution each.

    A slice is a rectangle of crops x samples, so that the targets of a sample serve all its crops.
    It holds at most ``micro_batch_size`` crops of the largest size, or as many smaller ones as
    have no more pixels in all: memory is about proportional to pixels.

    Args:
        sizes: Height and width of each crop, in pixels.
        batch_size: Samples B.
        micro_batch_size: Largest crops per slice, at least 1. A fraction of one more makes room
            for smaller crops only.

    Returns:
        Slices in which every (crop, sample) occurs exactly once.

    Raises:
        ValueError: When there is no crop, or a number is below 1.
    """
    if not sizes or batch_size < 1 or micro_batch_size < 1:
        raise ValueError(
            'plan_slices needs crops, batch_size >= 1 and micro_batch_size >= 1, got '
            f'{len(sizes)} crops, batch_size={batch_size}, micro_batch_size={micro_batch_size}'
        )
    largest = max(height * width for height, width in sizes)
    slices = []
    for crops in _runs_of_one_size(sizes):
        height, width = sizes[crops.start]
        budget = int(micro_batch_size * largest / (height * width))
        across, along = _fewest_parts(len(crops), batch_size, budget)
        slices += [
            CropSlice(some_crops, some_samples)
            for some_samples in even_parts(range(batch_size), along)
            for some_crops in even_parts(crops, across)
        ]
    return slices


def _runs_of_one_size(sizes: Sequence[tuple[int, int]]) -> list[range]:
    """Consecutive crops of the same size."""
    starts = [i for i in range(len(sizes)) if i == 0 or tuple(sizes[i]) != tuple(sizes[i - 1])]
    return [range(*ends) for ends in zip(starts, [*starts[1:], len(sizes)], strict=True)]


def _fewest_parts(crops: int, samples: int, budget: int) -> tuple[int, int]:
    """Into how many parts to cut crops and samples, for the fewest slices within the budget."""

    def parts(crops_each: int) -> tuple[int, int]:
        return -(-crops // crops_each), -(-samples // min(samples, budget // crops_each))

    choices = [parts(crops_each) for crops_each in range(min(crops, budget), 0, -1)]
    return min(choices, key=lambda choice: choice[0] * choice[1])  # the first: most crops each


def dino_step(
    student: nn.Module,
    crops: Sequence[Tensor],
    teacher_output: Tensor,
    loss: DINOLoss,
    epoch: int,
    micro_batch_size: float | None = None,
    *,
    context: Context = nullcontext,
    backward: Callable[[Tensor], Any] = Tensor.backward,
) -> Tensor:
    """Add the gradient of DINO's loss to the student, slice by slice; the centre is updated.

    The recipe of DINO's issue #269 as a call, without its waste: every (crop, sample) goes
    through the student once, not once per teacher view.

    Args:
        student: Images [N, C, H, W] to logits [N, K], backbone and head in one.
        crops: V tensors [B, C, h, w], the two global crops first.
        teacher_output: The teacher's logits of the global crops, [2B, K].
        loss: Says how the crops are compared.
        epoch: Current epoch, from 0.
        micro_batch_size: Global crops per slice (see :func:`plan_slices`); None for B, which is
            one crop at a time.
        context, backward: As of :func:`~memengine.techniques.sliced_step`.

    Returns:
        The batch's loss, without graph.

    Raises:
        ValueError: When the number of crops is not the loss's, or the teacher's output does not
            hold two views of as many samples.

    Cost: bytes saved for backward are those of one slice; no extra forward. A head
    that ends in :class:`~memengine.techniques.WeightNormLinear` adds K numbers to
    that; one with a parametrised weight adds the weight, and computes it for every slice.

    Source: https://github.com/facebookresearch/dino/issues/269.
    """
    batch_size = len(crops[0]) if crops else 0
    if len(crops) != loss.ncrops or len(teacher_output) != 2 * batch_size:
        raise ValueError(
            f'dino_step: expected {loss.ncrops} crops (ncrops of the loss) and teacher_output '
            f'[2B, K], got {len(crops)} crops of {batch_size} samples and '
            f'{tuple(teacher_output.shape)}'
        )
    targets = loss.targets(teacher_output, epoch)  # [2, B, K]
    slices = plan_slices(
        [(crop.shape[-2], crop.shape[-1]) for crop in crops],
        batch_size,
        batch_size if micro_batch_size is None else micro_batch_size,
    )

    def slice_loss(piece: CropSlice) -> Tensor:
        logits = student(piece.take(crops)).unflatten(0, (len(piece.crops), -1))  # [v, b, K]
        return loss.crop_loss(logits, piece.targets(targets)) / batch_size

    return additive_step(slices, slice_loss, modules=[student], context=context, backward=backward)
