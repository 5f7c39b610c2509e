"""Lightning: the gradient cache in a module that steps by itself; three lines change.

python examples/beside/lightning_gradient_cache.py
"""

import lightning
import timm
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from memengine import GradCache, NTXentLoss, SavedBytes  # 1: this line is new


class Contrast(lightning.LightningModule):
    """SimCLR that steps by itself."""

    def __init__(self, chunk_size: int | None) -> None:
        super().__init__()
        self.automatic_optimization = False
        sizes = dict(img_size=8, patch_size=2, depth=2, in_chans=1)
        self.net = timm.create_model('vit_tiny_patch16_224', num_classes=32, **sizes)
        self.loss, self.chunk_size, self.losses = NTXentLoss(), chunk_size, []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """One step on [B, 1, 8, 8]."""
        optimizer = self.optimizers()
        view1, view2 = (batch[0] + 0.1 * torch.randn_like(batch[0]) for _ in range(2))
        if self.chunk_size:  # 2 and 3: in the place of forward, loss and backward
            settings = dict(chunk_size=self.chunk_size, loss_fn=self.loss)
            cache = GradCache(models=[self.net] * 2, backward=self.manual_backward, **settings)
            loss = cache(view1, view2)
        else:
            loss = self.loss(self.net(view1), self.net(view2))
            self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.losses.append(loss.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As anywhere."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(batch_size: int, chunk_size: int | None) -> tuple[list[float], int]:
    """Train for three steps: the losses, and the most bytes saved."""
    lightning.seed_everything(0, verbose=False)
    images = torch.tensor(load_digits().images, dtype=torch.float32)[: 3 * batch_size, None] / 16
    model, loader = Contrast(chunk_size), DataLoader(TensorDataset(images), batch_size=batch_size)
    off = dict.fromkeys(['logger', 'enable_checkpointing', 'enable_progress_bar'], False)
    trainer = lightning.Trainer(max_epochs=1, accelerator='cpu', enable_model_summary=False, **off)
    with SavedBytes(model) as saved:
        trainer.fit(model, loader)
    return model.losses, saved.peak_bytes


if __name__ == '__main__':
    (plain, most), (chunked, less), (_, small) = fit(64, None), fit(64, 8), fit(8, None)
    print('loss', *(f'{loss:.5f}' for loss in plain), 'in chunks', *(f'{x:.5f}' for x in chunked))
    print(f'saved: {most / 2**20:.1f} MiB, in chunks {less / 2**20:.1f} MiB')
    print(f'8 samples, plainly: {small / 2**20:.1f} MiB')
