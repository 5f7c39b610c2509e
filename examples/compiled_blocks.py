"""torch.compile of a model's blocks: one compilation for all that are alike.

python examples/compiled_blocks.py
"""

import timm
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

from memengine import compile_blocks


def main() -> None:
    """Compare the gradient before and after; with the default backend a GPU saves what it fuses."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:64, None] / 16  # [64, 1, 8, 8]
    labels = torch.tensor(digits.target)[:64]
    model = timm.create_model(
        'vit_tiny_patch16_224', img_size=8, patch_size=2, depth=2, in_chans=1, num_classes=10
    )

    def gradient() -> torch.Tensor:
        model.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    plain = gradient()
    handle = compile_blocks(model, backend='aot_eager')  # traces alone; leave it out to compile
    compiled = gradient()
    handle.undo()
    error = float((compiled - plain).norm() / plain.norm())
    print(f'{len(handle.names)} blocks compiled, relative difference of the gradient {error:.0e}')


if __name__ == '__main__':
    main()
