"""BatchNorm over ranks equals BatchNorm over the whole batch."""

import sys
from types import ModuleType

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import nn

from memengine.techniques import checkpoint_activations
from memengine.techniques.layers.sync_batchnorm import (
    SyncBatchNorm,
    SyncedBatchNorm,
    convert_sync_batchnorm,
)
from memengine.testing import assert_same_step, relative_error, run_ranks

CUTS = {2: [0, 3, 8], 4: [0, 1, 3, 6, 8]}  # uneven on purpose


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 3, 2, 2, dtype=torch.float64, generator=generator) + 5


def _rank(rank, world_size, momentum):
    x = data()[CUTS[world_size][rank] : CUTS[world_size][rank + 1]].requires_grad_()
    layer = SyncBatchNorm(3, momentum=momentum).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
    for _ in range(2):
        out = layer(x)
    (out.pow(3).sum()).backward()
    return out.detach(), x.grad, layer.weight.grad, layer.bias.grad, dict(layer.named_buffers())


def _gradients(rank, world_size, keep):
    """Of a block that is checkpointed but for what some ops compute."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()).double()
    convert_sync_batchnorm(block)
    if keep:
        checkpoint_activations(block, '', keep=keep)
    x = data()[:, :, 0, 0].chunk(world_size)[rank]
    for _ in range(2):
        block.zero_grad()
        block(x).pow(3).sum().backward()
    return {name: parameter.grad for name, parameter in block.named_parameters()}


@pytest.mark.parametrize('keep', [['clone'], ['clone', 'sum', 'cat', 'addmm']])
def test_what_ranks_add_up_in_place_is_not_kept_by_checkpointing(keep):
    plain = run_ranks(2, _gradients, [])
    for actual, expected in zip(run_ranks(2, _gradients, keep), plain, strict=True):
        assert_same_step(actual, expected)


@pytest.mark.edge(
    'sync_bn',
    'exact',
    'Outputs, gradients and running statistics of a batch that is spread over ranks',
)
@pytest.mark.parametrize('momentum', [0.1, None])
@pytest.mark.parametrize('world_size', [2, 4])
def test_outputs_gradients_and_statistics(world_size, momentum):
    results = run_ranks(world_size, _rank, momentum)
    x = data().requires_grad_()
    layer = nn.BatchNorm2d(3, momentum=momentum).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
    for _ in range(2):
        out = layer(x)
    out.pow(3).sum().backward()
    assert relative_error(torch.cat([r[0] for r in results]), out) < 1e-12
    assert relative_error(torch.cat([r[1] for r in results]), x.grad) < 1e-10
    assert relative_error(sum(r[2] for r in results), layer.weight.grad) < 1e-12
    assert relative_error(sum(r[3] for r in results), layer.bias.grad) < 1e-12
    for result in results:
        for name, buffer in layer.named_buffers():
            assert relative_error(result[4][name], buffer) < 1e-12, name


def _activating(rank, world_size):
    """timm's layer that also activates, under two names, in training; then more in eval mode."""
    x = data()[CUTS[world_size][rank] : CUTS[world_size][rank + 1]].requires_grad_()
    model = Twice().double()
    convert_sync_batchnorm(model)
    out = model(x)
    out.pow(3).sum().backward()
    model.eval()
    for _ in range(rank):  # ranks need not have as many batches
        model(x)
    unused = nn.BatchNorm2d(3, track_running_stats=False).double().eval()
    convert_sync_batchnorm(holder := nn.Sequential(unused))
    for _ in range(rank):
        assert torch.equal(holder(x), unused(x))
    return out.detach(), x.grad, model.norm.weight.grad, dict(model.named_buffers())


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = self.again = BatchNormAct2d(3, act_layer=nn.SiLU)

    def forward(self, x):
        return self.again(self.norm(x))


@pytest.mark.edge(
    'sync_bn',
    'exact',
    'timm’s BatchNorm that also activates, and a layer that a model has under two names',
)
def test_layers_that_activate_and_have_two_names():
    results = run_ranks(2, _activating, timeout_s=120)  # a rank that is left alone hangs
    x, plain = data().requires_grad_(), Twice().double()
    out = plain(x)
    out.pow(3).sum().backward()
    assert relative_error(torch.cat([r[0] for r in results]), out) < 1e-12
    assert relative_error(torch.cat([r[1] for r in results]), x.grad) < 1e-10
    assert relative_error(sum(r[2] for r in results), plain.norm.weight.grad) < 1e-10
    for name, buffer in plain.named_buffers():
        assert relative_error(results[0][3][name], buffer) < 1e-12, name


def test_layers_of_other_libraries_that_are_over_ranks_stay():
    kind = type('NaiveSyncBatchNorm', (nn.BatchNorm2d,), dict(forward=lambda self, x: x))
    model = nn.Sequential(layer := kind(3))
    assert convert_sync_batchnorm(model) == 0 and model[0] is layer


class Scaled(nn.BatchNorm2d):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.edge(
    'sync_bn', 'refused', 'A BatchNorm with a forward of one’s own, or without channels yet'
)
@pytest.mark.parametrize('layer', [Scaled(3), nn.LazyBatchNorm2d()])
def test_a_layer_that_cannot_be_replaced_is_refused_where_it_trains(layer):
    model = nn.Sequential(nn.Conv2d(3, 3, 1), layer)
    with pytest.raises(ValueError, match=f'sync_bn: 1 is a {type(layer).__name__}, which has'):
        convert_sync_batchnorm(model)
    layer.eval()
    assert convert_sync_batchnorm(model) == 0 and model[1] is layer


def test_conversion_keeps_state_and_counts():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm1d(2)))
    state, weight = {k: v.clone() for k, v in model.state_dict().items()}, model[1].weight
    assert convert_sync_batchnorm(model) == 2
    assert model[1].weight is weight
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert model.state_dict().keys() == state.keys()


@pytest.mark.usefixtures('beside_a_gpu')
def test_a_model_on_the_cpu_takes_layers_that_run_there():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    convert_sync_batchnorm(model)
    assert type(model[1]) is SyncBatchNorm


def test_one_process_is_plain_batchnorm():
    x, layer, plain = data(), SyncBatchNorm(3).double(), nn.BatchNorm2d(3).double()
    assert torch.equal(layer(x), plain(x))
    assert torch.equal(layer.eval()(x), plain.eval()(x))


def test_layers_of_mmcv_are_put_in_place_and_taken_away(monkeypatch):
    ops = ModuleType('mmcv.ops')
    ops.SyncBatchNorm = type('SyncBatchNorm', (nn.BatchNorm2d,), {})  # theirs is compiled
    monkeypatch.setitem(sys.modules, 'mmcv.ops', ops)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4).eval())
    plain = model[1]
    synced = SyncedBatchNorm(model, 'mmcv')
    assert type(model[1]) is ops.SyncBatchNorm and not model[1].training
    assert model[1].weight is plain.weight
    synced.undo()
    assert model[1] is plain
