"""The engine on a GPU (pytest -m gpu)."""

import gc
import json
from contextlib import nullcontext

import pytest
import timm
import torch
import torch.distributed as dist
from mmengine.hooks import Hook
from torch import nn
from torch._functorch import config
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memengine._torch_private.ops import draw_from_known_generators_when_compiled
from memengine.engine.data_order import seed_generators
from memengine.engine.hooks.random_state import RandomStateHook
from memengine.engine.optim import kept_graphs
from memengine.engine.optim.kept_graphs import KeptGraphs
from memengine.engine.step import LogVars
from memengine.engine.wrappers import FullyShardedDataParallel
from memengine.techniques import shard_model
from tests.engine.toy import Losses, params, toy_runner

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize('precision', ['fp32', 'bf16', 'fp16'])
def test_training_runs_on_the_gpu_and_logs_its_memory(tmp_path, precision):
    optim = dict(optimizer=dict(type='AdamW', lr=0.01), precision=precision)
    losses = Losses()
    hooks = dict(memory=dict(type='MemoryHook'), logger=dict(type='LoggerHook', interval=5))
    runner = toy_runner(tmp_path, losses, optim_wrapper=optim, default_hooks=hooks)
    runner.train()
    assert next(runner.model.parameters()).is_cuda
    assert len(losses.seen) == 15
    (path,) = tmp_path.glob('*/vis_data/scalars.json')
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert any(row.get('memory_mib', 0) > 0 for row in rows)


def test_resume_on_the_gpu_is_the_uninterrupted_run(tmp_path):
    whole, first, second = Losses(), Losses(), Losses()
    final = toy_runner(tmp_path / 'whole', whole)
    final.train()
    cfg = dict(by_epoch=True, max_epochs=3)
    toy_runner(tmp_path / 'parts', first, train_cfg=dict(cfg, stop_at_iter=7)).train()
    runner = toy_runner(tmp_path / 'parts', second, train_cfg=cfg, resume=True)
    runner.train()
    assert first.seen + second.seen == whole.seen
    for name, value in params(runner).items():
        assert torch.equal(value, params(final)[name]), name


class Pinned(Hook):
    """Whether each batch comes in pinned memory."""

    def before_train(self, runner):
        self.seen = []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.seen.append(data_batch['x'].is_pinned())


@pytest.fixture
def of_one_process(tmp_path):
    """A group on gloo, which a simulated GPU has, too."""
    dist.init_process_group('gloo', init_method=f'file://{tmp_path}/rank', rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_run_whose_shards_are_on_the_host_is_one_on_the_gpu(tmp_path, of_one_process):
    pinned = Pinned()
    runner = toy_runner(
        tmp_path,
        launcher='pytorch',
        cfg=dict(model_wrapper_cfg=dict(type='FullyShardedDataParallel', offload=True)),
        default_hooks=dict(memory=dict(type='MemoryHook')),
        custom_hooks=[pinned],
    )
    runner.train()
    assert not any(parameter.is_cuda for parameter in runner.model.parameters())
    (path,) = tmp_path.glob('*/vis_data/scalars.json')
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert any(row.get('memory_mib', 0) > 0 for row in rows)
    assert pinned.seen
    assert all(pinned.seen)


def test_graphs_are_kept_in_the_gpus_memory_where_shards_are_on_the_host(
    of_one_process, monkeypatch
):
    model, asked = nn.Linear(8, 8), []
    shard_model(model, device='cuda', offload=True)

    def room_bytes(device):
        asked.append(device.type)
        return 1000

    monkeypatch.setattr(kept_graphs, 'room_bytes', room_bytes)
    graphs = KeptGraphs('auto')
    for _ in range(2):
        with graphs.measured(model, updated=True):
            model(torch.ones(2, 8, device='cuda')).exp().sum().backward()
        model.zero_grad()
    assert asked == ['cuda']
    assert graphs.number > 0  # as gradients take none of it


def test_figures_of_several_devices_and_types_are_logged():
    figures = {
        'loss': torch.tensor(0.1, device='cuda', requires_grad=True) * 3,
        'count': torch.tensor(2**60 + 1, device='cuda'),
        'half': torch.tensor(0.1, device='cuda', dtype=torch.bfloat16),
        'host': torch.tensor(4.0),
    }
    found = LogVars(figures).on_host()
    assert list(found) == list(figures)
    for name, figure in figures.items():
        assert found[name].is_cpu
        assert found[name].dtype == figure.dtype
        assert torch.equal(found[name], figure.detach().cpu())


@pytest.fixture
def as_torch_draws():
    """In compiled checkpoints, as if nobody had asked for known generators yet."""
    setting = 'graphsafe_rng_functionalization'  # since 2.7; monkeypatch would leave it deleted
    draw_from_known_generators_when_compiled.cache_clear()
    with config.patch({setting: True}) if hasattr(config, setting) else nullcontext():
        yield
    draw_from_known_generators_when_compiled.cache_clear()


@pytest.mark.usefixtures('as_torch_draws')
def test_dropout_in_compiled_checkpoints_follows_the_seed_of_an_iteration():
    RandomStateHook().before_train(None)
    torch._dynamo.reset()
    x = torch.ones(64, device='cuda', requires_grad=True)

    @torch.compile(backend='aot_eager')
    def masked(x):
        return checkpoint(lambda x: F.dropout(x).cos(), x, use_reentrant=False)

    seed_generators(1)
    first = masked(x)
    seed_generators(1)
    assert torch.equal(masked(x), first)


BUDGET = 1 << 30  # bytes; AdamW in fp32 takes 16 for each parameter


@pytest.fixture
def alone(tmp_path):
    """A group of this process only."""
    if torch.cuda.get_device_name() == 'Simulated GPU':
        pytest.skip('NCCL needs a GPU that is not simulated')
    dist.init_process_group('nccl', init_method=f'file://{tmp_path}/meet', rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def budget():
    """The allocator may take that much of the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction(
        BUDGET / torch.cuda.get_device_properties(0).total_memory
    )
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def vit_base(img_size=64):
    torch.manual_seed(0)
    return timm.create_model('vit_base_patch16_224', img_size=img_size, num_classes=10)


def train(model, run, steps=6):
    """Losses of AdamW on one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    images = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(1)).cuda()
    labels = torch.arange(8, device='cuda')
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with run.gathered() if run is not model else torch.enable_grad():
            loss = F.cross_entropy(run(images), labels)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_vit_whose_state_does_not_fit_trains_within_the_budget(alone, budget):
    assert 16 * sum(p.numel() for p in vit_base().parameters()) > BUDGET

    def plainly():
        model = vit_base().cuda()
        train(model, model)

    with pytest.raises(torch.cuda.OutOfMemoryError):
        plainly()
    gc.collect()
    torch.cuda.empty_cache()
    model = vit_base()
    losses = train(model, FullyShardedDataParallel(model, offload=True))
    assert losses[-1] < losses[0]
    assert torch.cuda.max_memory_reserved() <= BUDGET
    assert all(p.device.type == 'cpu' and p.grad.device.type == 'cpu' for p in model.parameters())


def test_with_offload_two_blocks_are_on_the_gpu(alone):
    model = vit_base(img_size=16)
    block = sum(p.nbytes for p in model.blocks[0].parameters())
    sharded = shard_model(model, offload=True)
    image = torch.ones(1, 3, 16, 16, device='cuda')
    for _ in range(2):  # what libraries take for themselves is there the second time
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with sharded.gathered():
            sharded(image).sum().backward()
        torch.cuda.synchronize()
    assert block < torch.cuda.max_memory_allocated() - before <= 2 * block
