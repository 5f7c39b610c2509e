"""Predictions in copies of this process: they change nothing but the time."""

import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

from memengine.engine.config.planning import copied_processes
from memengine.engine.config.planning.copied_processes import Copies
from memengine.memory.cpu_workspaces import predict_for_threads
from tests.engine.config.test_planning import SIMCLR, planner

PLANS = [
    {},
    {'slices': 4, 'kept': 0.5},
    {'recomputed_activations': 'everywhere'},
    {'slices': 8, 'kept': 0},
    {'optimizer_in_backward': 'OptimizerInBackwardOptimWrapper'},  # refused
]


def planner_with(threads, depth):
    torch.set_num_threads(threads)
    return planner(SIMCLR, **{'model.backbone.depth': depth})


def compare_costs(depth, killed_after):
    """Costs with copies, which are ended after so many, and without; and when there were copies.

    The last one says whether there are any when the planner is gone.
    """
    some, were_there, beside = planner_with(2, depth), [], []
    for number, plan in enumerate(PLANS):
        if number == killed_after:
            for pid in some._steps._copies._pool._processes:
                os.kill(pid, signal.SIGKILL)
        beside.append(some.cost(plan))
        were_there.append(bool(some._steps._copies))
    left_out = some.left_out
    del some
    were_there.append(bool(multiprocessing.active_children()))
    predict_for_threads(2)
    alone = planner_with(1, depth)
    return beside, [*map(alone.cost, PLANS)], were_there, (left_out, alone.left_out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('depth', 'killed_after'),
    [(9, None), (2, 2)],  # of nine blocks, three and four are predicted
)
def test_costs_are_the_same(depth, killed_after):
    with ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:  # without autograd
        beside, alone, were_there, left_out = pool.submit(
            compare_costs, depth, killed_after
        ).result()
    until = len(PLANS) if killed_after is None else killed_after
    assert were_there == [*(number < until for number in range(len(PLANS))), False]
    assert beside == alone and left_out[0] == left_out[1]
    assert all(beside[:-1]) and beside[-1] is None


@pytest.fixture
def two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


class Waits:
    def pid(self):
        time.sleep(0.2)  # so that the other copy has the next one
        return os.getpid()


def die_with_copies(connection):
    torch.set_num_threads(2)
    subject = Waits()
    copies = Copies(subject)
    begun = [copies.begin('pid') for _ in range(2)]
    connection.send([one.result() for one in begun])
    os.kill(os.getpid(), signal.SIGKILL)


def is_there(pid):
    try:
        with open(f'/proc/{pid}/stat') as stat:
            return stat.read().rpartition(')')[2].split()[0] != 'Z'
    except FileNotFoundError:
        return False


def test_copies_end_with_the_process():
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context('spawn')
    process = context.Process(target=die_with_copies, args=(there,))
    process.start()
    pids = here.recv()
    process.join()
    assert process.exitcode == -signal.SIGKILL and len(set(pids)) == 2
    end = time.monotonic() + 60
    while any(map(is_there, pids)):
        assert time.monotonic() < end, 'they outlive it'
        time.sleep(0.05)


class Differentiates:
    def gradient(self):
        x = torch.ones((), requires_grad=True)
        (3 * x).backward()
        return x.grad.item()


def test_where_autograd_was_used_copies_use_it_or_there_are_none(two_threads):
    assert Differentiates().gradient() == 3
    subject = Differentiates()
    copies = Copies(subject)
    assert not copies or copies.begin('gradient').result() == 3


@pytest.mark.parametrize('error', [OSError('Cannot allocate memory'), BrokenProcessPool()])
def test_without_room_for_a_process_there_are_no_copies(error, two_threads, monkeypatch):
    def submit(*_):
        raise error

    monkeypatch.setattr(ProcessPoolExecutor, 'submit', submit)
    subject = Waits()
    assert not Copies(subject)


def test_copies_that_were_made_before_there_was_no_room_are_ended(two_threads, monkeypatch):
    fork, made = os.fork, []

    def fork_once():
        if made:
            raise OSError('Cannot allocate memory')
        pid = fork()
        made.append(pid)
        return pid

    monkeypatch.setattr(os, 'fork', fork_once)
    subject = Waits()
    assert not Copies(subject)
    assert made and not any(map(is_there, made))


def test_no_more_copies_than_cores_that_the_process_may_use(two_threads, monkeypatch):
    monkeypatch.setattr(copied_processes, 'available_cores', lambda: 1)
    subject = Waits()
    assert not Copies(subject)
