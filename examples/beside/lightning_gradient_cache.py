"""Lightning: the gradient cache in a module that steps by itself; three lines change.

python examples/beside/lightning_gradient_cache.py  # with ddp or fsdp2: on two ranks
"""

import sys

import lightning
import timm
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from sklearn.datasets import load_digits
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from memengine import GradCache, NTXentLoss, SavedBytes  # 1: this line is new

STRATEGY = sys.argv[1] if sys.argv[1:] else 'auto'


class Contrast(lightning.LightningModule):
    """SimCLR that steps by itself."""

    def __init__(self, chunk_size: int | None) -> None:
        super().__init__()
        self.automatic_optimization = False
        sizes = dict(img_size=8, patch_size=2, depth=2, in_chans=1)
        self.net = timm.create_model('vit_tiny_patch16_224', num_classes=32, **sizes)
        self.loss, self.chunk_size, self.losses = NTXentLoss(), chunk_size, []

    def configure_model(self) -> None:  # noqa: D102  what Lightning asks for under FSDP2
        if STRATEGY == 'fsdp2':
            fully_shard(self.net, mesh=self.device_mesh['data_parallel'])

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """One step on [B, 1, 8, 8]."""
        views = [batch[0] + 0.1 * torch.randn_like(batch[0]) for _ in range(2)]
        if self.chunk_size:  # 2 and 3: in the place of forward, loss and backward
            own = dict(backward=self.manual_backward, within=self.trainer.model)
            loss = GradCache(None, self.chunk_size, self.loss, models=[self.net] * 2, **own)(*views)
        else:
            loss = self.loss(*map(self.net, views))
            self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()
        self.losses.append(loss.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:  # noqa: D102
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(batch_size: int, chunk_size: int | None) -> tuple[list[float], int]:
    """Train for three steps: the losses, and the most bytes saved on a rank."""
    lightning.seed_everything(0, verbose=False)
    ranks = 1 if STRATEGY == 'auto' else 2
    images = torch.tensor(load_digits().images, dtype=torch.float32)[: 3 * ranks * batch_size, None]
    model, loader = Contrast(chunk_size), DataLoader(TensorDataset(images / 16), batch_size)
    strategy = ModelParallelStrategy(2, 1) if STRATEGY == 'fsdp2' else STRATEGY
    on = dict(max_epochs=1, accelerator='cpu', devices=ranks, strategy=strategy, logger=False)
    trainer = lightning.Trainer(**on, enable_checkpointing=False, enable_progress_bar=False)
    with SavedBytes(model) as saved:
        trainer.fit(model, loader)
    return model.losses, saved.peak_bytes


if __name__ == '__main__':
    (plain, most), (chunked, less), (_, small) = fit(64, None), fit(64, 8), fit(8, None)
    print('loss', *(f'{loss:.5f}' for loss in plain), 'in chunks', *(f'{x:.5f}' for x in chunked))
    print(f'saved: {most / 2**20:.1f} MiB, in chunks {less / 2**20:.1f} MiB')
    print(f'8 samples, plainly: {small / 2**20:.1f} MiB')
