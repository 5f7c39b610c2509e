"""CLIP's loss in tiles: the matrix of similarities is never held.

python examples/contrastive_losses.py
"""

import torch
from torch.nn import functional as F

from memengine import ClipLoss
from memengine.memory import saved_bytes

PAIRS, WIDTH = 2048, 64


def main() -> None:
    """Compare bytes and gradients of both forms."""
    torch.manual_seed(0)
    images = F.normalize(torch.randn(PAIRS, WIDTH), dim=-1).requires_grad_()
    texts = F.normalize(torch.randn(PAIRS, WIDTH), dim=-1).requires_grad_()
    scale = torch.tensor(14.3, requires_grad=True)

    mib, gradients = {}, {}
    for name, loss in (('plain', ClipLoss()), ('in tiles', ClipLoss(tile_size=256))):
        mib[name] = saved_bytes(lambda loss=loss: loss(images, texts, scale), images, texts) / 2**20
        gradients[name] = torch.autograd.grad(loss(images, texts, scale), (images, texts, scale))
    error = max(
        float((one - other).norm() / other.norm())
        for one, other in zip(gradients['in tiles'], gradients['plain'], strict=True)
    )
    print(f'relative difference of the gradients: {error:.0e}')
    print(f'saved: {mib["plain"]:.1f} MiB, in tiles {mib["in tiles"]:.1f} MiB')


if __name__ == '__main__':
    main()
