"""Steps in slices are the plain step, for every algorithm; what cannot be is refused."""

import functools

import pytest
import torch
from mmengine.model import BaseModel
from torch import nn
from torch.utils import _pytree as pytree

from memengine.engine.optim import AccumulationOptimWrapper, GradCacheOptimWrapper, OptimWrapper
from memengine.engine.step import run_step
from memengine.engine.wrappers import MMDistributedDataParallel
from memengine.models import CLIP, Classifier, SelfCon, SigLIP, SimCLR, SupCon
from memengine.techniques.slices.slicing import join_slices
from memengine.testing import assert_same_step, run_ranks, saved_bytes
from tests.models.test_dino import build as build_dino
from tests.models.test_dino import crops
from tests.models.toy import batch, build

COUPLED = [SimCLR, SupCon, SelfCon, CLIP, SigLIP]
ADDITIVE = [Classifier, 'DINO']


def data_of(kind, seed=0):
    inputs, samples = (crops(seed), None) if kind == 'DINO' else batch(kind, seed=seed)
    return dict(inputs=inputs, data_samples=samples)


def model_and_batch(kind, seed=0):
    return build_dino() if kind == 'DINO' else build(kind), data_of(kind, seed)


def wrap(model, kind=OptimWrapper, optimizer='AdamW', **settings):
    trained = [p for p in model.parameters() if p.requires_grad]
    build_optimizer = getattr(torch.optim, optimizer)
    return kind(
        build_optimizer(trained, lr=1e-3, weight_decay=0.1),
        clip_grad=dict(max_norm=0.5),
        **settings,
    )


@functools.cache
def train(kind, steps=3, **settings):
    """Losses of each step, and the parameters after all of them."""
    model, _ = model_and_batch(kind)
    wrapper = wrap(model, **settings)
    logs = [run_step(model, data_of(kind, seed), wrapper) for seed in range(steps)]
    return logs, dict(model.named_parameters())


@pytest.mark.parametrize(('chunk_size', 'keep_graph'), [(1, 0), (1, 1), (3, 1), (3, 100), (100, 0)])
@pytest.mark.parametrize('kind', COUPLED)
def test_gradient_cache_follows_the_plain_step(kind, chunk_size, keep_graph):
    logs, parameters = train(kind)
    model, _ = model_and_batch(kind)
    wrapper = wrap(model, GradCacheOptimWrapper, chunk_size=chunk_size, keep_graph=keep_graph)
    for seed, expected in enumerate(logs):
        assert_same_step(run_step(model, data_of(kind, seed), wrapper), expected)
    assert_same_step(dict(model.named_parameters()), parameters)


@pytest.mark.parametrize('micro_batch_size', [1, 2, 100])
@pytest.mark.parametrize('kind', ADDITIVE)
def test_accumulation_follows_the_plain_step(kind, micro_batch_size):
    logs, parameters = train(kind)
    model, _ = model_and_batch(kind)
    wrapper = wrap(model, AccumulationOptimWrapper, micro_batch_size=micro_batch_size)
    for seed, expected in enumerate(logs):
        actual = run_step(model, data_of(kind, seed), wrapper)
        assert_same_step(actual, expected, tolerance=1e-8)
    for name, expected in parameters.items():
        # timm resamples position embeddings of local crops in fp32
        tolerance = 1e-7 if name.endswith('pos_embed') else 1e-9
        assert_same_step({name: model.get_parameter(name)}, {name: expected}, tolerance)


def test_the_comparison_sees_a_wrong_gradient():
    _, parameters = train(SimCLR)
    _, other = train(SimCLR, steps=2)
    with pytest.raises(AssertionError, match='tensors differ'):
        assert_same_step(other, parameters)


@pytest.mark.parametrize(
    ('chunk_size', 'keep_graph', 'forwards'), [(2, 0, 10), (2, 2, 8), (10, 1, 1)]
)
def test_gradient_cache_runs_each_slice_twice_but_those_kept(chunk_size, keep_graph, forwards):
    model, data = model_and_batch(SimCLR)  # 10 rows
    calls = []
    model.backbone.register_forward_hook(lambda *args: calls.append(len(args[2])))
    run_step(
        model,
        data,
        wrap(model, GradCacheOptimWrapper, chunk_size=chunk_size, keep_graph=keep_graph),
    )
    assert len(calls) == forwards


def test_every_crop_goes_through_the_student_once():
    model, data = model_and_batch('DINO')
    rows = []
    model.student.backbone.register_forward_hook(lambda *args: rows.append(len(args[2])))
    run_step(model, data, wrap(model, AccumulationOptimWrapper, micro_batch_size=1))
    assert sum(rows) == sum(len(crop) for crop in data['inputs'])
    assert max(rows) < sum(rows)


def test_the_teacher_takes_no_more_at_a_time_than_the_student():
    model, data = model_and_batch('DINO')
    rows = []
    model.teacher.backbone.register_forward_hook(lambda *args: rows.append(len(args[2])))
    run_step(model, data, wrap(model, AccumulationOptimWrapper, micro_batch_size=2))
    assert rows == [2, 1, 2, 1]


@pytest.mark.parametrize(
    ('kind', 'wrapper', 'setting'),
    [
        (SimCLR, GradCacheOptimWrapper, 'chunk_size'),
        ('DINO', AccumulationOptimWrapper, 'micro_batch_size'),
    ],
)
def test_bytes_shrink_with_the_slice(kind, wrapper, setting):
    sizes = {}
    for size in (1, 2, 1000):
        model, data = model_and_batch(kind)
        optim = wrap(model, wrapper, **{setting: size})
        sizes[size] = saved_bytes(lambda m=model, d=data, o=optim: run_step(m, d, o), model)
    model, data = model_and_batch(kind)
    optim = wrap(model)
    plain = saved_bytes(lambda: run_step(model, data, optim), model)
    assert sizes[1] < sizes[2] < plain
    assert sizes[1] < plain / 2


def test_accumulation_over_iterations_goes_on_meaning_iterations():
    _, parameters = train(Classifier, steps=5, accumulative_counts=2)
    model, _ = model_and_batch(Classifier)
    wrapper = wrap(model, AccumulationOptimWrapper, micro_batch_size=2, accumulative_counts=2)
    for seed in range(5):
        run_step(model, model_and_batch(Classifier, seed)[1], wrapper)
    assert_same_step(dict(model.named_parameters()), parameters)


@pytest.mark.parametrize('precision', ['bf16', 'fp16'])
def test_half_precision_runs_in_slices(precision):
    model, data = model_and_batch(SimCLR)
    model = model.float()
    data['inputs'] = [view.float() for view in data['inputs']]
    before = model.backbone.model.patch_embed.proj.weight.clone()
    wrapper = wrap(model, GradCacheOptimWrapper, chunk_size=3, precision=precision)
    log_vars = run_step(model, data, wrapper)
    assert torch.isfinite(log_vars['loss'])
    if precision == 'bf16':  # in fp16 the first steps may overflow and be skipped
        assert not torch.equal(before, model.backbone.model.patch_embed.proj.weight)


def _rank(rank, world_size, kind):
    """A step of each rank on its samples; the loss is the rank's mean."""
    model, data = model_and_batch(kind, seed=rank)
    settings = (
        dict(kind=GradCacheOptimWrapper, chunk_size=2)
        if kind in COUPLED
        else dict(kind=AccumulationOptimWrapper, micro_batch_size=2)
    )
    wrapped = MMDistributedDataParallel(model)
    wrapper = wrap(model, **settings)
    for _ in range(2):
        run_step(wrapped, data, wrapper)
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize('kind', [SimCLR, CLIP, 'DINO'])
def test_ranks_in_slices_follow_ranks_in_whole_steps(kind):
    sliced = run_ranks(2, _rank, kind)
    whole = run_ranks(2, _whole_rank, kind)
    for name, expected in whole[0].items():
        tolerance = 1e-7 if name.endswith('pos_embed') else 1e-9
        for parameters in sliced:
            assert_same_step({name: parameters[name]}, {name: expected}, tolerance)


def _whole_rank(rank, world_size, kind):
    model, data = model_and_batch(kind, seed=rank)
    wrapped = MMDistributedDataParallel(model)
    wrapper = wrap(model)
    for _ in range(2):
        run_step(wrapped, data, wrapper)
    return {name: p.detach() for name, p in model.named_parameters()}


def _shared_rank(rank, world_size, kind):
    """Two steps on this rank's share of a batch."""
    model, _ = model_and_batch(kind)
    wrapped = MMDistributedDataParallel(model)
    wrapper = wrap(model, AccumulationOptimWrapper, micro_batch_size=1)
    for seed in range(2):
        run_step(wrapped, share(big_batch(kind, seed), rank, world_size), wrapper)
    return {name: p.detach() for name, p in model.named_parameters()}


def big_batch(kind, seed):
    """Eight samples."""
    parts = [model_and_batch(kind, 3 * seed + number)[1] for number in range(3)]
    return take(join_slices(parts), range(8))


def share(data, rank, world_size):
    each = 8 // world_size
    return take(data, range(rank * each, (rank + 1) * each))


def take(tree, rows):
    return pytree.tree_map(lambda x: None if x is None else x[rows.start : rows.stop], tree)


@pytest.mark.slow
@pytest.mark.parametrize('world_size', [2, 4])
@pytest.mark.parametrize('kind', ADDITIVE)
def test_ranks_in_slices_follow_one_process(kind, world_size):
    model, _ = model_and_batch(kind)
    wrapper = wrap(model)
    for seed in range(2):
        run_step(model, big_batch(kind, seed), wrapper)
    for parameters in run_ranks(world_size, _shared_rank, kind):
        for name, expected in model.named_parameters():
            tolerance = 1e-7 if name.endswith('pos_embed') else 1e-9
            assert_same_step({name: parameters[name]}, {name: expected}, tolerance)


class Unsliced(BaseModel):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, inputs, mode='loss'):
        return {'loss': self.layer(inputs).sum()}


@pytest.mark.edge(
    'accumulation',
    'refused',
    'A loss in which samples meet, for accumulation; an additive one, for the gradient cache',
)
def test_what_cannot_be_is_refused_with_the_remedy():
    simclr, data = model_and_batch(SimCLR)
    with pytest.raises(ValueError, match='GradCacheOptimWrapper.*chunk_size=4'):
        run_step(simclr, data, wrap(simclr, AccumulationOptimWrapper, micro_batch_size=4))
    dino, data = model_and_batch('DINO')
    with pytest.raises(ValueError, match='AccumulationOptimWrapper.*micro_batch_size=4'):
        run_step(dino, data, wrap(dino, GradCacheOptimWrapper, chunk_size=4))
    model = Unsliced()
    with pytest.raises(ValueError, match='Unsliced does not say how'):
        run_step(
            model, dict(inputs=torch.ones(1, 1)), wrap(model, GradCacheOptimWrapper, chunk_size=4)
        )


@pytest.mark.parametrize('size', [0, -1, 0.5, True, dict(image=0, text=2)])
def test_impossible_sizes_are_refused(size):
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match='chunk_size'):
        wrap(model, GradCacheOptimWrapper, chunk_size=size)
    with pytest.raises(ValueError, match='micro_batch_size'):
        wrap(model, AccumulationOptimWrapper, micro_batch_size=size)


def test_a_fraction_of_an_image_is_for_smaller_crops_only():
    model, data = model_and_batch('DINO')
    run_step(model, data, wrap(model, AccumulationOptimWrapper, micro_batch_size=1.5))
    model, data = model_and_batch(Classifier)
    with pytest.raises(ValueError, match='whole number of at least 1 row, got 1.5'):
        run_step(model, data, wrap(model, AccumulationOptimWrapper, micro_batch_size=1.5))
    model, data = model_and_batch(SimCLR)
    with pytest.raises(ValueError, match='whole number of at least 1 row, got 1.5'):
        run_step(model, data, wrap(model, GradCacheOptimWrapper, chunk_size=1.5))


class OfMMEngine(BaseModel):
    """A model with MMEngine's own train_step."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 1)

    def forward(self, inputs, data_samples=None, mode='loss'):
        return {'loss': self.net(inputs).square().mean()}


@pytest.mark.edge(
    'accumulation',
    'refused',
    'A step that somebody else’s `train_step` carries out, on the whole batch',
)
@pytest.mark.parametrize(
    ('kind', 'settings'),
    [
        (GradCacheOptimWrapper, dict(chunk_size=2)),
        (AccumulationOptimWrapper, dict(micro_batch_size=2)),
    ],
)
def test_a_train_step_of_others_is_refused_at_its_first_update(kind, settings):
    model, ((name, size),) = OfMMEngine(), settings.items()
    wrapper = wrap(model, kind, **settings)
    said = f'{kind.__name__}: the step was carried out by a train_step that .* {name}={size} would'
    with pytest.raises(ValueError, match=said):
        model.train_step(dict(inputs=torch.ones(4, 2)), wrapper)
    model, data = model_and_batch(SimCLR if 'Cache' in kind.__name__ else Classifier)
    model.train_step(data, wrap(model, kind, **settings))  # which says how


@pytest.mark.edge(
    'accumulation_over_iterations',
    'refused',
    'A loss in which samples meet, unless `accumulate_coupled=True`',
)
@pytest.mark.parametrize(
    ('kind', 'settings'), [(OptimWrapper, {}), (GradCacheOptimWrapper, dict(chunk_size=2))]
)
def test_iterations_of_a_coupled_loss_are_accumulated_on_request_only(kind, settings):
    model, data = model_and_batch(SimCLR)
    said = 'accumulative_counts=3: samples meet in the loss of SimCLR.*GradCacheOptimWrapper'
    with pytest.raises(ValueError, match=said):
        run_step(model, data, wrap(model, kind, accumulative_counts=3, **settings))
    insisting = wrap(model, kind, accumulative_counts=3, accumulate_coupled=True, **settings)
    run_step(model, data, insisting)
