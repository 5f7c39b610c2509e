"""Signals that ask a run to stop: it saves after the step, and resuming goes on exactly."""

import os
import signal

import pytest
import torch
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.hooks import Hook

from memengine.engine.faults.signals import Interrupted, exit_status
from memengine.testing import run_ranks
from tests.engine.toy import Losses, ToyData, params, toy_runner

LOOPS = {
    'epochs': dict(by_epoch=True, max_epochs=3, val_interval=1),
    'iterations': dict(by_epoch=False, max_iters=15, val_interval=5),
}


class Mean(BaseMetric):
    """The mean of the outputs; keeps what it has found."""

    def __init__(self, before_computing=lambda: None):
        super().__init__(prefix='toy')
        self.found, self.before_computing = [], before_computing

    def process(self, data_batch, data_samples):
        self.results.extend(sample.item() for sample in data_samples)

    def compute_metrics(self, results):
        self.before_computing()
        self.found.append(sum(results) / len(results))
        return {'mean': self.found[-1]}


class Signal(Hook):
    """Sends a signal to this process once, when the runner comes to a place."""

    priority = 'VERY_HIGH'

    def __init__(self, number, place, iteration):
        self.number, self.iteration = number, iteration
        setattr(self, place, self.send)

    def send(self, runner, *args, **kwargs):
        if runner.iter == self.iteration:
            self.iteration = None
            os.kill(os.getpid(), self.number)


def run(folder, loop, signal_hook=None, rank=0, hooks=(), **options):
    """Losses, figures of evaluations and parameters of a run, and the signal that ended it."""
    losses, metric, ended_by = Losses(), Mean(), None
    runner = toy_runner(
        folder,
        train_cfg=LOOPS[loop],
        custom_hooks=[losses, *hooks, *([signal_hook] if signal_hook else [])],
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=1, by_epoch=True)),
        val_dataloader=dict(
            dataset=ToyData(),
            batch_size=4,
            sampler=dict(type='DefaultSampler', shuffle=False),
            collate_fn=dict(type='default_collate'),
        ),
        val_cfg=dict(),
        val_evaluator=Evaluator(metric),
        **options,
    )
    try:
        runner.train()
    except Interrupted as interrupted:
        ended_by = interrupted.signal
    return losses.seen, metric.found, params(runner), ended_by


def assert_resumes_exactly(folder, loop, signal_hook, **options):
    """A run that a signal ended and the rest of it are the run without the signal."""
    losses, figures, final, _ = run(folder / 'whole', loop, **options)
    first = run(folder / 'parts', loop, signal_hook, **options)
    second = run(folder / 'parts', loop, resume=True, **options)
    assert (first[3], second[3]) == (signal_hook.number, None)
    assert first[0] + second[0] == losses
    assert first[1] + second[1] == figures, 'the evaluation that was left is done again'
    for name, value in second[2].items():
        assert torch.equal(value, final[name]), name
    return [iteration for iteration, _ in first[0]]


@pytest.mark.parametrize(
    ('number', 'status'),
    [
        pytest.param(
            signal.SIGTERM,
            143,
            marks=pytest.mark.fault(
                'SIGTERM in a step', 'checkpoint at its end, status 143; resuming is bit for bit'
            ),
        ),
        (signal.SIGINT, 130),
        pytest.param(
            signal.SIGHUP,
            129,
            marks=pytest.mark.fault('SIGHUP (a closed terminal)', 'the same, status 129'),
        ),
        pytest.param(
            signal.SIGUSR1,
            75,
            marks=pytest.mark.fault(
                'SIGUSR1 or SIGUSR2 (preemption)', 'the same, status 75, to be requeued on'
            ),
        ),
        (signal.SIGUSR2, 75),
    ],
)
def test_a_signal_in_a_step_saves_at_its_end(tmp_path, number, status):
    trained = assert_resumes_exactly(tmp_path, 'epochs', Signal(number, 'before_train_iter', 6))
    assert trained == list(range(7)), 'the step in which the signal came is the last'
    assert exit_status(Interrupted(number)) == status


@pytest.mark.parametrize('loop', LOOPS)
def test_a_signal_between_two_updates_waits_for_the_next(tmp_path, loop):
    wrapper = dict(optimizer=dict(type='AdamW', lr=0.05), accumulative_counts=4)
    hook = Signal(signal.SIGTERM, 'before_train_iter', 5)
    trained = assert_resumes_exactly(tmp_path, loop, hook, optim_wrapper=wrapper)
    assert trained == list(range(8))


@pytest.mark.fault('SIGTERM in an evaluation', 'left after the batch; resuming begins with it')
@pytest.mark.parametrize('loop', LOOPS)
def test_a_signal_in_an_evaluation_ends_it_and_resuming_does_it_again(tmp_path, loop):
    batches = []

    class InSecondBatch(Signal):
        def send(self, runner, batch_idx, *args, **kwargs):
            if runner.iter == 5:
                batches.append(batch_idx)
            if batch_idx == 1:
                super().send(runner)

    hook = InSecondBatch(signal.SIGTERM, 'before_val_iter', 5)
    assert assert_resumes_exactly(tmp_path, loop, hook) == list(range(5))
    assert batches == [0, 1]


@pytest.mark.parametrize('kind', ['EMAHook', 'mmengine.EMAHook'])
@pytest.mark.parametrize('loop', LOOPS)
def test_a_signal_in_an_evaluation_of_the_average_saves_the_weights_as_such(tmp_path, loop, kind):
    hook = Signal(signal.SIGTERM, 'after_val_iter', 5)
    average = dict(type=kind, momentum=0.25, update_buffers=True)
    assert_resumes_exactly(tmp_path, loop, hook, hooks=[average])


@pytest.mark.parametrize('loop', LOOPS)
def test_a_signal_in_the_step_before_an_evaluation_leaves_that_to_the_resumed_run(tmp_path, loop):
    hook = Signal(signal.SIGUSR1, 'before_train_iter', 4)
    assert assert_resumes_exactly(tmp_path, loop, hook) == list(range(5))


@pytest.mark.fault('SIGTERM in a save', 'that checkpoint is whole, and one more is saved')
def test_a_signal_in_a_save_lets_it_end(tmp_path):
    hook = Signal(signal.SIGTERM, 'before_save_checkpoint', 5)
    assert assert_resumes_exactly(tmp_path, 'epochs', hook) == list(range(5))
    assert (tmp_path / 'parts/epoch_1.pth').is_file()
    assert not list(tmp_path.glob('parts/.*.partial'))


def test_a_signal_after_the_last_step_lets_the_run_end(tmp_path):
    class InComputing(Signal):
        def before_train(self, runner):
            metric = runner.val_evaluator.metrics[0]
            metric.before_computing = lambda: self.send(runner)

    hook = InComputing(signal.SIGTERM, 'after_val', 15)
    losses, figures, _, ended_by = run(tmp_path, 'epochs', hook)
    assert (len(losses), len(figures), ended_by, hook.iteration) == (15, 3, None, None)


def test_a_second_ctrl_c_ends_at_once_and_other_signals_do_not(tmp_path):
    class Twice(Signal):
        def send(self, runner, *args, **kwargs):
            if runner.iter == self.iteration:
                os.kill(os.getpid(), self.number)
                os.kill(os.getpid(), self.number)

    for number, steps in ((signal.SIGTERM, 7), (signal.SIGINT, 6)):
        folder = tmp_path / str(number)
        losses, _, _, ended_by = run(folder, 'epochs', Twice(number, 'before_train_iter', 6))
        assert (len(losses), ended_by) == (steps, number)


def test_handlers_are_as_before_and_nohup_is_heeded(tmp_path):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)]
        hook = Signal(signal.SIGHUP, 'before_train_iter', 6)
        losses, _, _, ended_by = run(tmp_path, 'epochs', hook)
        after = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)]
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert (len(losses), ended_by) == (15, None)
    assert before == after


def ranks_stop(rank, world_size, folder, places):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    shared = dict(launcher='pytorch', loader=dict(batch_size=2), cfg=dict(sync_bn='torch'))
    losses, figures, expected, _ = run(f'{folder}/whole', 'epochs', **shared)
    found = []
    for place, iteration in places:
        hook = Signal(signal.SIGUSR1, place, iteration) if rank == 1 else None
        first = run(f'{folder}/{place}', 'epochs', hook, **shared)
        second = run(f'{folder}/{place}', 'epochs', resume=True, **shared)
        same = all(torch.equal(value, expected[name]) for name, value in second[2].items())
        exact = first[0] + second[0] == losses and first[1] + second[1] == figures and same
        found.append((len(first[0]), first[3], exact))
    return found


@pytest.mark.slow
@pytest.mark.fault(
    'a signal on one rank only', 'all ranks stop after the same step, at most one step later'
)
def test_a_signal_on_one_rank_stops_all_together(tmp_path):
    places = [('before_train_iter', 6), ('before_val_iter', 5)]
    first, second = run_ranks(2, ranks_stop, str(tmp_path), places)
    assert first == second == [(8, signal.SIGUSR1, True), (5, signal.SIGUSR1, True)]
