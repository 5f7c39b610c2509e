"""Activation checkpointing: each block is computed again in backward.

python examples/activations/checkpointing.py
"""

import timm
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

from memengine import SavedBytes, checkpoint_activations


def main() -> None:
    """Train for three steps; the plain step's bytes beside them."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:64, None] / 16  # [64, 1, 8, 8]
    labels = torch.tensor(digits.target)[:64]
    model = timm.create_model(
        'vit_tiny_patch16_224', img_size=8, patch_size=2, depth=2, in_chans=1, num_classes=10
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad()
        with SavedBytes(model, images) as saved:
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
        optimizer.step()
        print(f'loss {loss:.3f}')
        return saved.peak_bytes / 2**20

    plain = step()
    handle = checkpoint_activations(model, 'blocks')  # keep='attention', budget=0.5, ...
    less = [step() for _ in range(3)][-1]
    handle.undo()  # the model is what it was
    print(f'saved: {plain:.1f} MiB, checkpointed {less:.1f} MiB')


if __name__ == '__main__':
    main()
