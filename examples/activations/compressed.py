"""DropIT and quantised activations: lossy, with the forward pass as it was.

python examples/activations/compressed.py
"""

from collections.abc import Callable
from typing import Any

import timm
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

from memengine import SavedBytes, drop_activations, quantize_activations


def main() -> None:
    """Bytes and error of the gradient, of three ways to keep what the model saves."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:64, None] / 16  # [64, 1, 8, 8]
    labels = torch.tensor(digits.target)[:64]
    model = timm.create_model(
        'vit_tiny_patch16_224', img_size=8, patch_size=2, depth=2, in_chans=1, num_classes=10
    )

    def gradient() -> tuple[float, torch.Tensor]:
        model.zero_grad()
        with SavedBytes(model, images) as saved:
            F.cross_entropy(model(images), labels).backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return saved.peak_bytes / 2**20, torch.cat(gradients)

    plain, exact = gradient()
    ways: dict[str, Callable[[torch.nn.Module], Any]] = {
        'DropIT': lambda model: drop_activations(model, gamma=0.9),
        '8 bits': lambda model: quantize_activations(model, bits=8),
        '4 bits': lambda model: quantize_activations(model, bits=4),
    }
    for name, way in ways.items():
        with way(model):  # undone at its end
            less, lossy = gradient()
        error = float((lossy - exact).norm() / exact.norm())
        print(f'saved: {plain:.1f} MiB, {name} {less:.1f} MiB, error of the gradient {error:.3f}')


if __name__ == '__main__':
    main()
