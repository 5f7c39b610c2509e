"""BatchNorm over ranks equals BatchNorm over the whole batch."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from memengine.techniques.layers.sync_batchnorm import SyncBatchNorm, SyncedBatchNorm
from memengine.testing import relative_error, run_ranks

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


def test_conversion_keeps_state_and_counts():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm1d(2)))
    state, weight = {k: v.clone() for k, v in model.state_dict().items()}, model[1].weight
    assert len(SyncedBatchNorm(model).replaced) == 2
    assert model[1].weight is weight
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert model.state_dict().keys() == state.keys()


@pytest.mark.usefixtures('beside_a_gpu')
def test_a_model_on_the_cpu_takes_layers_that_run_there():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    SyncedBatchNorm(model)
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
