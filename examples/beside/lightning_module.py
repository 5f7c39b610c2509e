"""Lightning: recomputed activations in any LightningModule; two lines change.

python examples/beside/lightning_module.py
"""

import logging
import warnings

import lightning
import timm
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from memengine import SavedBytes
from memengine.engine.callbacks.lightning import TechniquesCallback  # 1: this line is new


class Digits(lightning.LightningModule):
    """A classifier as anybody writes it."""

    def __init__(self) -> None:
        super().__init__()
        sizes = dict(img_size=8, patch_size=2, depth=2, in_chans=1)
        self.net = timm.create_model('vit_tiny_patch16_224', num_classes=10, **sizes)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The loss of a batch: [B, 1, 8, 8] and [B]."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(**techniques: object) -> tuple[dict[str, torch.Tensor], int]:
    """Train for four steps: the weights, and the most bytes saved."""
    lightning.seed_everything(0, verbose=False)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:64, None] / 16
    loader = DataLoader(TensorDataset(images, torch.tensor(digits.target[:64])), batch_size=16)
    model = Digits()
    callbacks = [TechniquesCallback(**techniques)]  # 2: handed to the trainer
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator='cpu', enable_model_summary=False, callbacks=callbacks, **quiet
    )
    with SavedBytes(model, images) as saved:
        trainer.fit(model, loader)
    return model.state_dict(), saved.peak_bytes


if __name__ == '__main__':
    warnings.filterwarnings('ignore', module='lightning')
    logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)
    plain, plain_bytes = fit()
    weights, less_bytes = fit(recomputed_activations=True)
    print('same weights:', all(torch.equal(plain[name], weights[name]) for name in plain))
    print(f'saved: {plain_bytes / 2**20:.2f} MiB, recomputed {less_bytes / 2**20:.2f} MiB')
