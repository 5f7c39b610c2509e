"""A step that is carried out also plainly: nothing of it is left, and what is wrong is found."""

import copy

import pytest
import torch
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper as MMEngineOptimWrapper
from torch import nn
from torch.utils import _pytree as pytree

from memengine.engine import run_step
from memengine.engine.faults.exactness import first_samples
from memengine.engine.hooks import ExactnessError, ExactnessHook
from memengine.engine.step import unwrap
from memengine.engine.techniques_of_config import refusals
from memengine.models import CLIP, Classifier, SimCLR, SupCon
from memengine.technique import Handle
from memengine.techniques.activation_checkpointing.repeatable_forward import CheckpointedForward
from memengine.techniques.activation_offload import ActivationOffload
from memengine.techniques.compression.dropit import DropIT
from memengine.testing import run_ranks
from tests.composition import Row, rows, train
from tests.engine.test_out_of_memory import Limit
from tests.engine.test_sliced import data_of
from tests.engine.test_sliced_exactness import BATCHNORM, NOISY_TOWERS, NOISY_VIT
from tests.engine.toy import Losses, params, toy_runner
from tests.models.test_dino import build as build_dino
from tests.models.toy import build

CHECKPOINTED = dict(activation_checkpointing=['blocks'])
PARTS = dict(activation_checkpointing=['net', 'head'])


@pytest.fixture
def figures(monkeypatch):
    """The error of each comparison."""
    found, judge = [], ExactnessHook._judge

    def seen(self, runner, actual, expected):
        judge(self, runner, actual, expected)
        if buffer := runner.message_hub.log_scalars.get('train/exactness/error'):
            found.append(buffer.current())

    monkeypatch.setattr(ExactnessHook, '_judge', seen)
    return found


# -- in one process, with every technique ----------------------------------------------------------


def guard(**settings):
    return Row('guard', dict(verify_exactness=dict(every=1, **settings)))


@pytest.mark.edge(
    'verify_exactness',
    'exact',
    'Training with it, with each technique, precision, clipping and accumulation: the same '
    'bit for bit',
)
@pytest.mark.parametrize('samples', [None, 6])
@pytest.mark.parametrize('row', rows(), ids=lambda row: row.name)
def test_training_is_the_same_bit_for_bit(row, samples, figures):
    """With every technique, precision, clipping and accumulation; exact ones have no error."""
    if row.name == 'optimiser step in backward':
        names = 'OptimizerInBackwardOptimWrapper and verify_exactness'
        with pytest.raises(ValueError, match=names):
            train(row.models[0], [row, guard()])
        return
    kind = row.models[0 if samples is None else -1]
    plain = train(kind, [row], iterations=2)
    assert torch.equal(plain, train(kind, [row, guard(samples=samples)], iterations=2))
    assert len(figures) == 2
    if row.is_lossy:
        assert max(figures) > 1e-3
    else:
        assert max(figures) < 1e-9


def wrong_by(monkeypatch, factor):
    """Make checkpointing hand back a gradient that is wrong by a factor."""
    checkpoint = CheckpointedForward._checkpoint

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return factor * gradient

    def wrong(self, *args):
        return Wrong.apply(checkpoint(self, *args))

    monkeypatch.setattr(CheckpointedForward, '_checkpoint', wrong)


@pytest.mark.edge(
    'verify_exactness',
    'refused',
    'A gradient that is wrong by a hundredth, or missing: the run stops before the update',
)
@pytest.mark.parametrize('factor', [1.01, 0.0])
@pytest.mark.parametrize('samples', [None, 4])
def test_a_wrong_technique_stops_the_run_before_the_update(factor, samples, monkeypatch):
    wrong_by(monkeypatch, factor)
    row = Row('checkpointing', CHECKPOINTED)
    updates = []
    step = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, 'step', lambda *a, **k: updates.append(1) or step(*a, **k))
    words = r'by .*backbone\..* in iteration 1, more than .*0.001'
    with pytest.raises(ExactnessError, match=words):
        train('Classifier', [row, guard(samples=samples)])
    assert not updates
    train('Classifier', [row])
    assert updates  # without the guard it goes on


def test_the_tolerance_is_a_setting(monkeypatch, figures):
    wrong_by(monkeypatch, 1.01)
    train('Classifier', [Row('checkpointing', CHECKPOINTED), guard(tolerance=0.1)])
    assert all(0.005 < error < 0.1 for error in figures)


@pytest.mark.edge(
    'verify_exactness',
    'assumed',
    'Lossy techniques: their error is logged, and judged by a stated tolerance only',
)
def test_a_lossy_technique_is_judged_by_a_stated_tolerance_only(figures):
    row = Row('dropit', dict(dropit=0.9))
    train('Classifier', [row, guard()])
    assert max(figures) > 1e-2
    with pytest.raises(ExactnessError, match='of which dropit may be the cause'):
        train('Classifier', [row, guard(tolerance=1e-3)])


def test_an_overflow_is_not_compared(figures):
    scale = dict(init_scale=2.0**40)
    row = Row('fp16', dict(optim_wrapper=dict(precision='fp16', loss_scale=scale)))
    with_guard = train('Classifier', [row, guard()])
    assert torch.equal(with_guard, train('Classifier', [row]))
    assert not figures


# -- what it costs ---------------------------------------------------------------------------------


@pytest.mark.edge(
    'verify_exactness',
    'exact',
    'An iteration that is compared has one forward and backward more, others none',
)
def test_it_costs_one_forward_and_backward_when_it_compares_and_nothing_else(tmp_path):
    forwards, backwards, hooks = [0], [0], []

    class Counting(Losses):
        def after_train_iter(self, runner, *args, **kwargs):
            self.seen.append((forwards[0], backwards[0]))
            hooks.append(sum(len(m._forward_hooks) for m in runner.model.modules()))
            assert runner.optim_wrapper.on_gradient is None
            forwards[0] = backwards[0] = 0

    losses = Counting()
    runner = toy_runner(tmp_path, losses, cfg=dict(verify_exactness=dict(every=3)))
    layer = runner.model.net[0]
    layer.register_forward_hook(lambda *_: forwards.__setitem__(0, forwards[0] + 1))
    layer.weight.register_hook(lambda _: backwards.__setitem__(0, backwards[0] + 1))
    runner.train()
    assert losses.seen == [(2, 2) if i % 3 == 0 else (1, 1) for i in range(15)]
    assert {*hooks} == {1}


# -- models with state of every kind ---------------------------------------------------------------


class Stateful(BaseModel):
    """Counts, queues, averages, replaces and draws in its forward."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.head = nn.Linear(8, 1)
        self.register_buffer('centre', torch.zeros(8))
        self.queue, self.pointer, self.log = torch.zeros(6, 8), 0, []
        self.generator = torch.Generator().manual_seed(5)

    def train_step(self, data, optim_wrapper):
        return run_step(self, data, optim_wrapper)

    def forward(self, x, y, mode='loss'):
        for mine, theirs in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
            theirs.data.lerp_(mine.data, 0.1)
        teacher = self.teacher(x)
        out = self.blocks(self.net(x))
        self.queue[self.pointer] = teacher[0]
        self.pointer = (self.pointer + 1) % 6
        self.centre = 0.9 * self.centre + 0.1 * teacher.mean(0)
        self.log.append(self.pointer)
        noise = torch.rand(8, generator=self.generator)
        target = teacher - self.centre + self.queue.mean(0) + noise
        return {'loss': (out - target).square().mean() + (self.head(out) - y).square().mean()}


@pytest.mark.edge(
    'verify_exactness',
    'exact',
    'BatchNorm, teachers, queues, counters, buffers that are replaced, random numbers: each '
    'changes once',
)
@pytest.mark.parametrize('settings', [{}, dict(samples=2)])
@pytest.mark.parametrize('precision', ['fp32', 'bf16'])
def test_what_a_forward_changes_is_changed_once(settings, precision, tmp_path):
    def run(name, **cfg):
        losses = Losses()
        torch.manual_seed(0)
        runner = toy_runner(
            tmp_path / name,
            losses,
            model=Stateful(),
            cfg={**PARTS, **cfg},
            optim_wrapper=dict(
                optimizer=dict(type='AdamW', lr=0.05),
                precision=precision,
                accumulative_counts=2,
                clip_grad=dict(max_norm=0.5),
            ),
        )
        runner.train()
        model = runner.model
        return losses.seen, params(runner), (model.queue, model.centre), (model.pointer, model.log)

    plain, guarded = run('plain'), run('guarded', verify_exactness=dict(every=1, **settings))
    assert plain[0] == guarded[0] and plain[3] == guarded[3]
    assert all(torch.equal(value, guarded[1][name]) for name, value in plain[1].items())
    assert all(map(torch.equal, plain[2], guarded[2]))


SLICED = {
    SimCLR: (dict(**NOISY_VIT, **BATCHNORM), 'GradCacheOptimWrapper', 'chunk_size'),
    SupCon: (NOISY_VIT, 'GradCacheOptimWrapper', 'chunk_size'),
    CLIP: (NOISY_TOWERS, 'GradCacheOptimWrapper', 'chunk_size'),
    Classifier: (NOISY_VIT, 'AccumulationOptimWrapper', 'micro_batch_size'),
}


class Samples(torch.utils.data.Dataset):
    """Those of three batches of an algorithm."""

    metainfo: dict = {}

    def __init__(self, kind):
        self.batches = [data_of(kind, seed) for seed in range(3)]
        inputs = self.batches[0]['inputs']
        self.size = len(inputs[0] if isinstance(inputs, list) else inputs)

    def __len__(self):
        return 3 * self.size

    def __getitem__(self, index):
        batch, sample = divmod(index, self.size)
        whole = {name: part for name, part in self.batches[batch].items() if part is not None}
        return pytree.tree_map(lambda x: x[sample], whole)


def run_sliced(folder, kind, model, wrapper, setting, **cfg):
    samples = Samples(kind)
    runner = toy_runner(
        folder,
        model=model,
        train_cfg=dict(by_epoch=True, max_epochs=1),
        loader=dict(
            dataset=samples,
            batch_size=samples.size,
            sampler=dict(type='DefaultSampler', shuffle=False),
        ),
        optim_wrapper={
            'type': wrapper,
            setting: 2,
            'optimizer': dict(type='SGD', lr=0.1),
        },
        param_scheduler=None,
        cfg=cfg,
    )
    runner.train()
    return params(runner)


@pytest.mark.edge(
    'verify_exactness',
    'assumed',
    'Slices of a model that draws random numbers or normalises by the batch: the plain step '
    'has the same slices',
)
@pytest.mark.parametrize('kind', [*SLICED, 'DINO', 'DINO and KoLeo'])
def test_slices_with_dropout_and_batch_statistics_are_compared_slice_by_slice(
    kind, tmp_path, figures
):
    def make():
        if isinstance(kind, str):
            return build_dino(
                backbone=dict(drop_path_rate=0.3), koleo_weight=0.1 if 'KoLeo' in kind else 0.0
            )
        return build(kind, **SLICED[kind][0])

    wrapper, setting = ('AccumulationOptimWrapper', 'micro_batch_size')
    if kind in (SimCLR, SupCon, CLIP, 'DINO and KoLeo'):
        wrapper, setting = ('GradCacheOptimWrapper', 'chunk_size')
    data = 'DINO' if isinstance(kind, str) else kind
    cfg = dict(verify_exactness=dict(every=1))
    plain = run_sliced(tmp_path / 'plain', data, make(), wrapper, setting)
    guarded = run_sliced(tmp_path / 'guarded', data, make(), wrapper, setting, **cfg)
    assert all(torch.equal(value, guarded[name]) for name, value in plain.items())
    assert len(figures) == 3 and max(figures) < 1e-8


def test_where_the_plain_step_does_not_fit_a_part_of_the_batch_is_compared(
    tmp_path, figures, capsys
):
    """A block that takes four rows stands for a memory; a batch has ten, a slice two."""

    def make():
        model = build(SimCLR)
        Limit(4, 'graph', model.backbone.model.blocks[1])
        return model

    run = (SimCLR, make(), 'GradCacheOptimWrapper', 'chunk_size')
    plain = run_sliced(tmp_path / 'plain', *run)
    cfg = dict(verify_exactness=dict(every=1))
    run = (SimCLR, make(), *run[2:])
    guarded = run_sliced(tmp_path / 'guarded', *run, **cfg)
    assert all(torch.equal(value, guarded[name]) for name, value in plain.items())
    said = capsys.readouterr().out
    assert said.count('of 5 samples runs out of memory; steps are compared on 2') == 1
    assert len(figures) == 3 and 0 < max(figures) < 1e-9


@pytest.mark.parametrize(('kind', 'fewest'), [(SimCLR, 2), (Classifier, 1)])
def test_where_no_part_fits_the_guard_is_named(kind, fewest, tmp_path):
    model = build(kind)
    Limit(0, 'graph', model.backbone.model.blocks[1])
    wrapper = SLICED[kind][1:]
    with pytest.raises(torch.OutOfMemoryError, match=f'verify_exactness.*plain step of {fewest}'):
        run_sliced(tmp_path, kind, model, *wrapper, verify_exactness=True)


# -- on several ranks ------------------------------------------------------------------------------


def narrow(monkeypatch, most):
    """Let checkpointed modules run out of memory with more rows, when they are not checkpointed."""
    run = CheckpointedForward.plain

    def plain(self, x):
        if self.planner.is_paused and len(x) > most:
            raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.')
        return run(self, x)

    monkeypatch.setattr(CheckpointedForward, 'plain', plain)


def train_rank(rank, folder, name, **cfg):
    torch.manual_seed(0)
    losses = Losses()
    runner = toy_runner(
        f'{folder}/{name}{rank}',
        losses,
        model=Stateful(),
        launcher='pytorch',
        cfg={**PARTS, **cfg},
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.05), accumulative_counts=2),
    )
    runner.train()
    (guard,) = [h for h in runner.hooks if isinstance(h, ExactnessHook)] or [None]
    if guard is not None:
        assert guard.plain.samples == (2 if name == 'narrow' else None)
    return losses.seen, {k: v.clone() for k, v in unwrap(runner.model).state_dict().items()}


def train_on_rank(rank, world_size, folder):
    guard = dict(verify_exactness=dict(every=1))
    losses, state = train_rank(rank, folder, 'plain')
    runs = [train_rank(rank, folder, 'guarded', **guard)]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            narrow(patch, 3)
        runs.append(train_rank(rank, folder, 'narrow', **guard))
    same = all(
        losses == others and all(torch.equal(v, other[k]) for k, v in state.items())
        for others, other in runs
    )
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            wrong_by(patch, 1.2)
        with pytest.raises(ExactnessError) as raised:
            train_rank(rank, folder, 'wrong', **guard)
    return same, str(raised.value)


@pytest.mark.edge('verify_exactness', 'refused', 'A wrong gradient on one rank of two: both stop')
@pytest.mark.slow
def test_two_ranks_train_the_same_and_a_wrong_one_stops_both(tmp_path):
    (same, error), (also_same, other) = run_ranks(2, train_on_rank, str(tmp_path))
    assert same and also_same
    assert error == other and 'in iteration 1' in error


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'cfg',
    [
        dict(optim_wrapper=dict(type='OptimizerInBackwardOptimWrapper')),
        dict(model_wrapper_cfg=dict(type='MMFullyShardedDataParallel'), launcher='pytorch'),
        dict(optim_wrapper=dict(optimizer=dict(type='CPUOffloadOptimizer'))),
    ],
)
def test_where_there_is_no_plain_step_it_is_refused_by_name(cfg):
    (problem,) = refusals({**cfg, 'verify_exactness': dict(every=10)})
    assert 'verify_exactness' in problem and 'go together' in problem
    assert not refusals({**cfg, 'verify_exactness': False})


def test_a_technique_that_cannot_be_paused_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(ActivationOffload, 'paused', Handle.paused)
    row = Row('offload', dict(activation_offload=dict(store='disk', min_bytes=64)))
    with pytest.raises(ValueError, match=r'activation_offload.* has no method paused\(\)'):
        train('Classifier', [row, guard()])


@pytest.mark.edge(
    'verify_exactness',
    'refused',
    'Compiled blocks that draw random numbers, unless they draw as the plain step does '
    '(`compile_blocks.options.fallback_random`)',
)
def test_compiled_code_that_draws_other_numbers_is_refused(tmp_path):
    runner = toy_runner(tmp_path, cfg=dict(verify_exactness=True, compile_blocks=['net']))
    with pytest.raises(ValueError, match='verify_exactness.*draws others.*fallback_random'):
        runner.train()


@pytest.mark.slow
@pytest.mark.parametrize(
    'compiled',
    [dict(modules=['net'], options=dict(fallback_random=True)), dict(modules=['net.0', 'net.3'])],
)
def test_compiled_code_that_draws_the_same_or_nothing_is_compared(tmp_path, figures, compiled):
    cfg = dict(verify_exactness=dict(every=4), compile_blocks=compiled)
    toy_runner(tmp_path, cfg=cfg).train()
    assert len(figures) == 4  # beyond its tolerance it would have ended


def test_mmengines_own_wrapper_is_refused(tmp_path):
    runner = toy_runner(
        tmp_path,
        cfg=dict(verify_exactness=True),
        optim_wrapper=dict(type=MMEngineOptimWrapper, optimizer=dict(type='SGD', lr=0.1)),
    )
    with pytest.raises(ValueError, match='does not know when a gradient is whole'):
        runner.train()


def test_a_step_that_does_not_ask_is_refused(tmp_path):
    runner = toy_runner(tmp_path, cfg=dict(verify_exactness=True))
    runner.model.train_step = lambda data, optim_wrapper: {'loss': torch.zeros(())}
    with pytest.raises(ValueError, match='nothing to compare; have it call'):
        runner.train()


def test_one_sample_of_a_loss_in_which_samples_meet_is_refused():
    with pytest.raises(ValueError, match='samples=1: samples meet in the loss of SimCLR'):
        train('SimCLR', [guard(samples=1)])


@pytest.mark.parametrize('wrong', [dict(every=0), dict(samples=0), dict(tolerance=0.0)])
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=f'verify_exactness.{next(iter(wrong))} must be'):
        ExactnessHook(**wrong)


def test_every_is_true_for_a_thousand_and_off_is_no_hook(tmp_path):
    def hooks(**cfg):
        runner = toy_runner(tmp_path, cfg=cfg)
        return [hook for hook in runner.hooks if isinstance(hook, ExactnessHook)]

    assert [hook.every for hook in hooks(verify_exactness=True)] == [1000]
    assert not hooks() and not hooks(verify_exactness=False)


def test_techniques_are_on_again_after_an_error():
    handle = DropIT.__new__(DropIT)
    with pytest.raises(KeyError), handle.paused():
        assert handle.is_paused
        raise KeyError
    assert not handle.is_paused


def test_a_batch_is_cut_in_every_layout():
    images, labels = torch.arange(4.0).view(4, 1, 1, 1), torch.arange(4)
    part = first_samples(dict(inputs=[images, images], data_samples=dict(label=labels)), 3, 4)
    assert [len(view) for view in part['inputs']] == [3, 3]
    assert part['data_samples']['label'].tolist() == [0, 1, 2]
    part = first_samples((list(images), ['a', 'b', 'c', 'd'], 7), 1, 4)
    assert [len(x) if isinstance(x, list) else x for x in part] == [1, 1, 7]
    with pytest.raises(ValueError, match='nothing in a batch has 5 entries'):
        first_samples(dict(inputs=images), 1, 5)
