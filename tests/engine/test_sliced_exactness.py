"""Slices with all that is hard: dropout, BatchNorm, several losses, half precision."""

import pytest
import torch
from mmengine.logging import MMLogger
from mmengine.model import BaseDataPreprocessor

from memengine.engine.optim import AccumulationOptimWrapper, GradCacheOptimWrapper, OptimWrapper
from memengine.engine.step import run_step
from memengine.models import CLIP, Classifier, SimCLR, SupCon
from memengine.testing import assert_same_step, relative_error
from tests.engine.test_sliced import ADDITIVE, COUPLED, data_of, model_and_batch, wrap
from tests.models.test_dino import build as build_dino
from tests.models.toy import TEXT, VIT, build

DROPOUT = dict(drop_path_rate=0.3, proj_drop_rate=0.2, attn_drop_rate=0.2)
NOISY_VIT = dict(backbone={**VIT, **DROPOUT})
NOISY_TOWERS = dict(image={**VIT, **DROPOUT}, text={**TEXT, 'dropout': 0.2})
BATCHNORM = dict(head=dict(type='ProjectionHead', out_dim=6, use_bn=True))


def noisy(kind):
    if kind == 'DINO':
        return build_dino(backbone=DROPOUT)
    return build(kind, **(NOISY_TOWERS if issubclass(kind, CLIP) else NOISY_VIT))


def plain_in_slices(model, data, wrapper, size):
    """The same slices with all their graphs at once, and one backward."""
    inputs, samples = data['inputs'], data['data_samples']
    targets, pieces = model.targets(inputs, samples, size), model.slices(inputs, samples, size)
    embeddings = [model(piece.inputs, piece.data_samples, mode='tensor') for piece in pieces]
    if model.coupled:
        loss = model.embedding_loss(model.join(embeddings), targets, samples)
        loss = sum(value for name, value in loss.items() if 'loss' in name)
    else:
        parts = zip(embeddings, pieces, strict=True)
        loss = sum(model.slice_loss(output, targets, piece)['loss'] for output, piece in parts)
    wrapper.update_params(loss)
    return {'loss': loss.detach()}


def assert_follows(make, kind, size, wrapper=GradCacheOptimWrapper, optimizer='AdamW', **settings):
    """Train twice; losses, parameters and buffers must be the same, and so must the generators."""
    expected, model = make(kind), make(kind)
    plain = wrap(expected, optimizer=optimizer)
    sliced = wrap(model, wrapper, optimizer=optimizer, **settings)
    for seed in range(3):
        data = data_of(kind, seed)
        torch.manual_seed(seed)
        log = plain_in_slices(expected, data, plain, size)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        loss = run_step(model, data, sliced)['loss']
        assert torch.equal(torch.get_rng_state(), state)
        assert_same_step({'loss': loss}, log, tolerance=1e-8)
    actual, wanted = model.state_dict(), expected.state_dict()
    resampled = {name for name in wanted if name.endswith('pos_embed')}  # by timm, in fp32
    for names, tolerance in ((resampled, 1e-7), (wanted.keys() - resampled, 1e-9)):
        assert_same_step(
            {name: actual[name] for name in names},
            {name: wanted[name] for name in names},
            tolerance,
        )


@pytest.mark.parametrize('keep_graph', [0, 1])
@pytest.mark.parametrize('kind', COUPLED)
def test_gradient_cache_replays_dropout_and_drop_path(kind, keep_graph):
    settings = dict(chunk_size=3, keep_graph=keep_graph)
    assert_follows(noisy, kind, size=3, **settings)


@pytest.mark.parametrize('kind', ADDITIVE)
def test_accumulation_with_dropout_and_drop_path(kind):
    assert_follows(noisy, kind, size=2, wrapper=AccumulationOptimWrapper, micro_batch_size=2)


class Mixes(BaseDataPreprocessor):
    """A data preprocessor with a product in it."""

    def forward(self, data, training=False):
        data = super().forward(data, training)
        self.made = data['inputs'] @ torch.full((8, 8), 0.1)
        return {**data, 'inputs': self.made.float()}


def test_slices_are_of_the_batch_that_the_plain_step_preprocesses():
    data = data_of(Classifier)
    data['inputs'] = data['inputs'].float()
    made = []
    for kind, settings in ((OptimWrapper, {}), (AccumulationOptimWrapper, {'micro_batch_size': 2})):
        model = build(Classifier).float()
        model.data_preprocessor = Mixes()
        run_step(model, data, wrap(model, kind, precision='bf16', **settings))
        made.append(model.data_preprocessor.made)
    assert made[0].dtype == made[1].dtype == torch.bfloat16
    assert torch.equal(*made)


def test_dropout_is_on_in_these_tests():
    for kind in (SimCLR, 'DINO'):
        model = noisy(kind)
        _, data = model_and_batch(kind)
        first, second = (model(**data, mode='loss')['loss'] for _ in range(2))
        assert not torch.equal(first, second)


@pytest.mark.parametrize('keep_graph', [0, 1, 100])
@pytest.mark.parametrize('kind', [SimCLR, SupCon])
def test_batchnorm_counts_each_sample_once(kind, keep_graph):
    # SGD, as Adam would blow up the rounding of a bias before BatchNorm, whose gradient is zero
    settings = dict(chunk_size=4, keep_graph=keep_graph, optimizer='SGD')
    assert_follows(lambda kind: build(kind, **BATCHNORM), kind, size=4, **settings)


@pytest.mark.edge('grad_cache', 'assumed', 'BatchNorm in training normalises by each slice')
@pytest.mark.parametrize(('head', 'lines'), [({}, 0), (BATCHNORM, 1)])
def test_batchnorm_in_slices_is_said_once(head, lines, monkeypatch):
    said = []
    monkeypatch.setattr(MMLogger.get_current_instance(), 'warning', said.append)
    model = build(SimCLR, **head)
    wrapper = wrap(model, GradCacheOptimWrapper, chunk_size=4)
    for seed in range(2):
        run_step(model, data_of(SimCLR, seed), wrapper)
    assert len(said) == lines
    assert all('BatchNorm layers (head.mlp.1, ...)' in line for line in said)


def test_a_tower_that_writes_into_its_input_is_refused():
    model, data = model_and_batch(CLIP)
    model.towers['image'].register_forward_pre_hook(lambda _, args: (args[0].sub_(0.3),))
    with pytest.raises(ValueError, match='CLIP changes its input in place'):
        run_step(model, data, wrap(model, GradCacheOptimWrapper, chunk_size=2))


class TwoLosses(SimCLR):
    """A second loss with a weight that is learned, and with the labels."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.weight = torch.nn.Parameter(torch.tensor(0.7))

    def embedding_loss(self, embeddings, targets, data_samples=None):
        labels = data_samples['label'].to(embeddings).repeat(targets)
        return {
            'loss_views': super().embedding_loss(embeddings, targets)['loss'],
            'loss_labels': self.weight * (embeddings.mean(dim=1) - labels).square().mean(),
        }


def test_several_losses_with_a_learned_weight():
    def make(kind):
        torch.manual_seed(0)
        return TwoLosses(**NOISY_VIT, head=dict(type='ProjectionHead', out_dim=6)).double()

    assert_follows(make, SimCLR, size=3, chunk_size=3)
    expected, model = make(SimCLR), make(SimCLR)
    _, data = model_and_batch(SimCLR)
    torch.manual_seed(1)
    plain_in_slices(expected, data, wrap(expected), 3)
    torch.manual_seed(1)
    run_step(model, data, wrap(model, GradCacheOptimWrapper, chunk_size=3))
    assert_same_step({'weight': model.weight}, {'weight': expected.weight})
    assert model.weight != 0.7


@pytest.mark.parametrize('forward_chunk_size', [4, 7, 100])
@pytest.mark.parametrize('kind', COUPLED)
def test_a_larger_graph_free_chunk_changes_nothing(kind, forward_chunk_size):
    settings = dict(chunk_size=2, keep_graph=1, forward_chunk_size=forward_chunk_size)
    make = lambda kind: model_and_batch(kind)[0]  # noqa: E731
    assert_follows(make, kind, size=2, **settings)


def test_a_larger_graph_free_chunk_makes_fewer_forwards():
    model, data = model_and_batch(SimCLR)  # 10 rows
    rows = []
    model.backbone.register_forward_hook(lambda *args: rows.append(len(args[2])))
    wrapper = wrap(model, GradCacheOptimWrapper, chunk_size=2, forward_chunk_size=6)
    run_step(model, data, wrapper)
    assert rows == [6, 4, 2, 2, 2, 2, 2]


def test_a_larger_graph_free_chunk_is_refused_where_it_is_not_exact():
    _, data = model_and_batch(SimCLR)
    for model, words in ((noisy(SimCLR), 'draws random'), (build(SimCLR, **BATCHNORM), 'batch')):
        settings = dict(chunk_size=2, forward_chunk_size=4)
        with pytest.raises(ValueError, match=f'{words}.*leave out forward_chunk_size'):
            run_step(model, data, wrap(model, GradCacheOptimWrapper, **settings))
    with pytest.raises(ValueError, match='forward_chunk_size=4 is less than chunk_size=8'):
        wrap(model, GradCacheOptimWrapper, chunk_size=8, forward_chunk_size=4)
    with pytest.raises(ValueError, match='forward_chunk_size=15 does not hold two chunks of 8'):
        wrap(model, GradCacheOptimWrapper, chunk_size=8, forward_chunk_size=15)


@pytest.mark.parametrize('forward_chunk_size', [None, 6])
@pytest.mark.parametrize('kind', [SimCLR, SupCon])
def test_a_frozen_backbone_runs_once(kind, forward_chunk_size):
    rows = []

    def make(kind):
        model = build(kind, freeze_backbone=True)
        model.backbone.model.blocks[0].register_forward_hook(
            lambda *args: rows.append(len(args[2]))
        )
        return model

    settings = dict(chunk_size=2, forward_chunk_size=forward_chunk_size)
    assert_follows(make, kind, size=2, **settings)
    assert sum(rows) == 3 * 2 * 10  # steps, models, rows


def error_of(kind, precision, truth, wrapper=OptimWrapper, **settings):
    """Relative distance of a step's gradient from the float64 one."""
    model, data = model_and_batch(kind)
    model = model.float()
    inputs = data['inputs']
    many = isinstance(inputs, list)
    inputs = [view.float() for view in inputs] if many else inputs.float()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: p.detach().double().clone() for name, p in trained.items()}
    optimizer = torch.optim.SGD(trained.values(), lr=1.0)
    run_step(
        model,
        dict(inputs=inputs, data_samples=data['data_samples']),
        wrapper(optimizer, precision=precision, loss_scale=2.0, **settings),
    )
    moved = torch.cat(
        [(before[name] - p.detach().double()).flatten() for name, p in trained.items()]
    )
    return relative_error(moved, truth)


@pytest.mark.parametrize('precision', ['bf16', 'fp16'])
@pytest.mark.parametrize('kind', [*COUPLED, *ADDITIVE])
def test_half_precision_is_no_further_from_float64_than_the_plain_step(kind, precision):
    model, data = model_and_batch(kind)
    model(**data, mode='loss')['loss'].backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    truth = torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in trained]
    )
    plain = error_of(kind, precision, truth)
    assert 1e-4 < plain < 0.2  # half precision was on, and no step was skipped
    if kind in COUPLED:
        sliced = [dict(wrapper=GradCacheOptimWrapper, chunk_size=3, keep_graph=n) for n in (0, 1)]
    else:
        sliced = [dict(wrapper=AccumulationOptimWrapper, micro_batch_size=n) for n in (1, 2)]
    for settings in sliced:
        assert error_of(kind, precision, truth, **settings) <= 1.5 * plain


def test_fp16_skips_the_whole_step_when_any_slice_overflows():
    model, data = model_and_batch(Classifier)
    model = model.float()
    data['inputs'] = data['inputs'].float()
    before = [p.detach().clone() for p in model.parameters()]
    wrapper = wrap(
        model,
        AccumulationOptimWrapper,
        micro_batch_size=2,
        precision='fp16',
        loss_scale=dict(init_scale=2.0**10),
    )
    seen = []
    overflow = torch.tensor(float('inf'))

    def once(grad):
        seen.append(1)
        return grad * overflow if len(seen) == 1 else grad

    handle = model.head.weight.register_hook(once)
    run_step(model, data, wrapper)
    assert len(seen) == 3  # slices
    assert all(map(torch.equal, before, model.parameters()))
    assert wrapper.precision.scaler.get_scale() == 2.0**9
    handle.remove()
    run_step(model, data, wrapper)
    assert not any(map(torch.equal, before, model.parameters()))
