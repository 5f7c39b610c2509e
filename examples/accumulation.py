"""Additive losses slice by slice: the batch's gradient in the memory of one slice.

python examples/accumulation.py
"""

import timm
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

from memengine import SavedBytes
from memengine.techniques import additive_step, split_batch


def main() -> None:
    """Train for three steps in slices of 16, beside a plain step of the same batch."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:64, None] / 16  # [64, 1, 8, 8]
    batch = {'images': images, 'labels': torch.tensor(digits.target)[:64]}
    model = timm.create_model(
        'vit_tiny_patch16_224', img_size=8, patch_size=2, depth=2, in_chans=1, num_classes=10
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(piece: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(piece['images'])  # [n, 10]
        return F.cross_entropy(logits, piece['labels'], reduction='sum') / len(images)

    with SavedBytes(model, images) as plain:
        loss_of(batch).backward()
    for _ in range(3):
        optimizer.zero_grad()
        with SavedBytes(model, images) as sliced:
            loss = additive_step(split_batch(batch, 16), loss_of, modules=[model])
        optimizer.step()
        print(f'loss {loss:.3f}')
    print(
        f'saved: {plain.peak_bytes / 2**20:.1f} MiB, in slices {sliced.peak_bytes / 2**20:.1f} MiB'
    )


if __name__ == '__main__':
    main()
