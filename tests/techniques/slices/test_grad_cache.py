"""Gradient cache: the same step as plain, in the bytes of a slice, for a counted price."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from memengine.memory.meter import SavedBytes
from memengine.techniques.modules.forward_state import ModuleState, RandomState
from memengine.techniques.slices.grad_cache import Tower, cached_step
from memengine.testing import assert_same_step
from tests.techniques.toy import CASES, Case, Encoder, cached, cut, gradients, plain, train


@pytest.mark.parametrize('name', CASES)
@pytest.mark.parametrize('keep_graph', [0, 2, 99])
def test_same_step_with_dropout_decay_and_clipping(name, keep_graph):
    expected = train(Case(name, dropout=0.2), plain)
    actual = train(Case(name, dropout=0.2), lambda *a: cached(*a, keep_graph=keep_graph))
    assert_same_step(actual, expected)


@pytest.mark.parametrize('name', CASES)
def test_same_step_as_one_large_batch(name):
    expected = train(Case(name), lambda *a: plain(*a, chunk=None))
    assert_same_step(train(Case(name), cached), expected)


def test_dropout_is_on_in_the_comparison():
    with_dropout = train(Case('simclr', dropout=0.2), cached)
    without = train(Case('simclr'), cached)
    with pytest.raises(AssertionError, match='tensors differ'):
        assert_same_step(with_dropout, without)


@pytest.mark.parametrize('fault', ['doubled', 'missing', 'zero'])
def test_a_wrong_gradient_fails_the_comparison(fault):
    def faulty(encoders, inputs, loss_fn):
        losses = cached(encoders, inputs, loss_fn)
        bias = encoders[0].head.bias
        bias.grad = {'doubled': 2 * bias.grad, 'missing': None, 'zero': 0 * bias.grad}[fault]
        return losses

    expected = train(Case('simclr'), plain)
    with pytest.raises(AssertionError, match=r'head\.bias'):
        assert_same_step(train(Case('simclr'), faulty), expected)


@pytest.mark.parametrize('name', ['simclr', 'clip'])
@pytest.mark.parametrize('keep_graph', range(7))
def test_extra_forwards_are_the_slices_without_those_kept(name, keep_graph):
    case = Case(name)
    slices = sum(map(len, cut(case.batches[0])))
    assert slices >= 5
    cached(list(case.model.encoders), case.batches[0], case.loss, keep_graph=keep_graph)
    calls = sum(encoder.calls for encoder in case.model.encoders)
    assert calls == slices + max(slices - keep_graph, 0)


def wide_encoder():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 4)
    )


def peak(batch, chunk, keep_graph=0):
    """Bytes kept for backward at the peak, without those of a loss that keeps next to nothing."""
    model, x = wide_encoder(), torch.randn(batch, 8)
    tower = Tower(model, x.split(chunk))
    with SavedBytes(model, x) as meter:
        cached_step(tower, lambda z: z.sum(dim=1).mean(), keep_graph=keep_graph)
    return meter.peak_bytes


def test_bytes_are_those_of_one_slice_whatever_the_batch():
    one = peak(16, 16)
    assert one >= 16 * 4 * 512 * 4  # four activations of 512
    assert peak(16 * 16, 16) < 1.02 * one
    assert peak(16 * 16, 8) < 0.52 * one
    assert peak(16 * 16, 1) < 0.07 * one


def test_bytes_grow_with_the_graphs_that_are_kept():
    one = peak(256, 16)
    for kept in (1, 4, 16):
        assert kept * one <= peak(256, 16, keep_graph=kept) < 1.05 * kept * one


def test_kept_graphs_are_gone_before_others_are_built():
    """Two kept and one repeated graph are never alive together."""
    assert peak(64, 16, keep_graph=2) < 2.1 * peak(64, 16, keep_graph=1)


@pytest.mark.parametrize('batch', [1, 3, 4, 5, 9])
def test_batches_that_do_not_fill_their_slices(batch):
    torch.manual_seed(0)
    model, x = Encoder().double(), torch.randn(batch, 12, dtype=torch.float64)
    loss_fn = lambda z: (z.sum(0) ** 3).sum()  # noqa: E731
    expected = copy.deepcopy(model)
    plain([expected], [x], loss_fn, chunk=None)
    cached([model], [x], loss_fn)
    assert_same_step(gradients(model), gradients(expected))


def test_towers_may_be_cut_differently():
    case, expected = Case('clip'), Case('clip')
    image, text = case.model.encoders
    x, y = case.batches[0]
    cached_step([Tower(image, x.split(3)), Tower(text, y.split(10))], case.loss)
    assert (image.calls, text.calls) == (8, 2)
    plain(list(expected.model.encoders), expected.batches[0], expected.loss, chunk=None)
    assert_same_step(gradients(case.model), gradients(expected.model))


def test_larger_chunks_in_the_graph_free_pass():
    case, expected = Case('simclr'), Case('simclr')
    encoder, x = case.model.encoders[0], case.batches[0][0]
    cached_step(Tower(encoder, x.split(2), slices_per_forward=4), case.loss, keep_graph=1)
    assert encoder.calls == 3 + 1 + 9  # 9 slices in threes of 4; 1 kept; 9 repeated
    plain(list(expected.model.encoders), expected.batches[0], expected.loss, chunk=None)
    assert_same_step(gradients(case.model), gradients(expected.model))


def test_larger_chunks_are_refused_where_they_are_not_exact():
    x = torch.randn(8, 12)
    with pytest.raises(ValueError, match='draws random numbers'):
        cached_step(Tower(Encoder(0.2), x.split(2), slices_per_forward=2), torch.Tensor.sum)
    norm = Encoder(norm=nn.BatchNorm1d(16))
    with pytest.raises(ValueError, match=r'statistics of the batch \(layers.1\)'):
        cached_step(Tower(norm, x.split(2), slices_per_forward=2), torch.Tensor.sum)
    norm.eval()
    cached_step(Tower(norm, x.split(2), slices_per_forward=2), torch.Tensor.sum)
    frozen = Encoder(0.2).requires_grad_(False)  # never repeated, so nothing to replay
    head = nn.Linear(6, 1)
    cached_step(Tower(frozen, x.split(2), slices_per_forward=2), lambda z: head(z).sum())


def test_losses_by_name():
    model, x = Encoder(), torch.randn(8, 12)

    def loss_fn(z):
        return {'loss_a': z.sum() ** 2, 'b_loss': z[0].sum(), 'spread': z.std()}

    losses = cached([model], [x], loss_fn)
    expected = copy.deepcopy(model)
    expected.zero_grad()
    want = loss_fn(expected(x))
    (want['loss_a'] + want['b_loss']).backward()
    assert losses.keys() == want.keys()
    assert not any(value.requires_grad for value in losses.values())
    assert_same_step(losses, want, tolerance=1e-5)
    assert_same_step(gradients(model), gradients(expected), tolerance=1e-5)


@pytest.mark.parametrize(
    ('towers', 'loss_fn', 'options', 'message'),
    [
        ([], torch.sum, {}, 'no encoder'),
        ([Tower(Encoder(), [])], torch.sum, {}, 'no slice for Encoder'),
        ([Tower(Encoder(), [torch.ones(2, 12)])], torch.sum, {'keep_graph': -1}, 'got -1'),
        (
            [Tower(Encoder(), [torch.ones(2, 12)], slices_per_forward=0)],
            torch.sum,
            {},
            'slices_per_forward must be at least 1',
        ),
        ([Tower(Encoder(), [torch.ones(2, 12)])], lambda z: z, {}, r'scalar tensor, got \(2, 6\)'),
        ([Tower(Encoder(), [torch.ones(2, 12)])], lambda z: 1.0, {}, 'scalar tensor, got float'),
        ([Tower(Encoder(), [torch.ones(2, 12)])], lambda z: {'a': z.sum()}, {}, r"\['a'\]"),
        (
            [Tower(Encoder(), [torch.ones(2, 12)])],
            lambda z: z.detach().sum(),
            {},
            'neither on the embeddings nor on any parameter',
        ),
        (
            [Tower(Encoder(), [torch.ones(2, 12)])],
            lambda z: nn.Linear(1, 1)(torch.ones(1, 1)).sum(),
            {},
            'does not depend on the embeddings',
        ),
        (
            [Tower(Encoder(), [torch.ones(2, 12)], encode=lambda m, x: m(x).sum())],
            torch.sum,
            {},
            'got a scalar from Encoder',
        ),
        (
            [Tower(Encoder(), [torch.ones(2, 12)], encode=lambda m, x: 'text')],
            torch.sum,
            {},
            'got a str from Encoder',
        ),
        (
            [
                Tower(
                    Encoder(),
                    [torch.ones(1, 12), torch.zeros(1, 12)],
                    encode=lambda m, x: [m(x)] * int(1 + x[0, 0]),
                )
            ],
            lambda z: z[0].sum(),
            {},
            'one structure for every slice',
        ),
    ],
)
def test_errors(towers, loss_fn, options, message):
    with pytest.raises(ValueError, match=message):
        cached_step(towers, loss_fn, **options)


def test_what_a_step_notes_of_its_chunks_ends_with_it():
    """It held itself, some 2 kB for each module and chunk, until Python's collector came."""

    def notes():
        return [one for one in gc.get_objects() if isinstance(one, (ModuleState, RandomState))]

    images = torch.randn(8, 4)
    gc.collect()
    gc.disable()
    of_other_steps = notes()
    try:
        for keep_graph in (0, 1):
            tower = Tower(nn.Sequential(nn.Linear(4, 4), nn.Dropout()), images.split(2))
            cached_step(tower, lambda codes: codes.square().mean(), keep_graph=keep_graph)
        left = {id(one) for one in notes()} - {id(one) for one in of_other_steps}
    finally:
        gc.enable()
    assert not left
