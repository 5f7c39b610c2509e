"""Slices in bfloat16: the context of forward and the backward call are the caller's.

    python examples/mixed_precision.py

In float16 on a GPU: ``backward=lambda loss: scaler.scale(loss).backward()``, torch's GradScaler.
"""

import timm
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

from memengine import SavedBytes
from memengine.techniques import additive_step, split_batch


def main() -> None:
    """Train for three steps; the bytes of the same slices in fp32 beside them."""
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
        return F.cross_entropy(logits.float(), piece['labels'], reduction='sum') / len(images)

    def step(enabled: bool) -> float:
        optimizer.zero_grad()
        with SavedBytes(model, images) as saved:
            loss = additive_step(
                split_batch(batch, 32),
                loss_of,
                modules=[model],
                context=lambda: torch.autocast('cpu', torch.bfloat16, enabled=enabled),
            )
        optimizer.step()
        print(f'loss {loss:.3f}')
        return saved.peak_bytes / 2**20

    full = step(enabled=False)
    half = [step(enabled=True) for _ in range(3)][-1]
    print(f'saved: {full:.1f} MiB, in bfloat16 {half:.1f} MiB')


if __name__ == '__main__':
    main()
