"""Lightly: its SimCLR loop on batches 8 times as large in the same bytes; three lines change.

python examples/beside/lightly_loop.py
"""

import timm
import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from sklearn.datasets import load_digits

from memengine import GradCache, SavedBytes  # 1: this line is new


class SimCLR(torch.nn.Module):
    """As in lightly's examples: a backbone and a projection head."""

    def __init__(self) -> None:
        super().__init__()
        sizes = dict(img_size=8, patch_size=2, depth=2, in_chans=1)
        self.backbone = timm.create_model('vit_tiny_patch16_224', num_classes=0, **sizes)
        self.projection_head = SimCLRProjectionHead(192, 192, 32, batch_norm=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 1, 8, 8] to [B, 32]."""
        return self.projection_head(self.backbone(x).flatten(start_dim=1))


def train(batch_size: int, chunk_size: int | None) -> tuple[list[float], int]:
    """Train for three steps, in chunks or plainly: the losses, and the most bytes saved."""
    torch.manual_seed(0)
    digits = torch.tensor(load_digits().images, dtype=torch.float32)[:batch_size, None] / 16
    model, criterion = SimCLR(), NTXentLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.06)
    if chunk_size:  # 2: made once
        cache = GradCache(models=[model, model], chunk_size=chunk_size, loss_fn=criterion)
    losses, most = [], 0
    for _ in range(3):
        x0, x1 = (digits + 0.1 * torch.randn_like(digits) for _ in range(2))
        with SavedBytes(model, x0, x1) as saved:
            if chunk_size:
                loss = cache(x0, x1)  # 3: in the place of forward, loss and backward
            else:
                loss = criterion(model(x0), model(x1))
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        most = max(most, saved.peak_bytes)
    return losses, most


if __name__ == '__main__':
    (plain, most), (chunked, less), (_, small) = train(64, None), train(64, 8), train(8, None)
    print('loss', *(f'{loss:.5f}' for loss in plain), 'in chunks', *(f'{x:.5f}' for x in chunked))
    print(f'saved: {most / 2**20:.1f} MiB, in chunks {less / 2**20:.1f} MiB')
    print(f'8 samples, plainly: {small / 2**20:.1f} MiB')
