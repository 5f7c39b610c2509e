"""Lightning's Trainer with techniques on two ranks: the plain trainer's weights, fewer bytes."""

import os
import warnings

import pytest
import timm
import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from memengine import SavedBytes
from memengine.testing import run_ranks

lightning = pytest.importorskip('lightning', reason='lightning is not installed')

from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402

from memengine.engine.callbacks.lightning import TechniquesCallback  # noqa: E402


class Classifier(lightning.LightningModule):
    def __init__(self, shards=False):
        super().__init__()
        sizes = dict(img_size=8, patch_size=2, depth=2, embed_dim=32, num_heads=2)
        self.net = timm.models.VisionTransformer(**sizes, in_chans=1, num_classes=10)
        self.shards = shards

    def configure_model(self):
        if self.shards:
            for module in (*self.net.blocks, self.net):
                fully_shard(module, mesh=self.device_mesh['data_parallel'])

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def trainer(**settings):
    warnings.filterwarnings('ignore', module='lightning')
    quiet = dict(logger=False, enable_checkpointing=False, enable_model_summary=False)
    return lightning.Trainer(
        max_epochs=1, accelerator='cpu', enable_progress_bar=False, **quiet, **settings
    )


def loader(size=128):
    images = torch.randn(size, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(images, torch.arange(size) % 10), batch_size=32)


def fit(strategy, **techniques):
    """Two steps on this rank: the whole weights, and the most bytes saved."""
    torch.manual_seed(0)
    model = Classifier(shards=strategy == 'fsdp2')
    on = ModelParallelStrategy(2, 1) if strategy == 'fsdp2' else strategy
    with SavedBytes(model) as saved:
        trainer(strategy=on, devices=2, callbacks=[TechniquesCallback(**techniques)]).fit(
            model, loader()
        )
    assert isinstance(model.net, FSDPModule) == (strategy == 'fsdp2')
    whole = {
        name: weight.full_tensor() if strategy == 'fsdp2' else weight.clone()
        for name, weight in model.net.state_dict().items()
    }
    return whole, saved.peak_bytes


def on_rank(rank, world_size, strategy):
    """Which weights are the same with techniques, and their share of the plain fit's bytes."""
    os.environ.update(LOCAL_RANK=f'{rank}', NODE_RANK='0')  # Lightning starts no ranks of its own
    plain, most = fit(strategy)
    both = dict(recomputed_activations=True, activation_checkpointing='net.blocks.0')
    weights, least = fit(strategy, **both)
    return {name: torch.equal(plain[name], weights[name]) for name in plain}, least / most


@pytest.mark.parametrize('strategy', ['ddp', 'fsdp2'])
def test_two_ranks_learn_the_same_in_fewer_bytes(strategy):
    for same, share in run_ranks(2, on_rank, strategy):
        assert all(same.values()), same
        assert share < 0.7


@pytest.fixture
def techniques():
    return TechniquesCallback(activation_checkpointing='net.blocks.1')


def test_each_fit_says_what_was_done(techniques, monkeypatch):
    model, said = Classifier(), []
    # Not by caplog: stable-pretraining, where it is installed, keeps Lightning's logs to itself.
    monkeypatch.setattr('memengine.engine.callbacks.lightning.rank_zero_info', said.append)
    for fits in (1, 2):
        trainer(callbacks=[techniques]).fit(model, loader())
        assert sum('Activation checkpointing: 1 modules' in line for line in said) == fits


def test_each_fit_is_refused_where_a_technique_does_nothing(techniques):
    model = Classifier()
    trainer(callbacks=[techniques]).fit(model, loader())
    model.net.requires_grad_(False)
    model.net.head.requires_grad_(True)
    with pytest.raises(ValueError, match='1 of 1 modules were not computed again'):
        trainer(callbacks=[techniques]).fit(model, loader())


class BreaksOff(Classifier):
    def on_train_batch_end(self, *arguments):
        raise OSError('a disk is full')


@pytest.mark.parametrize('key', ['activation_checkpointing', 'recomputed_activations'])
def test_a_fit_that_breaks_off_leaves_the_model_as_it_was(key):
    model = BreaksOff()
    techniques = {'activation_checkpointing': 'net.blocks.1', 'recomputed_activations': True}[key]
    callback = TechniquesCallback(**{key: techniques})
    for _ in range(2):
        with pytest.raises(OSError, match='a disk is full'):
            trainer(callbacks=[callback]).fit(model, loader())
        assert not any('forward' in vars(module) for module in model.modules())
