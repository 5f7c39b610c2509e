"""DINO with KoLeo: a loss with an additive and a coupled term, in slices, is the plain step."""

import pytest
import torch

from memengine.engine.optim import AccumulationOptimWrapper, GradCacheOptimWrapper
from memengine.engine.step import run_step
from memengine.engine.wrappers import MMDistributedDataParallel
from memengine.models.algorithms.base import rows_of
from memengine.testing import assert_same_step, run_ranks, saved_bytes
from tests.engine.test_sliced import big_batch, share, wrap
from tests.engine.test_sliced_exactness import DROPOUT
from tests.models.test_dino import B, build, crops

SLICES = [(1, 0), (1, 2), (1.5, 0), (1.5, 1), (2, 0), (2, 1), (100, 0), (100, 99)]


def make(**kwargs):
    return build(koleo_weight=0.3, **kwargs)


def data(seed=0):
    return dict(inputs=crops(seed), data_samples=None)


def in_slices(model, size, keep_graph=0, **settings):
    return wrap(model, GradCacheOptimWrapper, chunk_size=size, keep_graph=keep_graph, **settings)


def plain_in_slices(model, batch, wrapper, size):
    """The same slices with all their graphs at once, and one backward."""
    targets = model.targets(batch['inputs'], None, size)
    pieces = model.slices(batch['inputs'], None, size)
    outputs = [model(piece.inputs, mode='tensor') for piece in pieces]
    parts = [model.slice_loss(o, targets, p)['loss'] for o, p in zip(outputs, pieces, strict=True)]
    features = [[] for _ in range(2)]  # of each global crop, in the samples' order
    for (rows, _), piece in zip(outputs, pieces, strict=True):
        for number, crop in enumerate(piece.rows.crops):
            if crop < 2:
                count = len(piece.rows.samples)
                features[crop].append(rows[number * count : (number + 1) * count])
    koleo = model._koleo(torch.cat([torch.cat(crop) for crop in features]))['loss_koleo']
    loss = sum(parts) + koleo
    wrapper.update_params(loss)
    return {'loss': loss.detach(), 'loss_koleo': koleo.detach()}


def assert_equal_parameters(actual, expected, what=lambda p: p):
    for name, parameter in expected.named_parameters():
        # timm resamples position embeddings of local crops in fp32
        tolerance = 1e-7 if name.endswith('pos_embed') else 1e-9
        got = actual.get_parameter(name)
        assert_same_step({name: what(got)}, {name: what(parameter)}, tolerance)


def gradients(model, wrapper):
    """Of one step, which is half of an update, so that they stay."""
    log = run_step(model, data(), wrapper)
    return log, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(('size', 'keep_graph'), SLICES)
def test_loss_and_gradients_are_the_plain_steps(size, keep_graph):
    expected, model = make(), make()
    want, _ = gradients(
        expected, wrap(expected, optimizer='SGD', accumulative_counts=2, accumulate_coupled=True)
    )
    settings = dict(optimizer='SGD', accumulative_counts=2, accumulate_coupled=True)
    log, _ = gradients(model, in_slices(model, size, keep_graph, **settings))
    assert_same_step(log, want, tolerance=1e-8)
    signs = {'teacher_entropy', 'feature_std', 'feature_rank'}
    assert set(log) >= {'loss', 'loss_dino', 'loss_koleo', *signs}
    assert_equal_parameters(model, expected, lambda p: p.grad)


@pytest.mark.parametrize(('size', 'keep_graph'), SLICES)
def test_several_steps_with_dropout_decay_and_clipping(size, keep_graph):
    expected, model = (make(backbone=DROPOUT) for _ in range(2))
    plain, sliced = wrap(expected), in_slices(model, size, keep_graph)
    for seed in range(3):
        torch.manual_seed(seed)
        log = plain_in_slices(expected, data(seed), plain, size)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        found = run_step(model, data(seed), sliced)
        assert torch.equal(torch.get_rng_state(), state)
        assert_same_step({name: found[name] for name in log}, log, tolerance=1e-8)
    assert_equal_parameters(model, expected)


def faulty(fault):
    """A model whose KoLeo gradient is wrong in slices."""

    class Faulty(type(make())):
        def coupled_loss(self, embeddings, targets, data_samples=None):
            factor = {'doubled': 2, 'zero': 0}[fault]
            (loss,) = super().coupled_loss(embeddings, targets, data_samples).values()
            return {'loss_koleo': factor * loss + (1 - factor) * loss.detach()}

    model = make()
    model.__class__ = Faulty
    return model


@pytest.mark.parametrize('fault', ['doubled', 'zero'])
def test_a_wrong_coupled_gradient_is_seen(fault):
    expected, model = make(), faulty(fault)
    settings = dict(optimizer='SGD', accumulative_counts=2, accumulate_coupled=True)
    want, _ = gradients(expected, wrap(expected, **settings))
    log, _ = gradients(model, in_slices(model, 2, **settings))
    assert_same_step(log, want, tolerance=1e-8)  # the value is right
    with pytest.raises(AssertionError, match='tensors differ'):
        assert_equal_parameters(model, expected, lambda p: p.grad)


@pytest.mark.parametrize('size', [1, 2, 100])
@pytest.mark.parametrize('keep_graph', [0, 1, 99])
def test_global_crops_go_through_twice_and_local_ones_once(size, keep_graph):
    model, rows = make(), {16: 0, 8: 0}

    def count(layer, inputs, output):
        rows[inputs[0].shape[-1]] += 1

    model.student.backbone.register_forward_hook(count)
    pieces = model.slices(data()['inputs'], None, size)
    slices = {side: sum(p.inputs[0].shape[-1] == side for p in pieces) for side in rows}
    run_step(model, data(), in_slices(model, size, keep_graph))
    assert rows[8] == slices[8]
    assert rows[16] == slices[16] + max(slices[16] - keep_graph, 0)


def test_bytes_are_those_of_a_slice():
    def peak(model, wrapper):
        return saved_bytes(lambda: run_step(model, data(), wrapper), model)

    for size in (1, 2):
        model, alone = make(), build()
        accumulated = peak(alone, wrap(alone, AccumulationOptimWrapper, micro_batch_size=size))
        assert peak(model, in_slices(model, size)) < 1.02 * accumulated
    model = make()
    assert peak(model, in_slices(model, 1)) < 0.3 * peak(model, wrap(model))


def test_crops_of_one_size_share_slices():
    """Then a slice holds global and local crops, and only the global ones meet."""
    generator = torch.Generator().manual_seed(0)
    same = [torch.randn(B, 3, 16, 16, dtype=torch.float64, generator=generator) for _ in range(5)]
    expected, model = make(), make()
    settings = dict(optimizer='SGD', accumulative_counts=2, accumulate_coupled=True)
    batch = dict(inputs=same, data_samples=None)
    run_step(expected, batch, wrap(expected, **settings))
    mixed = [piece for piece in model.slices(same, None, 5) if rows_of(piece.inputs).shape[0] == 5]
    assert mixed and all(list(piece.rows.crops) == [0, 1, 2, 3, 4] for piece in mixed)
    run_step(model, batch, in_slices(model, 5, **settings))
    assert_equal_parameters(model, expected, lambda p: p.grad)


def test_larger_graph_free_chunks_and_plain_accumulation_are_refused():
    model = make()
    with pytest.raises(ValueError, match='cannot be merged; leave out forward_chunk_size'):
        run_step(model, data(), in_slices(model, 1, forward_chunk_size=2))
    with pytest.raises(ValueError, match='GradCacheOptimWrapper.*chunk_size=2'):
        run_step(model, data(), wrap(model, AccumulationOptimWrapper, micro_batch_size=2))


@pytest.mark.parametrize('precision', ['bf16', 'fp16'])
def test_half_precision_runs(precision):
    model = make().float()
    batch = dict(inputs=[crop.float() for crop in crops()], data_samples=None)
    before = model.student.head.mlp[0].weight.clone()
    wrapper = in_slices(model, 2, precision=precision)
    for _ in range(2):
        log = run_step(model, batch, wrapper)
    assert torch.isfinite(log['loss'])
    if precision == 'bf16':  # in fp16 the first steps may overflow and be skipped
        assert not torch.equal(before, model.student.head.mlp[0].weight)


def _rank(rank, world_size, keep_graph):
    """Two steps on this rank's share of the batch."""
    model = make()
    wrapped = MMDistributedDataParallel(model)
    wrapper = in_slices(model, 1, keep_graph, optimizer='SGD')
    for seed in range(2):
        run_step(wrapped, share(big_batch('DINO', seed), rank, world_size), wrapper)
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(('world_size', 'keep_graph'), [(2, 0), (2, 99), (4, 2)])
def test_ranks_follow_one_process(world_size, keep_graph):
    model = make()
    wrapper = wrap(model, optimizer='SGD')
    for seed in range(2):
        run_step(model, big_batch('DINO', seed), wrapper)
    for parameters in run_ranks(world_size, _rank, keep_graph):
        for name, expected in model.named_parameters():
            tolerance = 1e-7 if name.endswith('pos_embed') else 1e-9
            assert_same_step({name: parameters[name]}, {name: expected}, tolerance)
