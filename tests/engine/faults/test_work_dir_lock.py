"""One run at a time in a work dir."""

import contextlib
import json
import multiprocessing
import os
import threading
import time

import pytest
from mmengine.config import Config

from memengine.engine.faults import work_dir_lock as lock_module
from memengine.engine.faults.work_dir_lock import LOCK_FILE, WorkDirLockedError, work_dir_lock
from tests.engine.toy import toy_runner

FORK = multiprocessing.get_context('fork')


def hold(folder, connection):
    try:
        with work_dir_lock(folder, print):
            connection.send('held')
            connection.poll(60)
    except WorkDirLockedError as error:
        connection.send(str(error))


def begin_holding(folder):
    here, there = FORK.Pipe()
    process = FORK.Process(target=hold, args=(folder, there), daemon=True)
    process.start()
    return process, here


def end(process, connection):
    with contextlib.suppress(BrokenPipeError):  # it has ended already
        connection.send('end')
    process.join()


@pytest.fixture
def holder(tmp_path):
    """Another process that holds ``tmp_path``."""
    process, connection = begin_holding(tmp_path)
    assert connection.recv() == 'held'
    yield process
    end(process, connection)


def change(folder, **changed):
    path = folder / LOCK_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


@pytest.mark.fault(
    'a second run is started in a work dir', 'refused, naming host and process of the first'
)
def test_a_second_run_is_refused_while_the_first_lives(tmp_path, holder):
    runner = toy_runner(tmp_path)
    with pytest.raises(WorkDirLockedError, match=rf'process {holder.pid} on .*--work-dir'):
        runner.train()
    assert holder.is_alive() and (tmp_path / LOCK_FILE).exists()


def test_a_refused_run_leaves_the_config_of_the_first(tmp_path, holder):
    def run_of(lr):
        given = tmp_path / 'given/config.py'
        given.parent.mkdir(exist_ok=True)
        given.write_text(f'lr = {lr}')
        cfg = Config.fromfile(given)
        return toy_runner(tmp_path, cfg=cfg, train_cfg=dict(by_epoch=False, max_iters=1))

    written = tmp_path / 'config.py'
    written.write_text('of_the_first = True')
    with pytest.raises(WorkDirLockedError):
        run_of(2.0).train()
    assert written.read_text() == 'of_the_first = True'
    late = run_of(3.0)  # before the first has the lock, as it were
    holder.kill()
    holder.join()
    late.train()
    assert 'lr = 3.0' in written.read_text()


def test_of_many_that_start_together_one_gets_it(tmp_path):
    begun = [begin_holding(tmp_path) for _ in range(8)]
    outcomes = [connection.recv() for _, connection in begun]
    for process, connection in begun:
        end(process, connection)
    assert outcomes.count('held') == 1
    assert not (tmp_path / LOCK_FILE).exists()


@pytest.mark.fault(
    'a run was killed, and is started again', 'the lock of the dead one is taken over'
)
def test_the_lock_of_a_dead_process_is_taken_over(tmp_path, holder):
    holder.kill()
    holder.join()
    said = []
    with work_dir_lock(tmp_path, said.append):
        assert json.loads((tmp_path / LOCK_FILE).read_text())['process'] == os.getpid()
    assert f'process {holder.pid}' in said[0] and 'taken over' in said[0]
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_process_that_has_got_the_number_of_the_dead_one_does_not_hold(tmp_path, holder):
    change(tmp_path, started='1')
    with work_dir_lock(tmp_path, print):
        pass


def test_what_is_no_lock_holds_nothing(tmp_path):
    for content in ('', 'half a lo', '{}', '[]', '5', '{"place": 3}'):
        (tmp_path / LOCK_FILE).write_text(content)
        with work_dir_lock(tmp_path, print):
            pass


def test_a_run_on_another_host_is_told_by_its_touching_the_lock(tmp_path, holder, monkeypatch):
    change(tmp_path, place='elsewhere')
    monkeypatch.setattr(lock_module, 'TOUCH_INTERVAL_S', 0.04)
    ended, path = threading.Event(), tmp_path / LOCK_FILE
    alive = threading.Thread(target=lock_module._keep_touching, args=(path, ended))
    alive.start()
    said = []
    with pytest.raises(WorkDirLockedError), work_dir_lock(tmp_path, said.append):
        pass
    ended.set()
    alive.join()
    assert 'waiting up to 120 s for a sign of life' in said[0]
    monkeypatch.setattr(lock_module, 'DEAD_AFTER_S', 0.1)
    time.sleep(0.1)
    with work_dir_lock(tmp_path, said.append):
        pass
    assert 'taken over' in said[-1]


def test_a_run_lets_go_of_its_work_dir_however_it_ends(tmp_path):
    runner = toy_runner(tmp_path)
    runner.train()
    assert not (tmp_path / LOCK_FILE).exists()
