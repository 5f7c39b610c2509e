"""mmpretrain: its own SimCLR config, started by MMEngine's Runner; one line of the config changes.

python examples/beside/mmpretrain_config.py
"""

import tempfile
from pathlib import Path

import mmpretrain.utils.dependency
import torch
from mmengine.config import Config
from mmengine.runner import Runner
from mmpretrain.registry import DATASETS
from mmpretrain.structures import DataSample
from torch import Tensor
from torch.utils.data import Dataset

from memengine import SavedBytes

mmpretrain.utils.dependency.WITH_MULTIMODAL = False  # 1.2.0's fail on transformers 5
CONFIGS = Path(mmpretrain.__file__).parent / '.mim/configs'


@DATASETS.register_module()
class Noise(Dataset):
    """32 random images in two views of [3, 32, 32], as mmpretrain's pipelines give them."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, object]:
        views = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(index))
        return {'inputs': [*views], 'data_samples': DataSample()}


def train(**changes: object) -> tuple[dict[str, Tensor], int]:
    """Two iterations: the weights, and the most bytes saved."""
    cfg = Config.fromfile(CONFIGS / 'simclr/simclr_resnet50_8xb32-coslr-200e_in1k.py')
    cfg.model.backbone.update(depth=18, norm_cfg=dict(type='BN'))
    cfg.model.neck.update(in_channels=512, hid_channels=64)
    cfg.train_dataloader.update(batch_size=16, num_workers=0, persistent_workers=False)
    cfg.train_dataloader.dataset = dict(type='Noise')
    cfg.train_cfg, cfg.param_scheduler = dict(by_epoch=True, max_epochs=1), []
    cfg.randomness, cfg.log_level = dict(seed=0), 'ERROR'
    cfg.update(changes)
    with tempfile.TemporaryDirectory() as cfg.work_dir:
        runner = Runner.from_cfg(cfg)
        with SavedBytes(runner.model) as saved:
            runner.train()
    return runner.model.state_dict(), saved.peak_bytes


if __name__ == '__main__':
    plain, most = train(experiment_name='plain')
    hooks = [dict(type='memengine.RecomputedActivationsHook')]  # the line that is new
    weights, less = train(experiment_name='recomputed', custom_hooks=hooks)
    print('same weights:', all(torch.equal(plain[name], weights[name]) for name in plain))
    print(f'saved: {most / 2**20:.2f} MiB, recomputed {less / 2**20:.2f} MiB')
