"""DINO's multi-crop step in slices: sets of crops and samples of one resolution.

python examples/multi_crop.py
"""

import copy

import timm
import torch
from torch import nn

from memengine import DINOLoss, SavedBytes
from memengine.techniques import dino_step

BATCH, PROTOTYPES = 16, 256


def main() -> None:
    """Take three steps of self-distillation; the whole batch's bytes beside them."""
    torch.manual_seed(0)
    backbone = timm.create_model(
        'vit_tiny_patch16_224', img_size=32, patch_size=8, depth=2, num_classes=0,
        dynamic_img_size=True,
    )  # fmt: skip
    student = nn.Sequential(backbone, nn.Linear(192, PROTOTYPES))
    teacher = copy.deepcopy(student).requires_grad_(False)
    loss = DINOLoss(PROTOTYPES, 6, 0.04, 0.04, 0, 1)  # two global crops and four local ones
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4)

    def step(micro_batch_size: float | None) -> torch.Tensor:
        crops = [torch.randn(BATCH, 3, size, size) for size in (32, 32, 16, 16, 16, 16)]
        with torch.no_grad():
            targets = teacher(torch.cat(crops[:2]))  # [2B, K]
        return dino_step(student, crops, targets, loss, 0, micro_batch_size)

    with SavedBytes(student) as whole:
        step(2 * BATCH)  # crops of one size together
    for _ in range(3):
        optimizer.zero_grad()
        with SavedBytes(student) as sliced:
            value = step(4)  # four global crops at a time, or as many pixels of local ones
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                old.lerp_(new, 0.004)
        print(f'loss {value:.3f}')
    print(
        f'saved: {whole.peak_bytes / 2**20:.1f} MiB, in slices {sliced.peak_bytes / 2**20:.1f} MiB'
    )


if __name__ == '__main__':
    main()
