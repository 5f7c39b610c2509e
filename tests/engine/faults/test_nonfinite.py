"""A step whose loss or gradient is not finite changes nothing that training holds."""

import os
from pathlib import Path

import pytest
import torch
from mmengine.hooks import EMAHook, Hook
from torch import nn

from memengine.engine.checkpoint.saving import CheckpointWriter, SaveError
from memengine.engine.faults import capture
from memengine.engine.faults.finite_state import NonFiniteError, refuse_nonfinite_state
from memengine.engine.faults.guard import StepGuard
from memengine.engine.optim import OptimizerInBackwardOptimWrapper, OptimWrapper
from memengine.testing import run_ranks
from tests.engine.faults.faulty import SIZE, build

BAD_ITERATION = 2  # of each epoch, from 0, when a sample is bad
SKIP = dict(on_nonfinite='skip')
AVERAGE = dict(type='EMAHook', momentum=0.5)


def held(runner):
    """Everything that a step may change, copied."""
    state = {**runner.model.state_dict(), **flat(runner.optim_wrapper.state_dict())}
    for average in [hook.ema_model for hook in runner.hooks if isinstance(hook, EMAHook)]:
        state |= {f'average.{name}': value for name, value in average.state_dict().items()}
    return {name: value.clone() for name, value in state.items()}


def flat(tree, name='optim'):
    """The tensors in nested dicts and lists, by their paths."""
    if isinstance(tree, torch.Tensor):
        return {name: tree}
    if not isinstance(tree, (dict, list)):
        return {}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {path: x for key, one in items for path, x in flat(one, f'{name}.{key}').items()}


class Watch(Hook):
    """Which iterations changed something, and which logged a loss."""

    priority = 'LOWEST'

    def __init__(self):
        self.changed, self.logged = [], []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.before = held(runner)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        after = held(runner)
        same = after.keys() == self.before.keys() and all(
            torch.equal(after[name], value) for name, value in self.before.items()
        )
        self.changed += [] if same else [runner.iter]
        self.logged += [runner.iter] if 'loss' in outputs else []


def run(tmp_path, **cfg):
    runner, watch = build(tmp_path, **cfg), Watch()
    runner.register_hook(watch)
    runner.train()
    return runner, watch


CASES = {
    'gradient': dict(fault='gradient'),
    'loss': dict(model='FaultyClassifier'),
    'centre and teacher': dict(model='DINO', fault='gradient'),
    'average': dict(fault='gradient', custom_hooks=[AVERAGE]),
    'slices': dict(
        model='DINO',
        fault='output',
        optim_wrapper=dict(type='AccumulationOptimWrapper', micro_batch_size=2),
    ),
    'cache': dict(
        model='SimCLR',
        fault='gradient',
        optim_wrapper=dict(type='GradCacheOptimWrapper', chunk_size=2),
    ),
    'clipped by value': dict(
        fault='gradient', optim_wrapper=dict(clip_grad=dict(type='value', clip_value=1.0))
    ),
    'fp16': dict(fault='output', optim_wrapper=dict(precision='fp16')),
}


@pytest.mark.fault(
    'A NaN gradient with a finite loss',
    'weights, teacher, centre, BatchNorm and optimiser have not seen the step; training stops, '
    'skips it or rolls back',
)
@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_a_skipped_step_changes_nothing_and_logs_nothing(tmp_path, case):
    case = {**case, 'optim_wrapper': {**SKIP, **case.get('optim_wrapper', {})}}
    _, watch = run(tmp_path, **case)
    bad = [i for i in range(12) if i not in watch.logged]
    assert watch.changed == watch.logged
    assert bad[0] == BAD_ITERATION
    assert len(bad) == (1 if 'Faulty' in case.get('model', '') else 3)  # one an epoch
    assert len(list((tmp_path / 'nonfinite').glob('iter_*.pth'))) == len(bad)


def test_buffers_come_back_whether_written_to_or_replaced():
    class Queue(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer('queue', torch.zeros(2))
            self.register_buffer('center', torch.zeros(1))

        def forward(self, x):
            self.queue = torch.cat([x, self.queue])
            self.center.add_(1)

    model = Queue()
    start = capture.StepStart(model)
    for size in (2, 3):
        start.keep()
        model(torch.ones(1))
        start.put_back_buffers()
        assert model.queue.tolist() == [0.0] * 2
        model.queue = torch.zeros(size - 1)
        start.keep()
        assert model.queue.shape == (size - 1,)
        model.queue = torch.zeros(2)
    assert model.center.item() == 0


@pytest.mark.fault('A NaN gradient in the last iteration', 'an error, and no checkpoint of it')
def test_the_last_iteration_is_no_exception(tmp_path):
    train_cfg = dict(by_epoch=True, max_epochs=1)
    runner = build(tmp_path, fault='gradient', data=dict(every=True), train_cfg=train_cfg)
    runner._train_loop['stop_at_iter'] = 1
    with pytest.raises(NonFiniteError, match='norm of the gradient is nan'):
        runner.train()
    assert not list(tmp_path.glob('*.pth'))
    assert not (tmp_path / 'last_checkpoint').exists()


def test_too_many_bad_steps_end_training(tmp_path):
    optim = dict(SKIP, nonfinite_limit=3)
    runner = build(tmp_path, fault='gradient', data=dict(every=True), optim_wrapper=optim)
    runner._train_loop['max_epochs'] = 2
    with pytest.raises(NonFiniteError, match='in iteration 4'):
        runner.train()
    assert len(list((tmp_path / 'nonfinite').glob('iter_*.pth'))) == 3  # captures


class Poison(Hook):
    """Makes the batches of some iterations NaN."""

    def __init__(self, iterations):
        self.iterations = iterations

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter in self.iterations:
            data_batch['inputs'].fill_(torch.nan)


def poisoned(tmp_path, iterations, on_nonfinite, limit, interval, **settings):
    checkpoint = dict(interval=interval, by_epoch=False, max_keep_ckpts=2, **settings)
    optim = dict(on_nonfinite=on_nonfinite, nonfinite_limit=limit)
    runner = build(tmp_path, optim_wrapper=optim, default_hooks=dict(checkpoint=checkpoint))
    runner.register_hook(Poison(iterations))
    return runner


@pytest.mark.fault(
    'All steps from some on are NaN, and checkpoints are frequent',
    'the limit holds across checkpoints, and the good ones are kept',
)
@pytest.mark.parametrize('on_nonfinite', ['skip', 'rollback'])
def test_a_checkpoint_does_not_begin_the_count_anew(tmp_path, on_nonfinite):
    runner = poisoned(tmp_path, range(4, 12), on_nonfinite, limit=3, interval=1)
    with pytest.raises(NonFiniteError, match='in iteration 8'):
        runner.train()
    assert {path.name for path in tmp_path.glob('*.pth')} == {'iter_3.pth', 'iter_4.pth'}
    assert (tmp_path / 'last_checkpoint').read_text().endswith('iter_4.pth')


def test_a_step_that_succeeds_before_a_checkpoint_begins_the_count_anew(tmp_path):
    poisoned(tmp_path, range(1, 12, 2), 'skip', limit=1, interval=2).train()
    assert {path.name for path in tmp_path.glob('*.pth')} == {'iter_10.pth', 'iter_12.pth'}


@pytest.mark.parametrize('asynchronous', [False, True])
def test_what_a_failed_checkpoint_would_have_held_is_saved_later(
    tmp_path, asynchronous, monkeypatch
):
    start, starts = CheckpointWriter.start, []

    def failing(self, write, asynchronous):
        def fail():
            raise SaveError('no room')

        starts.append(1)
        return start(self, fail if len(starts) == 2 else write, asynchronous)

    monkeypatch.setattr(CheckpointWriter, 'start', failing)
    poisoned(tmp_path, range(6, 12), 'skip', 20, 3, asynchronous=asynchronous).train()
    assert {path.name for path in tmp_path.glob('*.pth')} == {'iter_3.pth', 'iter_9.pth'}


def test_steps_that_are_rolled_back_did_not_succeed(tmp_path):
    runner = poisoned(tmp_path, range(5, 12, 2), 'rollback', limit=3, interval=2)
    with pytest.raises(NonFiniteError, match='in iteration 12'):
        runner.train()
    assert {path.name for path in tmp_path.glob('*.pth')} == {'iter_2.pth', 'iter_4.pth'}


@pytest.mark.parametrize('custom_hooks', [[], [AVERAGE]], ids=['', 'average'])
@pytest.mark.parametrize('kind', ['OptimWrapper', 'OptimizerInBackwardOptimWrapper'])
def test_a_run_rolls_back_to_the_last_checkpoint_and_goes_on(tmp_path, kind, custom_hooks):
    seen = {}

    class Look(Hook):
        priority = 'LOWEST'

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            seen[runner.iter] = held(runner)

    optim = dict(type=kind, on_nonfinite='rollback')
    hooks = dict(checkpoint=dict(type='CheckpointHook', interval=2, by_epoch=False))
    cfg = dict(default_hooks=hooks, custom_hooks=custom_hooks)
    runner = build(tmp_path, fault='gradient', optim_wrapper=optim, **cfg)
    runner.register_hook(Look())
    runner.train()
    after, checkpoint = seen[BAD_ITERATION], seen[BAD_ITERATION - 1]
    assert all(torch.equal(after[name], value) for name, value in checkpoint.items())
    last = seen[max(seen)]
    assert not all(torch.equal(last[name], value) for name, value in checkpoint.items())
    assert all(value.isfinite().all() for value in last.values())


def test_a_run_rolls_back_to_what_it_has_gone_on_from(tmp_path):
    few = dict(by_epoch=True, max_epochs=3, stop_at_iter=BAD_ITERATION - 1)
    build(tmp_path / 'a', train_cfg=few).train()
    before = torch.load(tmp_path / f'a/iter_{BAD_ITERATION - 1}.pth', weights_only=False)
    build(tmp_path / 'b', train_cfg=dict(by_epoch=True, max_epochs=1)).train()  # a run before
    seen = {}

    class Look(Hook):
        priority = 'LOWEST'

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            seen[runner.iter] = held(runner)

    load_from = str(tmp_path / f'a/iter_{BAD_ITERATION - 1}.pth')
    optim = dict(on_nonfinite='rollback')
    options = dict(fault='gradient', optim_wrapper=optim, load_from=load_from, resume=True)
    runner = build(tmp_path / 'b', **options, train_cfg=dict(by_epoch=True, max_epochs=1))
    runner.register_hook(Look())
    runner.train()
    for name, value in before['state_dict'].items():
        assert torch.equal(seen[BAD_ITERATION][name], value), name


@pytest.mark.parametrize('of_a_run_before', [False, True])
def test_a_run_without_a_checkpoint_cannot_roll_back(tmp_path, of_a_run_before):
    if of_a_run_before:
        build(tmp_path, train_cfg=dict(by_epoch=True, max_epochs=1)).train()
        assert (tmp_path / 'last_checkpoint').exists()
    optim = dict(on_nonfinite='rollback')
    with pytest.raises(NonFiniteError, match='no checkpoint to roll back to'):
        build(tmp_path, fault='gradient', data=dict(every=True), optim_wrapper=optim).train()


def test_checkpoints_without_an_optimiser_are_nothing_to_roll_back_to(tmp_path):
    hooks = dict(checkpoint=dict(type='CheckpointHook', save_optimizer=False))
    runner = build(tmp_path, optim_wrapper=dict(on_nonfinite='rollback'), default_hooks=hooks)
    with pytest.raises(ValueError, match='save_optimizer=False leaves it out'):
        runner.train()
    assert runner.iter == 0


def test_a_bad_iteration_spoils_those_that_are_averaged_with_it(tmp_path):
    optim = dict(SKIP, accumulative_counts=2)
    _, watch = run(tmp_path, fault='gradient', optim_wrapper=optim, batch_norm=False)
    assert {1, 5, 9, 7, 11} >= set(watch.changed)  # BAD_ITERATION is the first of the second two
    assert 3 not in watch.changed
    assert 3 in watch.logged


def test_overflows_of_fp16_are_the_scalers(tmp_path):
    optim = dict(precision='fp16', loss_scale=dict(init_scale=2.0**20))
    runner, watch = run(tmp_path, optim_wrapper=optim)
    scale = runner.optim_wrapper.precision.scaler.get_scale()
    assert scale < 2.0**20
    assert not (tmp_path / 'nonfinite').exists()
    assert watch.logged == list(range(12))


def test_an_overflow_that_does_not_end_is_none():
    guard = StepGuard(most_overflows=2)
    good, bad = torch.tensor(1.0), torch.tensor(torch.inf)
    passes = [guard.passes(good, norm, [], True) for norm in (bad, bad, good, bad, bad, bad)]
    assert passes == [False, False, True, False, False, False]
    assert guard.bad_step is not None
    assert not StepGuard().passes(torch.tensor(torch.nan), good, [], True)


def test_float64_is_looked_at_as_it_is():
    assert StepGuard().passes(torch.tensor(1e300, dtype=torch.float64), torch.tensor(1.0), [])


def test_a_step_synchronises_once(monkeypatch):
    """Whatever asks a device for a number waits for it."""
    model = nn.Linear(2, 1)
    wrapper = OptimWrapper(
        torch.optim.SGD(model.parameters(), lr=0.1), clip_grad=dict(max_norm=1.0)
    )
    wrapper.guard = StepGuard()
    calls = []
    for name in ('item', 'tolist', '__float__', '__bool__', '__int__'):
        real = getattr(torch.Tensor, name)

        def counted(self, *args, name=name, real=real):
            calls.append(name)
            return real(self, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)
    wrapper.update_params(model(torch.ones(3, 2)).sum())
    assert calls == ['tolist']


@pytest.mark.fault(
    'Weights or an optimiser that became NaN', 'no checkpoint is written; the tensor is named'
)
@pytest.mark.parametrize('where', ['weight', 'exp_avg', 'running_mean'])
def test_what_is_not_finite_is_not_saved(tmp_path, where):
    runner = build(tmp_path)
    runner._train_loop['max_epochs'] = 1
    runner.train()
    model, optimizer = runner.model, runner.optim_wrapper.optimizer
    with torch.no_grad():
        if where == 'weight':
            model.head.weight[0, 0] = torch.inf
        elif where == 'exp_avg':
            optimizer.state[model.head.weight]['exp_avg'][0] = torch.nan
        else:
            model.backbone.norm.running_mean[0] = torch.nan
    with pytest.raises(NonFiniteError, match=where):
        runner.save_checkpoint(str(tmp_path), 'bad.pth')
    assert not (tmp_path / 'bad.pth').exists()


def test_masks_of_infinities_are_saved():
    model = nn.Linear(1, 1)
    model.register_buffer('mask', torch.tensor([0.0, -torch.inf]))
    refuse_nonfinite_state(model, None)


def test_a_full_disk_does_not_end_a_run_that_may_go_on(tmp_path, monkeypatch):
    def full(*args):
        raise OSError('No space left on device')

    monkeypatch.setattr(capture.torch, 'save', full)
    runner = build(tmp_path, fault='gradient', optim_wrapper=SKIP)
    warnings = []
    monkeypatch.setattr(runner.logger, 'warning', warnings.append)
    runner._train_loop['max_epochs'] = 1
    monkeypatch.setattr(runner, 'save_checkpoint', lambda *args, **kwargs: None)
    runner.train()
    assert 'could not be captured: No space left' in ' '.join(map(str, warnings))


@pytest.mark.parametrize(
    ('kind', 'settings', 'message'),
    [
        (OptimWrapper, dict(on_nonfinite='ignore'), "'stop', 'skip' or 'rollback', got 'ignore'"),
        (OptimWrapper, dict(nonfinite_limit=0), 'nonfinite_limit must be at least 1'),
        (OptimizerInBackwardOptimWrapper, SKIP, "on_nonfinite='rollback'"),
    ],
)
def test_settings_that_cannot_be_are_refused(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        kind(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), **settings)


@pytest.mark.fault(
    'A batch of one where samples are compared with each other', 'refused by name at the start'
)
def test_a_batch_of_one_is_refused_where_samples_meet(tmp_path):
    runner = build(tmp_path, model='SimCLR')
    runner._train_dataloader['batch_size'] = 1
    with pytest.raises(ValueError, match='batch_size=1: in the loss of SimCLR'):
        runner.train()


def _train_on_a_rank(rank, world_size, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    with pytest.raises(NonFiniteError) as error:
        build(Path(folder, 'stop'), launcher='pytorch', fault='output').train()
    runner, watch = run(
        Path(folder, 'skip'), launcher='pytorch', fault='output', optim_wrapper=SKIP
    )
    state = runner.model.module.state_dict()
    return str(error.value), watch.changed, all(v.isfinite().all() for v in state.values())


@pytest.mark.fault('A NaN on one rank of two', 'both refuse the step; neither saves it')
def test_all_ranks_refuse_what_one_has_found(tmp_path):
    results = run_ranks(2, _train_on_a_rank, str(tmp_path))
    assert not list((tmp_path / 'stop').glob('*.pth'))
    assert results[0][1] == results[1][1]
    assert len(results[0][1]) == 3 * SIZE // 8 - 3
    assert all(is_finite for _, _, is_finite in results)
