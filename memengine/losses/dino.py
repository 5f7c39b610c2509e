"""Self-distillation with no labels: the DINO loss and what keeps its teacher from collapsing.

Shapes: G global crops (the teacher's views), V = G + L student crops, B samples per rank,
K prototypes (``out_dim``).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ['DINOLoss', 'combine_targets', 'sinkhorn_knopp', 'soft_cross_entropy']

CENTERINGS = ('center', 'sinkhorn')


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(tensor, op=op)
    return tensor


def _at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@torch.no_grad()
def sinkhorn_knopp(logits: Tensor, temperature: float, iterations: int = 3) -> Tensor:
    """Teacher probabilities that use every prototype equally over the whole (global) batch.

    Alternately scales prototypes and samples of ``exp(logits / temperature)`` to the uniform
    marginals, as SwAV and DINOv2 do, with the sums taken over all ranks.

    Args:
        logits: Teacher outputs, [N, K] on this rank.
        temperature: Sharpness; smaller is closer to one-hot.
        iterations: Number of row-and-column scalings, at least 1.

    Returns:
        Probabilities [N, K]; each row sums to 1.

    Raises:
        ValueError: For fewer iterations.

    Cost: ``iterations + 1`` all-reduces of K numbers when distributed.
    """
    if iterations < 1:
        raise ValueError(f'sinkhorn_knopp: iterations must be at least 1, got {iterations}')
    scaled = _at_least_fp32(logits) / temperature  # [N, K]
    tiny = torch.finfo(scaled.dtype).tiny
    # The first scaling is by logarithms, as exp(scaled) may be beyond the range of fp32. After it
    # the largest share of each prototype is 1 / (N * K) of all at least.
    largest = _all_reduce(scaled.amax(dim=0, keepdim=True), dist.ReduceOp.MAX)  # [1, K]
    largest = largest.clamp_min(torch.finfo(scaled.dtype).min)
    prototypes = _all_reduce((scaled - largest).exp_().sum(dim=0, keepdim=True))  # [1, K]
    plan = scaled.sub_(largest).sub_(prototypes.clamp_min(tiny).log()).softmax(dim=1)
    for _ in range(iterations - 1):
        prototypes = _all_reduce(plan.sum(dim=0, keepdim=True))
        plan = plan / prototypes.clamp_min(tiny)
        plan = plan / plan.sum(dim=1, keepdim=True).clamp_min(tiny)
    return plan


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """``-sum_k targets_k log softmax(logits)_k`` for targets of any mass.

    Args:
        logits: [N, K].
        targets: [N, K], non-negative, no gradient; a row may sum to more than 1, which is how
            a crop is compared with several teacher views at the price of one.

    Returns:
        One value per row, [N], in fp32 or wider, also under autocast: both terms are some tens of
        nats large, and the loss is their difference.
    """
    with torch.autocast(logits.device.type, enabled=False):
        logits, targets = _at_least_fp32(logits), _at_least_fp32(targets)
        mass = targets.sum(dim=-1)  # [N]
        return mass * logits.logsumexp(dim=-1) - torch.linalg.vecdot(targets, logits)


def combine_targets(targets: Tensor) -> Tensor:
    """What each kind of crop is compared with, summed over the teacher's views.

    The cross-entropy is linear in its target, so a crop meets the sum of all views that it is
    to match in one product: view g of the student meets all views but g, a local crop meets all.

    Args:
        targets: Teacher probabilities [G, B, K].

    Returns:
        [G + 1, B, K]: row ``min(crop, G)`` is the target of student crop ``crop``.
    """
    total = targets.sum(dim=0, keepdim=True)  # [1, B, K]
    return torch.cat([total - targets, total])


class DINOLoss(nn.Module):
    """Cross-entropy between the teacher's and the student's views of the same image.

    Drop-in for the loss of the original training script: the same arguments and call, the same
    value and gradient. Each student crop is compared with all teacher views but its own.

    Args:
        out_dim: Number of prototypes K.
        ncrops: Number of student crops V = 2 global + local ones.
        warmup_teacher_temp: Teacher temperature at epoch 0.
        teacher_temp: Teacher temperature after the warm-up.
        warmup_teacher_temp_epochs: Length of the linear warm-up, in epochs.
        nepochs: Length of training, in epochs.
        student_temp: Student temperature.
        center_momentum: Momentum of the running centre of the teacher's outputs.
        centering: ``'center'`` subtracts the running centre (the paper); ``'sinkhorn'`` spreads
            each batch evenly over the prototypes (see :func:`sinkhorn_knopp`), which holds on
            small sets where the centre alone collapses.

    Raises:
        ValueError: For a temperature that is not positive, fewer than two crops, or an unknown
            ``centering``.

    Distributed: the centre and Sinkhorn's sums are all-reduced; the loss is this rank's mean,
    so that DDP's average gives the gradient of the whole batch.

    Source: Caron et al., Emerging Properties in Self-Supervised Vision Transformers (2021).
    """

    center: Tensor

    def __init__(
        self,
        out_dim: int,
        ncrops: int,
        warmup_teacher_temp: float,
        teacher_temp: float,
        warmup_teacher_temp_epochs: int,
        nepochs: int,
        student_temp: float = 0.1,
        center_momentum: float = 0.9,
        centering: Literal['center', 'sinkhorn'] = 'center',
    ) -> None:
        super().__init__()
        for name, value in (
            ('warmup_teacher_temp', warmup_teacher_temp),
            ('teacher_temp', teacher_temp),
            ('student_temp', student_temp),
        ):
            if not value > 0:
                raise ValueError(f'DINOLoss: {name} must be positive, got {value}')
        if ncrops < 2:
            raise ValueError(f'DINOLoss: ncrops must be at least the 2 global crops, got {ncrops}')
        if warmup_teacher_temp_epochs > nepochs:
            raise ValueError(
                f'DINOLoss: warmup_teacher_temp_epochs={warmup_teacher_temp_epochs} is longer than '
                f'training (nepochs={nepochs}); shorten the warm-up'
            )
        if centering not in CENTERINGS:
            raise ValueError(f'DINOLoss: centering must be one of {CENTERINGS}, got {centering!r}')
        self.ncrops = ncrops
        self.warmup_teacher_temp = warmup_teacher_temp
        self.teacher_temp = teacher_temp
        self.warmup_teacher_temp_epochs = warmup_teacher_temp_epochs
        self.nepochs = nepochs
        self.student_temp = student_temp
        self.center_momentum = center_momentum
        self.centering = centering
        self.register_buffer('center', torch.zeros(1, out_dim))

    def reset_parameters(self) -> None:
        """Forget what the teacher has put out."""
        self.center.zero_()

    def temperature(self, epoch: int) -> float:
        """Teacher temperature at ``epoch``: linear warm-up, then constant."""
        if epoch >= self.warmup_teacher_temp_epochs:
            return self.teacher_temp
        start, steps = self.warmup_teacher_temp, self.warmup_teacher_temp_epochs - 1
        return start + (self.teacher_temp - start) * epoch / max(steps, 1)

    @torch.no_grad()
    def targets(self, teacher_output: Tensor, epoch: int, views: int = 2) -> Tensor:
        """Teacher probabilities, and the centre brought up to date (after its use).

        Args:
            teacher_output: Teacher logits [G * B, K], view by view.
            epoch: Current epoch, from 0.
            views: Number of views G.

        Returns:
            [G, B, K], without gradient.
        """
        temperature = self.temperature(epoch)
        if self.centering == 'sinkhorn':
            probabilities = sinkhorn_knopp(teacher_output, temperature)
        else:
            probabilities = ((teacher_output - self.center) / temperature).softmax(dim=-1)
            self.update_center(teacher_output)
        return probabilities.unflatten(0, (views, -1))

    @torch.no_grad()
    def update_center(self, teacher_output: Tensor) -> None:
        """Move the centre towards the mean teacher output [N, K] of all ranks."""
        wide = torch.promote_types(self.center.dtype, torch.float32)  # halves count to 256 or 2048
        rows = teacher_output.new_full((1,), len(teacher_output), dtype=wide)
        totals = _all_reduce(torch.cat([teacher_output.sum(dim=0, dtype=wide), rows]))
        mean = totals[:-1] / totals[-1]
        self.center.mul_(self.center_momentum).add_(mean, alpha=1 - self.center_momentum)

    def crop_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Loss of any set of (crop, sample) rows: its share of the batch's loss, times B.

        Sum it over all rows of the batch and divide by B to get the batch's loss.

        Args:
            logits: Student outputs [N, K] of N (crop, sample) pairs.
            targets: Rows of :func:`combine_targets` for the same pairs, [N, K].

        Returns:
            Sum over the N rows, divided by the number of (teacher view, crop) pairs. Scalar.
        """
        pairs = 2 * self.ncrops - 2
        logits = _at_least_fp32(logits) / self.student_temp
        return soft_cross_entropy(logits, targets).sum() / pairs

    def batch_loss(self, student_output: Tensor, targets: Tensor) -> Tensor:
        """Loss of a whole batch.

        Args:
            student_output: Student logits [V * B, K], crop by crop, global crops first.
            targets: Teacher probabilities [G, B, K].

        Returns:
            Scalar: the mean over samples and over pairs of a teacher view and another crop.
        """
        views, batch_size = targets.shape[:2]
        combined = combine_targets(targets)  # [G + 1, B, K]
        total = student_output.new_zeros(())
        for crop, logits in enumerate(student_output.split(batch_size)):
            total = total + self.crop_loss(logits, combined[min(crop, views)])
        return total / batch_size

    def forward(self, student_output: Tensor, teacher_output: Tensor, epoch: int) -> Tensor:
        """The batch's loss; the centre is updated.

        Args:
            student_output: Student logits [V * B, K], crop by crop, global crops first.
            teacher_output: Teacher logits [2 * B, K] of the global crops.
            epoch: Current epoch, from 0.

        Returns:
            Scalar loss.

        Raises:
            ValueError: When the outputs are not ``ncrops`` and 2 blocks of one batch.
        """
        batch_size, rest = divmod(len(teacher_output), 2)
        if rest or len(student_output) != self.ncrops * batch_size:
            raise ValueError(
                f'DINOLoss: expected teacher_output [2 * B, K] and student_output '
                f'[{self.ncrops} * B, K] (ncrops={self.ncrops}), got {tuple(teacher_output.shape)} '
                f'and {tuple(student_output.shape)}'
            )
        return self.batch_loss(student_output, self.targets(teacher_output, epoch))
