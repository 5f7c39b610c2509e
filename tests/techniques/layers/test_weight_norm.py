"""The weight-normalised layer against torch's parametrisation, alone and across slices."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

from memengine.memory.meter import SavedBytes
from memengine.techniques.layers.weight_norm import WeightNormLinear, shared_weights
from memengine.techniques.slices.accumulation_within_iteration import additive_step
from memengine.testing import assert_same_step, relative_error, run_ranks

D, K = 6, 20


class Reference(nn.Module):
    """torch's own: the same parameters under the names it gives them."""

    def __init__(self, ours: WeightNormLinear) -> None:
        super().__init__()
        linear = nn.Linear(D, K, bias=False, dtype=ours.weight_v.dtype)
        self.linear = parametrizations.weight_norm(linear, dim=0)
        originals = self.linear.parametrizations.weight
        originals.original0.data.copy_(ours.weight_g.data)
        originals.original1.data.copy_(ours.weight_v.data)

    def forward(self, x):
        return self.linear(x)

    def gradients(self):
        originals = self.linear.parametrizations.weight
        return {'weight_g': originals.original0.grad, 'weight_v': originals.original1.grad}


def layer():
    torch.manual_seed(0)
    layer = WeightNormLinear(D, K).double()
    layer.weight_g.data.uniform_(0.5, 2)
    return layer


def gradients(module):
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize('shape', [(5, D), (D,), (2, 3, D)])
def test_same_as_the_parametrisation(shape):
    ours = layer()
    reference = Reference(ours)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    out, want = ours(x), reference(y)
    out.pow(3).sum().backward()
    want.pow(3).sum().backward()
    assert out.shape == want.shape
    assert_same_step({'out': out, 'x': x.grad}, {'out': want, 'x': y.grad}, 1e-12)
    assert_same_step(gradients(ours), reference.gradients(), 1e-12)


def test_starts_as_a_linear_layer():
    ours = WeightNormLinear(D, K)
    x = torch.randn(4, D)
    torch.testing.assert_close(ours(x), x @ ours.weight_v.T)


@pytest.mark.parametrize('frozen', ['weight_v', 'weight_g'])
def test_gradients_by_finite_differences(frozen):
    ours = layer()
    getattr(ours, frozen).requires_grad_(False)
    x = torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    (trained,) = (p for p in ours.parameters() if p.requires_grad)
    assert torch.autograd.gradcheck(lambda x, _: ours(x), (x, trained))
    ours(x).sum().backward()
    assert getattr(ours, frozen).grad is None


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Linear(4, D), layer()

    def forward(self, x):
        return self.head(torch.tanh(self.trunk(x)))


def make():
    torch.manual_seed(0)
    return Network().double(), torch.randn(10, 4, dtype=torch.float64)


@pytest.mark.parametrize('size', [1, 3, 10])
def test_slices_hand_one_gradient_over(size):
    model, x = make()
    expected = copy.deepcopy(model)
    handed_over = []
    model.head.weight_v.register_hook(lambda gradient: handed_over.append(gradient.clone()))
    for factor in (1, 2):  # gradients accumulate over steps
        additive_step(x.split(size), lambda p, f=factor: f * model(p).exp().sum(), modules=[model])
        (factor * expected(x).exp().sum()).backward()
        assert len(handed_over) == factor
        assert_same_step(gradients(model), gradients(expected))
    assert model.head._step is None


@pytest.mark.parametrize('name', ['trunk', 'head'])
def test_frozen_parts(name):
    model, x = make()
    getattr(model, name).requires_grad_(False)
    expected = copy.deepcopy(model)
    additive_step(x.split(3), lambda p: model(p).exp().sum(), modules=[model])
    expected(x).exp().sum().backward()
    assert_same_step(gradients(model), gradients(expected), 1e-12)


def test_slices_without_shared_work_agree():
    model, x = make()
    expected = copy.deepcopy(model)
    additive_step(x.split(3), lambda p: model(p).exp().sum(), modules=[model])
    additive_step(x.split(3), lambda p: expected(p).exp().sum())
    assert_same_step(gradients(model), gradients(expected), 1e-12)


def test_a_layer_left_out_of_the_last_slice_is_an_error():
    model, x = make()

    def loss_fn(piece):
        return (model if len(piece) == 4 else model.trunk)(piece).sum()

    with pytest.raises(RuntimeError, match='not in the last one'):
        additive_step(x.split(4), loss_fn, modules=[model])
    assert model.head._step is None


def test_an_error_in_a_slice_comes_through():
    model, x = make()
    with pytest.raises(ZeroDivisionError), shared_weights([model]):
        model(x).sum().backward()
        1 / 0  # noqa: B018
    assert model.head._step is None


def test_the_normalised_weight_is_never_kept():
    ours = WeightNormLinear(64, 4096)
    reference = parametrizations.weight_norm(nn.Linear(64, 4096, bias=False), dim=0)
    x = torch.randn(2, 64, requires_grad=True)

    def kept(module):
        with SavedBytes(module, x) as meter:
            out = module(x)
        del out
        return meter.peak_bytes

    weight = 4 * 64 * 4096
    assert kept(reference) >= weight
    assert kept(ours) <= 4 * 4096  # the lengths of the rows


@pytest.mark.parametrize('sliced', [False, True])
def test_bf16_is_no_further_from_float64_than_the_parametrisation(sliced):
    torch.manual_seed(0)
    exact = WeightNormLinear(64, 512).double()
    x = torch.randn(32, 64)
    logits = exact(x.double())
    logits.logsumexp(1).sum().backward()

    ours = copy.deepcopy(exact).float()
    reference = parametrizations.weight_norm(nn.Linear(64, 512, bias=False), dim=0)
    reference.weight = exact.weight_v.detach().float()

    def step(module, slices):
        module.zero_grad()
        additive_step(
            slices,
            lambda piece: module(piece).logsumexp(1).sum(),
            modules=[module] if sliced else [],
            context=lambda: torch.autocast('cpu', torch.bfloat16),
        )

    step(ours, x.split(8) if sliced else [x])
    step(reference, [x])
    with torch.autocast('cpu', torch.bfloat16):
        assert ours(x).dtype == torch.bfloat16
        assert relative_error(ours(x), logits) <= 1.5 * relative_error(reference(x), logits)
    theirs = reference.parametrizations.weight.original1.grad
    assert ours.weight_v.grad.dtype == torch.float32
    assert relative_error(ours.weight_v.grad, exact.weight_v.grad) <= 1.5 * relative_error(
        theirs, exact.weight_v.grad
    )


def rank_main(rank, world_size):
    plain, x = make()
    model = DistributedDataParallel(plain)
    reductions = []

    def count(state, bucket):
        reductions.append(bucket.index())
        work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return work.then(lambda future: future.value()[0] / world_size)

    model.register_comm_hook(None, count)
    rows = x.view(world_size, -1, 4)[rank]
    additive_step(rows.split(2), lambda p: model(p).exp().sum(), modules=[model])
    return gradients(plain), reductions


def test_ranks_follow_one_process():
    expected, x = make()
    expected(x).exp().sum().backward()
    mean = {name: gradient / 2 for name, gradient in gradients(expected).items()}
    for actual, reductions in run_ranks(2, rank_main):
        assert_same_step(actual, mean)
        assert reductions == [0]


@pytest.mark.parametrize('pieces', [1, 3])
def test_compiled_models_run_it_as_it_is(pieces):
    """``compile=True`` of a DINO run ended in an error of the compiler."""
    torch._dynamo.reset()
    model, x = make()
    expected = copy.deepcopy(model)
    compiled = torch.compile(model, backend='aot_eager')
    additive_step(x.chunk(pieces), lambda p: compiled(p).exp().sum(), modules=[model])
    expected(x).exp().sum().backward()
    assert_same_step(gradients(model), gradients(expected), 1e-12)
