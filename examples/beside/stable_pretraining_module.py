"""stable-pretraining: its SimCLR with recomputed activations; two lines change.

python examples/beside/stable_pretraining_module.py
"""

import logging
import warnings

import lightning
import stable_pretraining as spt
import timm
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader

from memengine import SavedBytes, apply_techniques  # 1: this line is new


def forward(self: spt.Module, batch: dict[str, Tensor], stage: str) -> dict[str, Tensor]:
    """SimCLR on two noisy views of [B, 1, 8, 8], as its users write it."""
    views = [batch['image'] + 0.1 * torch.randn_like(batch['image']) for _ in range(2)]
    embeddings = [self.projector(self.backbone(view)) for view in views]
    return {'loss': self.simclr_loss(*embeddings)}


def fit(**techniques: object) -> tuple[dict[str, Tensor], int]:
    """Train for three steps: the weights, and the most bytes saved."""
    lightning.seed_everything(0, verbose=False)
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:48, None] / 16
    samples = [dict(image=image) for image in images]
    sizes = dict(img_size=8, patch_size=2, depth=2, in_chans=1)
    module = spt.Module(
        backbone=timm.create_model('vit_tiny_patch16_224', num_classes=0, **sizes),
        projector=torch.nn.Linear(192, 32),
        forward=forward,
        simclr_loss=spt.losses.NTXEntLoss(temperature=0.5),
        optim=dict(optimizer='SGD', scheduler='CosineAnnealingLR'),
    )
    if techniques:
        apply_techniques(module.backbone, **techniques)  # 2: before the trainer gets it
    off = dict.fromkeys(['logger', 'enable_checkpointing', 'enable_progress_bar'], False)
    trainer = lightning.Trainer(max_epochs=1, accelerator='cpu', enable_model_summary=False, **off)
    with SavedBytes(module) as saved:
        trainer.fit(module, DataLoader(samples, batch_size=16))
    return module.state_dict(), saved.peak_bytes


if __name__ == '__main__':
    warnings.filterwarnings('ignore')
    logging.disable(logging.CRITICAL)
    plain, most = fit()
    weights, less = fit(recomputed_activations=True)
    print('same weights:', all(torch.equal(plain[name], weights[name]) for name in plain))
    print(f'saved: {most / 2**20:.2f} MiB, recomputed {less / 2**20:.2f} MiB')
