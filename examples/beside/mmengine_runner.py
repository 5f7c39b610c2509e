"""MMEngine: its own Runner with recomputed activations; one line of the config changes.

python examples/beside/mmengine_runner.py
"""

import tempfile

import torch
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, MODELS
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from memengine import SavedBytes


@MODELS.register_module()
class MLP(BaseModel):
    """A model as MMEngine's users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 2))

    def forward(self, inputs: Tensor, mode: str = 'tensor') -> Tensor | dict[str, Tensor]:
        """Inputs [B, 8] to [B, 2], or to its loss."""
        out = self.net(inputs)
        return {'loss': out.square().mean()} if mode == 'loss' else out


@DATASETS.register_module()
def noise() -> TensorDataset:
    """64 random rows, [8] each."""
    return TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(0)))


def train(**changes: object) -> tuple[dict[str, Tensor], int]:
    """Train for an epoch: the weights, and the most bytes saved."""
    loader = dict(dataset=dict(type='noise'), sampler=dict(type='DefaultSampler', shuffle=False))
    loader |= dict(batch_size=16, collate_fn=dict(type='default_collate'))
    cfg = dict(
        model=dict(type='MLP'),
        train_dataloader=loader,
        train_cfg=dict(by_epoch=True, max_epochs=1),
        optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1)),
        randomness=dict(seed=0),
        log_level='ERROR',
    )
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(work_dir=folder, **{**cfg, **changes})
        with SavedBytes(runner.model) as saved:
            runner.train()
    return runner.model.state_dict(), saved.peak_bytes


if __name__ == '__main__':
    plain, most = train(experiment_name='plain')
    hooks = [dict(type='memengine.RecomputedActivationsHook')]  # the line that is new
    weights, less = train(experiment_name='recomputed', custom_hooks=hooks)
    print('same weights:', all(torch.equal(plain[name], weights[name]) for name in plain))
    print(f'saved: {most / 2**20:.3f} MiB, recomputed {less / 2**20:.3f} MiB')
