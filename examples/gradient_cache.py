"""The gradient cache: SimCLR's loss over 64 samples in the memory of a chunk of 16 images.

python examples/gradient_cache.py
"""

import timm
import torch
from sklearn.datasets import load_digits

from memengine import GradCache, SavedBytes, SupConLoss


def two_views(images: torch.Tensor) -> torch.Tensor:
    """Two noisy views of each image, [2B, C, H, W]: first one of all, then the other."""
    return torch.cat([images + 0.1 * torch.randn_like(images) for _ in range(2)])


def main() -> None:
    """Train for three steps; the plain step's bytes beside them."""
    torch.manual_seed(0)
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:64, None] / 16
    model = timm.create_model(
        'vit_tiny_patch16_224', img_size=8, patch_size=2, depth=2, in_chans=1, num_classes=32
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    contrast = SupConLoss(temperature=0.5, base_temperature=0.5)

    def loss_of(features: torch.Tensor) -> torch.Tensor:  # [B, 2, D]
        return contrast(torch.nn.functional.normalize(features, dim=-1))

    with SavedBytes(model, images) as plain:
        loss_of(torch.stack(model(two_views(images)).chunk(2), dim=1)).backward()
    cache = GradCache(model=model, chunk_size=16, loss_fn=loss_of, loss_type='SimCLR')
    for _ in range(3):
        optimizer.zero_grad()
        with SavedBytes(model, images) as chunked:
            loss = cache(two_views(images))  # adds the gradient, as loss.backward() would
        optimizer.step()
        print(f'loss {loss:.3f}')
    print(
        f'saved: {plain.peak_bytes / 2**20:.1f} MiB, in chunks {chunked.peak_bytes / 2**20:.1f} MiB'
    )


if __name__ == '__main__':
    main()
