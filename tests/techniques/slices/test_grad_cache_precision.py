"""Gradient cache under autocast and with a gradient scaler."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memengine.losses import ClipLoss
from memengine.testing import assert_same_step, relative_error
from tests.techniques.toy import Case, cached, gradients, plain


@pytest.mark.parametrize('outer', [False, True])
@pytest.mark.parametrize('keep_graph', [0, 2])
def test_bf16_is_no_further_from_float64_than_plain_bf16(outer, keep_graph):
    def errors(step):
        case = Case('simclr')
        exact = Case('simclr')
        model = case.model.float()
        inputs = [x.float() for x in case.batches[0]]
        plain(list(exact.model.encoders), exact.batches[0], exact.loss, chunk=None)
        step(list(model.encoders), inputs, case.loss)
        truth = gradients(exact.model)
        return {
            name: relative_error(gradient, truth[name])
            for name, gradient in gradients(model).items()
            if gradient is not None
        }

    def autocast():
        return torch.autocast('cpu', torch.bfloat16)

    def plain_bf16(encoders, inputs, loss_fn):
        with autocast():
            loss = loss_fn(*(encoder(x) for encoder, x in zip(encoders, inputs, strict=True)))
        loss.backward()

    def cached_bf16(*args):
        if not outer:
            return cached(*args, context=autocast, keep_graph=keep_graph)
        with autocast():
            return cached(*args, keep_graph=keep_graph)

    reference, ours = errors(plain_bf16), errors(cached_bf16)
    assert max(reference.values()) > 1e-4  # bf16 was on
    assert ours.keys() == reference.keys()
    for name, error in ours.items():
        assert error <= 1.5 * reference[name], name


class PartlyFp32(nn.Module):
    """A layer that somebody runs in fp32 on purpose."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 64)

    def forward(self, x):
        with torch.autocast('cpu', enabled=False):
            return self.linear(x.float())


def test_backward_runs_outside_somebodys_autocast():
    torch.manual_seed(0)
    model, x = PartlyFp32(), torch.randn(10, 12)
    expected = copy.deepcopy(model)
    loss_fn = lambda z: ClipLoss()(F.normalize(z[:5]), F.normalize(z[5:]), 20.0)  # noqa: E731
    cached([expected], [x], loss_fn)
    with torch.autocast('cpu', torch.bfloat16):
        cached([model], [x], loss_fn)
    assert_same_step(gradients(model), gradients(expected), tolerance=1e-6)


def test_autocast_keeps_the_type_of_the_embeddings():
    seen = []

    def loss_fn(z):
        seen.append(z.dtype)
        return z.float().sum()

    model = nn.Linear(12, 6)
    cached(
        [model],
        [torch.randn(8, 12)],
        loss_fn,
        context=lambda: torch.autocast('cpu', torch.bfloat16),
    )
    assert seen == [torch.bfloat16]
    assert model.weight.grad.dtype == torch.float32


@pytest.mark.parametrize('keep_graph', [0, 2, 9])
def test_gradient_scaler_scales_once(keep_graph):
    case, expected = Case('simclr'), Case('simclr')
    encoders, x = list(case.model.float().encoders), [case.batches[0][0].float()]
    scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    cached(
        encoders,
        x,
        case.loss,
        keep_graph=keep_graph,
        context=lambda: torch.autocast('cpu', torch.float16),
        backward=lambda loss: scaler.scale(loss).backward(),
    )
    scaler.unscale_(optimizer)
    plain(list(expected.model.encoders), expected.batches[0], expected.loss, chunk=None)
    for name, gradient in gradients(case.model).items():
        if gradient is not None:
            assert relative_error(gradient, gradients(expected.model)[name]) < 0.02


@pytest.mark.parametrize('keep_graph', [0, 1])
def test_an_overflow_skips_the_update(keep_graph):
    model, x = nn.Linear(12, 6), torch.randn(8, 12)
    before = copy.deepcopy(model.state_dict())
    scaler = torch.amp.GradScaler('cpu', init_scale=2.0**40)  # too much for fp16 embeddings
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cached(
        [model],
        [x],
        lambda z: (z.float() ** 2).mean(),
        keep_graph=keep_graph,
        context=lambda: torch.autocast('cpu', torch.float16),
        backward=lambda loss: scaler.scale(loss).backward(),
    )
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**39
    assert_same_step(model.state_dict(), before, tolerance=0)
