"""Accelerate: SimCLR with batches 8 times as large in the same bytes; three lines change.

python examples/beside/accelerate_loop.py
"""

import timm
import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits

from memengine import GradCache, NTXentLoss, SavedBytes  # 1: this line is new


def simclr(batch_size: int, chunk_size: int | None) -> tuple[list[float], int]:
    """Train for three steps, in chunks or plainly: the losses, and the most bytes saved."""
    torch.manual_seed(0)
    digits = torch.tensor(load_digits().images, dtype=torch.float32)[:batch_size, None] / 16
    model = timm.create_model(
        'vit_tiny_patch16_224', img_size=8, patch_size=2, depth=2, in_chans=1, num_classes=32
    )
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    criterion = NTXentLoss()
    if chunk_size:
        cache = GradCache(  # 2: made once
            models=[model, model],
            chunk_size=chunk_size,
            loss_fn=criterion,
            backward=accelerator.backward,
        )
    losses, most = [], 0
    for _ in range(3):
        view1, view2 = (digits + 0.1 * torch.randn_like(digits) for _ in range(2))
        with SavedBytes(model, view1, view2) as saved:
            if chunk_size:
                loss = cache(view1, view2)  # 3: in the place of forward, loss and backward
            else:
                loss = criterion(model(view1), model(view2))
                accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        most = max(most, saved.peak_bytes)
    return losses, most


if __name__ == '__main__':
    plain, plain_bytes = simclr(64, None)
    chunked, chunked_bytes = simclr(64, 8)
    _, small_bytes = simclr(8, None)
    print('loss', *(f'{loss:.5f}' for loss in plain), 'in chunks', *(f'{x:.5f}' for x in chunked))
    print(f'saved: {plain_bytes / 2**20:.1f} MiB, in chunks {chunked_bytes / 2**20:.1f} MiB')
    print(f'8 samples, plainly: {small_bytes / 2**20:.1f} MiB')
