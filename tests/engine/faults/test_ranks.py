"""Ranks tell where they are, and those that wait for one in vain say which."""

import threading
import time

import pytest
import torch.distributed as dist

from memengine.engine.faults import ranks
from memengine.engine.faults.ranks import RankError, RankWatch, ranks_named

LOST = RuntimeError('[gloo/tcp/pair.cc:553] Connection closed by peer [::1]:4')
LATE = RuntimeError('[gloo/tcp/unbound_buffer.cc:78] Timed out waiting 9000ms for recv')


@pytest.fixture
def job(monkeypatch):
    """Three ranks, which are threads here, by functions that make their watches."""
    store = dist.HashStore()
    monkeypatch.setattr(ranks, 'default_store', lambda: store)
    monkeypatch.setattr(ranks, 'BEAT_S', 0.02)
    monkeypatch.setattr(ranks, 'NOTICE_S', 0.5)
    monkeypatch.setattr(dist, 'get_world_size', lambda: 3)
    watches = []

    def rank(number, place):
        monkeypatch.setattr(dist, 'get_rank', lambda: number)
        watches.append(RankWatch(timeout_s=9.0))
        watches[-1].at(place)
        watches[-1].start()
        return watches[-1]

    yield rank
    for watch in watches:
        watch.stop('the test')


def said_by(watch, error):
    with pytest.raises(RankError) as caught, ranks_named(watch):
        raise error
    return str(caught.value)


def test_the_dead_are_told_from_those_that_have_lost_them(job):
    mine = job(0, 'training, iteration 8')
    dead = job(1, 'training, iteration 8')
    other = job(2, 'training, iteration 8')
    time.sleep(0.2)
    dead._stopped.set()  # as SIGKILL does, it takes the thread along
    dead._thread.join()
    threading.Thread(target=other.explain, args=(LOST,)).start()
    said = said_by(mine, LOST)
    assert said.startswith('the connection to another rank was lost: rank 1 (host ')
    assert 'died; last heard of at' in said
    assert 'in training, iteration 8 since' in said
    assert 'rank 2' not in said


def test_a_rank_with_an_error_of_its_own_is_named_by_it(job):
    mine, failed, other = (job(number, 'saving, iteration 3') for number in range(3))
    with pytest.raises(ZeroDivisionError), ranks_named(failed):
        1 / 0  # noqa: B018
    threading.Thread(target=other.explain, args=(LOST,)).start()
    said = said_by(mine, LOST)
    assert 'rank 1 (host' in said
    assert 'ended by ZeroDivisionError in saving, iteration 3; its own error says why' in said
    assert 'rank 2' not in said


@pytest.mark.fault('a rank hangs, and its launcher leaves it', 'it ends itself, too')
def test_a_rank_that_hangs_is_named_and_ends_itself(job, monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(ranks.os, '_exit', ended.append)
    mine = job(0, 'training, iteration 8')
    hangs = job(1, 'evaluation, iteration 7')
    other = job(2, 'training, iteration 8')
    threading.Thread(target=other.explain, args=(LATE,)).start()
    said = said_by(mine, LATE)
    assert said.startswith(
        'another rank did not answer within 9 s (env_cfg.dist_cfg.timeout): rank 1 (host '
    )
    assert 'has been in evaluation, iteration 7 since' in said
    assert 'rank 2' not in said
    hangs._thread.join(0.5)
    assert set(ended) == {1}
    error = 'memengine [rank 1]: error: the other ranks have given this one up; it has been in '
    assert error + 'evaluation, iteration 7' in capsys.readouterr().err


def test_a_store_that_went_away_is_said(job, monkeypatch):
    watch = job(1, 'training, iteration 8')

    def gone(*args):
        raise dist.DistNetworkError('connection reset by peer')

    monkeypatch.setattr(watch, '_store', type('Gone', (), dict(set=gone, check=gone, get=gone))())
    assert 'rank 0, through which all others hear of each other, is gone' in said_by(watch, LOST)


def test_a_rank_that_stands_still_warns_once(job, capsys):
    watch = job(0, 'training, iteration 8')
    watch._since_s -= 5  # more than half of the timeout
    time.sleep(0.2)
    watch.stop('the test')
    said = capsys.readouterr().err
    assert (
        said.count('memengine [rank 0]: warning: this rank has been in training, iteration 8') == 1
    )


def test_other_errors_and_one_process_are_left_alone(job):
    for watch in (job(0, 'start-up'), None):
        with pytest.raises(ValueError, match='width'), ranks_named(watch):
            raise ValueError('width must be 1')
