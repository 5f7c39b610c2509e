"""DINO: a student learns to predict its own moving average, across crops of an image.

Shapes: B samples, V crops each (global crops first), D width of the features, K prototypes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memengine._torch_private.ops import foreach_lerp_
from memengine.engine.step import Progress
from memengine.losses.dino import DINOLoss
from memengine.losses.koleo import koleo_loss
from memengine.models.algorithms.base import Algorithm, feature_moments, feature_rank, feature_std
from memengine.models.build import build_head
from memengine.registry import MODELS, HeadConfig, ModelConfig
from memengine.techniques.slices.multi_crop import CropSlice, plan_slices
from memengine.techniques.slices.slicing import Slice

__all__ = ['DINO', 'TeacherTargets']

GLOBAL_CROPS = 2


@dataclass(frozen=True)
class TeacherTargets:
    """What the teacher says of a batch.

    Args:
        probabilities: Of the global crops, [2, B, K].
        feature_rank: Number of dimensions in which the teacher's features of them are spread.
    """

    probabilities: Tensor
    feature_rank: Tensor

    def scalars(self) -> dict[str, Tensor]:
        """What tells whether the teacher has collapsed: its entropies, in nats, and its rank."""
        mean = self.probabilities.mean(dim=(0, 1))  # [K]
        return {
            'teacher_entropy': torch.special.entr(mean).sum(),
            'teacher_sample_entropy': torch.special.entr(self.probabilities).sum(dim=-1).mean(),
            'feature_rank': self.feature_rank,
        }


class _Network(nn.Module):
    """Backbone and head; crops of one size go through together."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, crops: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """V crops [B, C, h, w] to features [V * B, D] and logits [V * B, K], crop by crop."""
        features, start = [], 0
        for end in range(1, len(crops) + 1):
            if end == len(crops) or crops[end].shape != crops[start].shape:
                features.append(self.backbone(torch.cat(list(crops[start:end]))))
                start = end
        joined = torch.cat(features)  # [V * B, D]
        return joined, self.head(joined)


@MODELS.register_module()
class DINO(Algorithm):
    """Self-distillation with no labels.

    Args:
        backbone: Config of a backbone with ``num_features``, e.g. a ``TimmBackbone``. Its
            ``drop_path_rate`` holds for the student only.
        head: Config of the head; ``in_dim`` is filled in. ``out_dim`` is the number of
            prototypes K.
        local_crops: Number of local crops after the two global ones.
        warmup_teacher_temp: Teacher temperature at the start.
        teacher_temp: Teacher temperature after the warm-up.
        warmup_teacher_temp_epochs: Length of the linear warm-up, in epochs.
        student_temp: Student temperature.
        center_momentum: Momentum of the running centre.
        centering: ``'center'`` (the paper) or ``'sinkhorn'``; see :class:`DINOLoss`.
        momentum_teacher: Share of the old teacher in its moving average at the start.
        momentum_teacher_end: The same at the end; between them it follows half a cosine.
        freeze_last_layer: Epochs in which the prototypes are not updated.
        koleo_weight: Weight of the KoLeo loss of the student's backbone features, summed over the
            global crops (DINOv2: 0.1). In it samples meet, so that a batch is carried out in slices
            by the gradient cache.
        **kwargs: Of :class:`Algorithm`.

    Raises:
        ValueError: For a setting out of range, or a batch with another number of crops.

    Logged beside the loss: ``teacher_entropy`` (nats) of the mean teacher output, log K when all
    prototypes are used alike and 0 when one is; ``teacher_sample_entropy``, the mean entropy of
    one image's teacher output, log K when it says nothing; ``feature_std``, the spread of the
    student's normalised features times sqrt(D), 1 when isotropic and 0 when all are alike;
    ``feature_rank``, the number of dimensions in which the teacher's features of the global crops
    are spread: all of them are there at once, in slices, too. A falling loss without them proves
    nothing. ``teacher_temp`` and ``ema_momentum`` are logged too;
    with ``koleo_weight`` the loss's parts ``loss_dino`` and ``loss_koleo``.

    Distributed: the loss is the rank's mean (average the gradients, as DDP does); the centre,
    Sinkhorn's sums and KoLeo's neighbours are those of all ranks; with BatchNorm in the head set
    ``sync_bn='torch'``.

    Source: Caron et al., Emerging Properties in Self-Supervised Vision Transformers (2021); KoLeo
    beside it: Oquab et al., DINOv2 (2023).
    """

    additive = True

    def __init__(
        self,
        backbone: ModelConfig,
        head: HeadConfig,
        local_crops: int = 8,
        warmup_teacher_temp: float = 0.04,
        teacher_temp: float = 0.04,
        warmup_teacher_temp_epochs: int = 0,
        student_temp: float = 0.1,
        center_momentum: float = 0.9,
        centering: Literal['center', 'sinkhorn'] = 'center',
        momentum_teacher: float = 0.996,
        momentum_teacher_end: float = 1.0,
        freeze_last_layer: int = 1,
        koleo_weight: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if local_crops < 0:
            raise ValueError(f'DINO: local_crops must not be negative, got {local_crops}')
        if not 0 <= momentum_teacher <= momentum_teacher_end <= 1:
            raise ValueError(
                'DINO: 0 <= momentum_teacher <= momentum_teacher_end <= 1 must hold, got '
                f'{momentum_teacher} and {momentum_teacher_end}'
            )
        if koleo_weight < 0:
            raise ValueError(f'DINO: koleo_weight must not be negative, got {koleo_weight}')
        self.koleo_weight = koleo_weight
        self.coupled = koleo_weight > 0
        self.student = self._build(backbone, head)
        calm = copy.deepcopy(backbone)
        if 'drop_path_rate' in calm:
            calm['drop_path_rate'] = 0.0
        self.teacher = self._build(calm, head)
        self.after_init()
        self.teacher.requires_grad_(False)
        self.loss = DINOLoss(
            out_dim=head['out_dim'],
            ncrops=GLOBAL_CROPS + local_crops,
            warmup_teacher_temp=warmup_teacher_temp,
            teacher_temp=teacher_temp,
            warmup_teacher_temp_epochs=warmup_teacher_temp_epochs,
            nepochs=warmup_teacher_temp_epochs,
            student_temp=student_temp,
            center_momentum=center_momentum,
            centering=centering,
        )
        self.momentum_teacher = momentum_teacher
        self.momentum_teacher_end = momentum_teacher_end
        self.freeze_last_layer = freeze_last_layer
        self.progress = Progress(iter=0, max_iters=1, epoch=0, max_epochs=1)

    @staticmethod
    def _build(backbone: dict[str, Any], head: dict[str, Any]) -> _Network:
        features = MODELS.build(backbone)
        return _Network(features, build_head(head, features.num_features))

    @property
    def ema_momentum(self) -> float:
        """Share of the old teacher in the next moving average."""
        done = self.progress.iter / self.progress.max_iters
        first, last = self.momentum_teacher, self.momentum_teacher_end
        return last + (first - last) * (1 + math.cos(math.pi * done)) / 2

    def after_init(self) -> None:
        """Let the teacher begin as the student."""
        self.teacher.load_state_dict(self.student.state_dict())

    def set_progress(self, progress: Progress) -> None:
        """Take note of where training stands."""
        self.progress = progress

    def _check_crops(self, inputs: Any) -> None:
        if not isinstance(inputs, (list, tuple)) or len(inputs) != self.loss.ncrops:
            got = f'{len(inputs)} crops' if isinstance(inputs, (list, tuple)) else 'one view'
            raise ValueError(
                f'DINO: model.local_crops={self.loss.ncrops - GLOBAL_CROPS} expects '
                f'{GLOBAL_CROPS} global crops and as many local ones, but the pipeline gave {got}'
            )

    @torch.no_grad()
    def targets(
        self, inputs: Sequence[Tensor], data_samples: Any = None, size: float | None = None
    ) -> TeacherTargets:
        """Teacher probabilities of the global crops, ``size`` crops at a time."""
        self._check_crops(inputs)
        crops = list(inputs[:GLOBAL_CROPS])
        pieces = [crops]
        if size is not None:
            pieces = [[piece] for crop in crops for piece in crop.split(int(size))]
        outputs = [self.teacher(piece) for piece in pieces]
        features, logits = (torch.cat(parts) for parts in zip(*outputs, strict=True))  # 2 * B rows
        probabilities = self.loss.targets(logits, self.progress.epoch)
        return TeacherTargets(probabilities, feature_rank(features))

    def embed(self, inputs: Sequence[Tensor], data_samples: Any = None) -> tuple[Tensor, Tensor]:
        """Student features [V * B, D] and logits [V * B, K], crop by crop."""
        return self.student(inputs)

    def embedding_loss(
        self, embeddings: tuple[Tensor, Tensor], targets: TeacherTargets, data_samples: Any = None
    ) -> dict[str, Tensor]:
        """The DINO loss, and what tells whether it means anything."""
        features, logits = embeddings
        sums = {
            'loss': self.loss.batch_loss(logits, targets.probabilities),
            **feature_moments(features),
        }
        losses = self.batch_losses(sums, targets)
        if self.coupled:
            batch_size = targets.probabilities.shape[1]
            losses |= self._koleo(features[: GLOBAL_CROPS * batch_size])
        return losses

    def _koleo(self, features: Tensor) -> dict[str, Tensor]:
        """The KoLeo loss of the global crops' features [2 * B, D], crop by crop."""
        ranks = dist.group.WORLD if dist.is_initialized() else None
        crops = features.chunk(GLOBAL_CROPS)
        losses = torch.stack([koleo_loss(crop, process_group=ranks) for crop in crops])
        return {'loss_koleo': self.koleo_weight * losses.sum()}

    def slices(self, inputs: Sequence[Tensor], data_samples: Any, size: float) -> list[Slice]:
        """Sets of (crop, sample) of one resolution, as even as can be.

        A slice holds at most ``size`` crops of the largest size, or as many smaller ones as have
        no more pixels; a fraction of one more makes room for smaller ones only.
        """
        self._check_crops(inputs)
        sizes = [(crop.shape[-2], crop.shape[-1]) for crop in inputs]
        batch_size = len(inputs[0])
        return [
            Slice(
                [inputs[crop][piece.samples.start : piece.samples.stop] for crop in piece.crops],
                None,
                piece,
                len(inputs) * batch_size,
                coupled=piece.crops.start < GLOBAL_CROPS,
            )
            for piece in plan_slices(sizes, batch_size, size)
        ]

    def slice_loss(
        self, embeddings: tuple[Tensor, Tensor], targets: TeacherTargets, piece: Slice
    ) -> dict[str, Tensor]:
        """The slice's share of the loss, and of the sums that the spread is computed from."""
        features, logits = embeddings
        assert isinstance(piece.rows, CropSlice)
        loss = self.loss.crop_loss(
            logits.unflatten(0, (len(piece.rows.crops), -1)),  # [crops, samples, K]
            piece.rows.targets(targets.probabilities),
        )
        return {'loss': loss / targets.probabilities.shape[1], **feature_moments(features)}

    def coupled_part(
        self, embeddings: tuple[Tensor, Tensor], piece: Slice
    ) -> tuple[Tensor, Tensor]:
        """Features [n, D] of the slice's n global crops, and which of the 2 * B they are, [n]."""
        assert isinstance(piece.rows, CropSlice)
        features, _ = embeddings
        samples, crops = piece.rows.samples, piece.rows.crops
        batch_size = piece.total // self.loss.ncrops
        device = features.device
        crop = torch.arange(crops.start, min(crops.stop, GLOBAL_CROPS), device=device)
        sample = torch.arange(samples.start, samples.stop, device=device)
        rows = (crop[:, None] * batch_size + sample).flatten()
        return features[: len(rows)], rows

    def coupled_loss(
        self, embeddings: tuple[Tensor, Tensor], targets: TeacherTargets, data_samples: Any = None
    ) -> dict[str, Tensor]:
        """The KoLeo loss, of the features and rows that :meth:`coupled_part` gave of all slices."""
        features, rows = embeddings
        return self._koleo(features[rows.argsort()])

    @torch.no_grad()
    def batch_losses(self, sums: dict[str, Tensor], targets: TeacherTargets) -> dict[str, Tensor]:
        """The loss, and what tells whether it means anything."""
        loss = sums['loss']
        return {
            'loss_dino' if self.coupled else 'loss': loss,
            **targets.scalars(),
            'feature_std': feature_std(sums),
            'teacher_temp': loss.new_full((), self.loss.temperature(self.progress.epoch)),
            'ema_momentum': loss.new_full((), self.ema_momentum),
        }

    def features(self, inputs: Tensor) -> Tensor:
        """Teacher features [B, D] of images [B, C, H, W]."""
        return self.teacher.backbone(inputs)

    def before_update(self) -> None:
        """Leave the prototypes as they are in the first ``freeze_last_layer`` epochs."""
        if self.progress.epoch < self.freeze_last_layer:
            last_layer: Any = self.student.head.last_layer
            for parameter in last_layer.parameters():
                parameter.grad = None

    @torch.no_grad()
    def after_update(self) -> None:
        """Move the teacher towards the student."""
        teacher: list[Tensor] = list(self.teacher.parameters())
        student: list[Tensor] = list(self.student.parameters())
        foreach_lerp_(teacher, student, 1 - self.ema_momentum)
