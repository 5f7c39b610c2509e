"""A step that runs out of memory is repeated in smaller slices, and is the smaller slices' step.

Running out of memory is simulated by layers that raise what CUDA raises, wherever it may happen.
"""

import copy

import pytest
import torch
from torch import nn

from memengine.engine.optim import AccumulationOptimWrapper, GradCacheOptimWrapper
from memengine.engine.step import run_step
from memengine.engine.wrappers import DisCoDistributedDataParallel, MMDistributedDataParallel
from memengine.models import CLIP, Classifier, SimCLR
from memengine.testing import assert_same_step, run_ranks
from tests.engine.test_sliced import data_of, wrap
from tests.engine.test_sliced_exactness import BATCHNORM, NOISY_TOWERS, NOISY_VIT
from tests.models.test_dino import build as build_dino
from tests.models.toy import build


class Limit:
    """Lets a layer run out of memory when it is given more than ``rows`` rows.

    Args:
        rows: The most that fit.
        when: ``'no graph'``, ``'graph'`` (the forward that builds one) or ``'backward'``.
    """

    def __init__(self, rows, when, layer):
        self.rows, self.when, self.failures = rows, when, 0
        layer.register_forward_hook(self)

    def __call__(self, layer, inputs, output):
        if len(output) <= self.rows:
            return
        if self.when == 'backward' and output.requires_grad:
            output.register_hook(self.fail)
        elif self.when == ('graph' if torch.is_grad_enabled() else 'no graph'):
            self.fail()

    def fail(self, *args):
        self.failures += 1
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.')


def make(kind):
    if kind is CLIP:
        return build(CLIP, **NOISY_TOWERS)
    head = BATCHNORM if kind is SimCLR else {}
    return build(kind, **{**NOISY_VIT, **head})


def layer_of(model):
    towers = getattr(model, 'towers', None)
    return (towers['image'] if towers else model).backbone.model.blocks[1]


def train(model, wrapper, kind, seeds=range(3), run=run_step):
    torch.manual_seed(0)
    for seed in seeds:
        run(model, data_of(kind, seed), wrapper)


def assert_equal(model, expected):
    wanted = expected.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize('when', ['no graph', 'graph', 'backward'])
@pytest.mark.parametrize('kind', [SimCLR, CLIP])
def test_gradient_cache_halves_the_chunk_and_follows_the_smaller_one(kind, when, caplog):
    model, expected = make(kind), make(kind)
    limit = Limit(2, when, layer_of(model))
    wrapper = wrap(model, GradCacheOptimWrapper, chunk_size=8, keep_graph=1)
    train(model, wrapper, kind)
    train(expected, wrap(expected, GradCacheOptimWrapper, chunk_size=2, keep_graph=1), kind)
    assert_equal(model, expected)  # bit for bit, with dropout and BatchNorm's buffers
    assert wrapper.size == 2
    assert limit.failures == 2  # 8, 4; the second step begins with 2


@pytest.mark.parametrize('when', ['graph', 'backward'])
@pytest.mark.parametrize('accumulative_counts', [1, 2])
@pytest.mark.fault(
    'a step in slices runs out of memory',
    'it is repeated in smaller slices, with the same gradient',
)
def test_accumulation_halves_the_micro_batch(when, accumulative_counts):
    model, expected = make(Classifier), make(Classifier)
    limit = Limit(1, when, layer_of(model))
    settings = dict(kind=AccumulationOptimWrapper, accumulative_counts=accumulative_counts)
    wrapper = wrap(model, micro_batch_size=2, **settings)
    limit.rows = 2  # the first iteration fits
    train(model, wrapper, Classifier, range(1))
    limit.rows = 1  # the second does not, and its predecessor's gradients are to stay
    run_step(model, data_of(Classifier, 1), wrapper)
    small = wrap(expected, micro_batch_size=2, **settings)
    train(expected, small, Classifier, range(1))
    small.size = 1
    run_step(expected, data_of(Classifier, 1), small)
    assert_equal(model, expected)
    assert wrapper.size == limit.failures == 1


def test_a_teacher_that_does_not_fit_is_cut_too():
    model, expected = build_dino(), build_dino()
    limit = Limit(2, 'no graph', model.teacher.backbone)
    wrapper = wrap(model, AccumulationOptimWrapper, micro_batch_size=6)
    train(model, wrapper, 'DINO')
    train(expected, wrap(expected, AccumulationOptimWrapper, micro_batch_size=1), 'DINO')
    assert_equal(model, expected)  # the centre moved once a step
    assert (wrapper.size, limit.failures) == (1, 2)


def test_a_loss_with_terms_of_both_kinds_gives_up_graphs_and_then_halves_the_chunk():
    """Only the slices that the coupled term reads keep graphs: of three samples' global crops."""
    model, expected = (build_dino(koleo_weight=0.3) for _ in range(2))
    limit, failures = Limit(100, 'graph', model.student.backbone), []
    wrapper = wrap(model, GradCacheOptimWrapper, chunk_size=1, keep_graph=4)

    def fail_once(layer, inputs, output):
        if torch.is_grad_enabled() and not failures:
            failures.append(1)
            raise torch.OutOfMemoryError('CUDA out of memory.')

    model.student.backbone.register_forward_hook(fail_once)
    train(model, wrapper, 'DINO', range(1))
    assert (wrapper.size, wrapper.kept_graphs.number) == (1, 2)
    train(expected, wrap(expected, GradCacheOptimWrapper, chunk_size=1, keep_graph=2), 'DINO', [0])
    assert_equal(model, expected)
    wrapper.kept_graphs.number, wrapper.size, limit.rows = 0, 3, 4
    train(model, wrapper, 'DINO', [1])
    assert (wrapper.size, limit.failures) == (1, 1)


def test_sizes_by_tower_are_halved_together():
    model = make(CLIP)
    Limit(1, 'graph', layer_of(model))
    wrapper = wrap(model, GradCacheOptimWrapper, chunk_size=dict(image=3, text=5))
    train(model, wrapper, CLIP, range(1))
    assert wrapper.size == dict(image=1, text=2)


@pytest.mark.parametrize('kind', [SimCLR, Classifier])
def test_what_never_fits_ends_with_the_error(kind):
    model = build(kind, **NOISY_VIT)
    Limit(0, 'graph', layer_of(model))
    wrapper = (
        wrap(model, GradCacheOptimWrapper, chunk_size=4)
        if kind is SimCLR
        else wrap(model, AccumulationOptimWrapper, micro_batch_size=4)
    )
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(torch.OutOfMemoryError, match=r'Tried to allocate 2\.00 GiB'):
        train(model, wrapper, kind)
    parameters = dict(model.named_parameters())
    assert all(torch.equal(before[name], p) for name, p in parameters.items())


def test_other_errors_are_not_swallowed():
    model = make(SimCLR)

    def fail(*args):
        raise RuntimeError('mat1 and mat2 shapes cannot be multiplied')

    layer_of(model).register_forward_hook(fail)
    with pytest.raises(RuntimeError, match='mat1 and mat2'):
        train(model, wrap(model, GradCacheOptimWrapper, chunk_size=4), SimCLR)


def _rank(rank, world_size, kind, failing):
    """Only the last rank runs out of memory; returns its state and size."""
    model = make(kind)
    if failing and rank == world_size - 1:
        Limit(2, failing, layer_of(model))
    wrapped = MMDistributedDataParallel(model, broadcast_buffers=False)  # as the Runner does
    chunk_size = 4 if failing else 2
    wrapper = (
        wrap(model, AccumulationOptimWrapper, micro_batch_size=chunk_size)
        if kind is Classifier
        else wrap(model, GradCacheOptimWrapper, chunk_size=chunk_size)
    )
    torch.manual_seed(rank)
    for step in range(2):
        run_step(wrapped, data_of(kind, 10 * step + rank), wrapper)
    size = wrapper.size
    return size, {name: value.numpy() for name, value in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ('kind', 'when', 'world_size'),
    [(SimCLR, 'no graph', 2), (CLIP, 'graph', 4), (Classifier, 'graph', 2)],
)
@pytest.mark.fault(
    'one rank runs out of memory in a step', 'all ranks repeat the step in smaller slices'
)
def test_all_ranks_shrink_when_one_runs_out_of_memory(kind, when, world_size):
    recovered = run_ranks(world_size, _rank, kind, when)
    small = run_ranks(world_size, _rank, kind, None)
    for (size, state), (_, expected) in zip(recovered, small, strict=True):
        assert size == 2
        assert all((state[name] == value).all() for name, value in expected.items())


def _disco_rank(rank, world_size, failing):
    """Losses of all ranks' samples, graphs as memory allows, and rank 1 runs out of it late."""
    model = build(CLIP)
    if failing and rank == 1:
        limit = Limit(100, 'graph', layer_of(model))
    wrapped = DisCoDistributedDataParallel(model)
    settings = dict(chunk_size=3, keep_graph='auto') if failing else dict(chunk_size=1)
    wrapper = wrap(model, GradCacheOptimWrapper, optimizer='SGD', **settings)
    for step in range(4):
        if failing and rank == 1 and step == 2:
            limit.rows = 1  # from here on
        run_step(wrapped, data_of(CLIP, 10 * step + rank), wrapper)
    return wrapper.size, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.slow
def test_contrast_over_ranks_with_kept_graphs_when_one_runs_out_of_memory():
    recovered, small = run_ranks(2, _disco_rank, True), run_ranks(2, _disco_rank, False)
    for (size, actual), (_, expected) in zip(recovered, small, strict=True):
        assert size == 1
        assert_same_step(actual, expected)


class FakeMemory:
    """What the machine has left, in bytes."""

    def __init__(self, monkeypatch, left):
        self.left = left
        monkeypatch.setattr('memengine.memory.headroom.headroom_bytes', lambda device: self.left)


def forwards_of_three_steps(model, kind, wrapper):
    """How often the layer ran in each."""
    counts, calls = [], []
    handle = layer_of(model).register_forward_hook(lambda *args: calls.append(1))
    for seed in range(3):
        calls.clear()
        run_step(model, data_of(kind, seed), wrapper)
        counts.append(len(calls))
    handle.remove()
    return counts


def test_auto_keeps_every_graph_when_memory_allows(monkeypatch):
    FakeMemory(monkeypatch, 2**34)
    model, expected = make(CLIP), make(CLIP)
    wrapper = wrap(model, GradCacheOptimWrapper, chunk_size=2, keep_graph='auto')
    torch.manual_seed(0)
    assert forwards_of_three_steps(model, CLIP, wrapper) == [6, 3, 3]  # then no extra forward
    train(expected, wrap(expected, GradCacheOptimWrapper, chunk_size=2), CLIP)
    assert_same_step(model.state_dict(), expected.state_dict())


def test_auto_keeps_what_fits(monkeypatch):
    memory = FakeMemory(monkeypatch, 0)
    model = make(SimCLR)
    wrapper = wrap(model, GradCacheOptimWrapper, chunk_size=2, keep_graph='auto')
    run_step(model, data_of(SimCLR), wrapper)
    gradients = sum(p.numel() * 8 for p in model.parameters())
    memory.left = 2 * (
        gradients + 2.5 * wrapper.kept_graphs._slice_bytes
    )  # half is the CPU's share
    run_step(model, data_of(SimCLR), wrapper)
    assert wrapper.kept_graphs.number == 2


def test_auto_gives_graphs_up_before_the_chunk(monkeypatch):
    FakeMemory(monkeypatch, 2**34)
    model = make(SimCLR)
    wrapper = wrap(model, GradCacheOptimWrapper, chunk_size=2, keep_graph='auto')
    train(model, wrapper, SimCLR, range(2))
    number = wrapper.kept_graphs.number
    failures = []

    def fail_twice(*args):
        if len(failures) < 2:
            failures.append(1)
            raise torch.OutOfMemoryError('CUDA out of memory.')

    layer_of(model).register_forward_hook(fail_twice)
    run_step(model, data_of(SimCLR), wrapper)
    slices = len(model.slices(*data_of(SimCLR).values(), 2))
    assert wrapper.kept_graphs.number == min(number, slices) // 4
    assert wrapper.size == 2


def test_set_graphs_are_given_up_when_they_do_not_fit_together():
    model, expected = make(CLIP), make(CLIP)  # 3 chunks of each tower
    live, graphs = [], 2

    def count(layer, inputs, output):
        if torch.is_grad_enabled():
            live.append(1)
            output.register_hook(lambda gradient: live.clear())
            if len(live) > graphs:
                live.clear()
                raise torch.OutOfMemoryError('CUDA out of memory.')

    layer_of(model).register_forward_hook(count)
    wrapper = wrap(model, GradCacheOptimWrapper, chunk_size=2, keep_graph=100)
    train(model, wrapper, CLIP)
    train(expected, wrap(expected, GradCacheOptimWrapper, chunk_size=2, keep_graph=3), CLIP)
    assert_equal(model, expected)
    assert (wrapper.size, wrapper.kept_graphs.number) == (2, 3)


@pytest.mark.parametrize('keep_graph', [-1, 1.5, True, 'all'])
def test_impossible_numbers_of_graphs_are_refused(keep_graph):
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="keep_graph must be a number of slices or 'auto'"):
        wrap(model, GradCacheOptimWrapper, chunk_size=1, keep_graph=keep_graph)
