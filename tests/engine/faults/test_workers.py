"""Workers of data loaders that die, hang, or are sent signals that were meant for the run."""

import contextlib
import ctypes
import multiprocessing
import os
import re
import signal
import subprocess
import time
from functools import partial

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from memengine.engine.cli.failure import explain
from memengine.engine.data_order import SeededDataset
from memengine.engine.faults.signals import Interrupted
from memengine.engine.faults.workers import WorkerError, guard_workers, samples_named
from memengine.engine.runner import Runner
from tests.engine.toy import Losses, ToyData, toy_runner


@pytest.fixture(autouse=True)
def listens(monkeypatch):
    """Torch's handler of SIGCHLD, which it sets once in a process, is set by each test anew."""
    before = signal.getsignal(signal.SIGCHLD)
    monkeypatch.setattr(signal_handling, '_SIGCHLD_handler_set', False)
    yield
    signal.signal(signal.SIGCHLD, before)


def hold_interpreter(after_s=0):
    time.sleep(after_s)  # the batch before is announced meanwhile
    sleep = ctypes.PyDLL(None).sleep  # as an endless regular expression does: no other thread runs
    while True:  # a signal wakes it
        sleep(1000)


TROUBLES = {
    'leaves': lambda: os._exit(3),
    'is killed': lambda: os.kill(os.getpid(), signal.SIGKILL),
    'crashes': lambda: ctypes.string_at(0),
    'sleeps': lambda: time.sleep(1000),
    'holds the interpreter': hold_interpreter,
    'announces a batch and holds the interpreter': partial(hold_interpreter, after_s=1),
}


class TroubledData(ToyData):
    """Something happens to the worker that loads sample 9."""

    def __init__(self, trouble):
        super().__init__()
        self.trouble = trouble

    def __getitem__(self, index):
        if index == 9:
            TROUBLES[self.trouble]()
        return super().__getitem__(index)

    def sample_name(self, index):
        return f"sample {index}, '{index}.jpg'"


def error_of(trouble, wait_s=0, **options):
    data = SeededDataset(TroubledData(trouble), seed=0, workers=2)
    loader = guard_workers(DataLoader(data, 4, num_workers=2, **options))
    try:
        with samples_named(lambda: dict(val_dataloader=loader)):
            batches = iter(loader)
            time.sleep(wait_s)
            list(batches)
    except WorkerError as error:  # not kept, as it would keep the loader's processes
        return str(error)
    pytest.fail('all samples were loaded')


@pytest.mark.fault('a data worker leaves, crashes or is killed', 'its sample and file are named')
@pytest.mark.parametrize(
    ('trouble', 'how'),
    [
        ('leaves', 'ended with exit code 3'),
        ('is killed', 'was killed by signal: Killed'),
        ('crashes', 'was killed by signal: Segmentation fault'),
    ],
)
def test_a_worker_that_dies_names_its_sample(trouble, how):
    said = error_of(trouble, timeout=10)
    how = f'(?:{how}|ended unexpectedly)'  # all that torch knows when it is told late
    pattern = rf"val_dataloader: a worker \(pid \d+\) {how} while it loaded sample 9, '9\.jpg'; .*"
    assert re.fullmatch(pattern, said), said


def test_a_death_that_torch_told_a_destructor_only_is_seen():
    data = SeededDataset(TroubledData('is killed'), seed=0, workers=2)
    loader = guard_workers(DataLoader(data, 4, num_workers=2, timeout=10))
    how = '(?:was killed by signal: Killed|ended unexpectedly)'
    with pytest.raises(WorkerError, match=rf"worker \(pid \d+\) {how} .* sample 9, '9"):
        with samples_named(lambda: dict(val_dataloader=loader)):
            with contextlib.suppress(RuntimeError, OSError):
                list(loader)
            raise ConnectionResetError('of the pipe of a worker')
    for child in multiprocessing.active_children():  # which other tests would count
        child.kill()
        child.join()


@pytest.mark.slow  # a worker has to begin within the timeout, on a busy machine, too
@pytest.mark.fault('a data worker hangs', 'after `timeout` its sample and file are named')
@pytest.mark.parametrize(
    ('trouble', 'wait_s'),
    [
        ('sleeps', 0),
        ('holds the interpreter', 0),
        ('announces a batch and holds the interpreter', 4),
    ],
)
def test_a_worker_that_hangs_names_its_sample(trouble, wait_s):
    said = error_of(trouble, wait_s, timeout=8)
    pattern = (
        r'val_dataloader: no batch within 8 s \(val_dataloader\.timeout\): a worker \(pid (\d+)\) '
        r"has been loading sample 9, '9\.jpg' since \d\d:\d\d:\d\d"
    )
    found = re.fullmatch(pattern, said)
    assert found, said
    with pytest.raises(ProcessLookupError):
        os.kill(int(found[1]), 0)


@pytest.mark.fault('a data worker dies in the optimiser’s step', 'the loader is named')
def test_the_optimiser_is_not_blamed(tmp_path):
    """Torch raises wherever the main process is."""

    class Die(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            optimizer = runner.optim_wrapper.optimizer
            optimizer.register_step_pre_hook(self.kill_worker)

        def kill_worker(self, *args):
            (worker,) = multiprocessing.active_children()
            os.kill(worker.pid, signal.SIGKILL)
            time.sleep(30)  # it is interrupted by the signal of the child's end

    runner = toy_runner(tmp_path, loader=dict(num_workers=1), custom_hooks=[Die()])
    with pytest.raises(WorkerError) as caught:
        runner.train()
    cfg = Config(dict(optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.05))))
    assert 'train_dataloader: a worker' in explain(caught.value, cfg)
    assert 'AdamW' not in explain(caught.value, cfg)


def test_the_loader_has_a_timeout_by_default():
    config = dict(
        dataset=ToyData(), batch_size=4, num_workers=1, sampler=dict(type='DefaultSampler')
    )
    assert Runner.build_dataloader(config, seed=0).timeout == 300
    assert Runner.build_dataloader(dict(config, timeout=7), seed=0).timeout == 7
    assert Runner.build_dataloader(dict(config, num_workers=0), seed=0).timeout == 0


@pytest.mark.fault(
    'every process of a run gets SIGTERM', 'data workers go on until the checkpoint is saved'
)
def test_workers_outlive_signals_for_the_run(tmp_path):
    class SignalAll(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            if runner.iter == 6:
                workers = multiprocessing.active_children()
                assert len(workers) == 2
                pids = [str(pid) for pid in (*(w.pid for w in workers), os.getpid())]
                for name in ('USR1', 'HUP', 'INT', 'TERM'):
                    subprocess.run(['kill', f'-{name}', *pids], check=True)
                time.sleep(0.3)
                assert all(w.is_alive() for w in workers)

    losses = Losses()
    loader = dict(num_workers=2)
    with pytest.raises(Interrupted):
        toy_runner(tmp_path, losses, loader=loader, custom_hooks=[losses, SignalAll()]).train()
    assert len(losses.seen) == 7
    assert torch.load(tmp_path / 'iter_7.pth', weights_only=False)['meta']['iter'] == 7


def test_skipped_samples_are_counted_at_the_end(tmp_path, monkeypatch):
    class Skipping(ToyData):
        skipped = 3

    runner = toy_runner(tmp_path, loader=dict(dataset=Skipping()))
    said = []
    monkeypatch.setattr(runner.logger, 'warning', said.append)
    runner.train()
    assert said.count('train_dataloader: 3 of 22 samples were skipped as unreadable') == 1
