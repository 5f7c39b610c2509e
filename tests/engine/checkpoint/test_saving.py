"""A checkpoint that cannot be written: training goes on, and the next one is."""

import errno
import functools
import itertools
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from mmengine.hooks import Hook

from memengine.engine.checkpoint.saving import CheckpointWriter, SaveError, explain_save_error
from memengine.engine.checkpoint.sharded_saving import sharded_write
from tests.engine.toy import Losses, params, toy_runner

HOOKS = {
    'file': dict(interval=1),
    'file in the background': dict(interval=1, asynchronous=True),
    'sharded': dict(interval=1, sharded=True),
    'sharded in the background': dict(interval=1, sharded=True, asynchronous=True),
}


@pytest.fixture(params=HOOKS)
def checkpoint(request):
    return HOOKS[request.param]


@contextmanager
def small_files():
    """No file grows beyond 4 KiB, with the system's own error."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def unwritable(folder):
    """A folder in which not even root may write stands in its place."""
    aside = folder.rename(folder.with_name('aside'))
    folder.symlink_to('/sys')
    try:
        yield
    finally:
        folder.unlink()
        aside.rename(folder)


@pytest.fixture
def in_saves(monkeypatch):
    """Something is wrong while the checkpoints of some numbers are written."""
    start = CheckpointWriter.start

    def during(trouble, *numbers):
        count = itertools.count(1)

        def begin(self, write, asynchronous):
            def in_trouble():
                with trouble():
                    write()

            return start(self, in_trouble if next(count) in numbers else write, asynchronous)

        monkeypatch.setattr(CheckpointWriter, 'start', begin)

    return during


@pytest.fixture
def full_disk(in_saves):
    """The disk is full while the checkpoints of these numbers are written."""
    return functools.partial(in_saves, small_files)


def run(folder, checkpoint, epochs=3, hooks=(), **kwargs):
    losses, said = Losses(), []
    runner = toy_runner(
        folder,
        custom_hooks=[*hooks, losses],
        default_hooks=dict(checkpoint=checkpoint),
        **dict(train_cfg=dict(by_epoch=True, max_epochs=epochs)) | kwargs,
    )
    runner.logger.error = said.append
    runner.train()
    return runner, losses.seen, '\n'.join(said)


@pytest.mark.fault(
    'the disk is full when a checkpoint is written, one file or shards, in the background or not',
    'training goes on, what to do is said, the unfinished file is removed, the next save succeeds',
)
def test_training_goes_on_when_the_disk_is_full(tmp_path, checkpoint, full_disk):
    whole, seen, _ = run(tmp_path / 'whole', checkpoint)
    full_disk(2)
    runner, went, said = run(tmp_path / 'full', {**checkpoint, 'max_keep_ckpts': 1})
    assert went == seen
    assert 'epoch_2' in said and 'disk is full' in said and 'max_keep_ckpts' in said
    assert 'Training goes on to the next checkpoint (1 of 3 failures in a row)' in said
    suffix = runner.checkpoint_suffix
    left = {path.name for path in (tmp_path / 'full').iterdir() if 'epoch' in path.name}
    assert left == {f'epoch_3{suffix}'}
    for name, value in params(runner).items():
        assert torch.equal(value, params(whole)[name]), name


@pytest.mark.skipif(not Path('/sys/kernel').is_dir(), reason='needs a folder of the system')
@pytest.mark.fault(
    'the work dir is read-only when a checkpoint is written, one file or shards',
    'training goes on, what to do is said, the next save succeeds',
)
@pytest.mark.parametrize('kind', ['file', 'sharded'])
def test_training_goes_on_when_the_work_dir_is_read_only(tmp_path, kind, in_saves):
    in_saves(functools.partial(unwritable, tmp_path / 'run'), 2)
    runner, seen, said = run(tmp_path / 'run', HOOKS[kind])
    assert len(seen) == 15
    assert 'epoch_2' in said and 'is read-only: make it writable again' in said
    left = {path.stem for path in (tmp_path / 'run').glob(f'*{runner.checkpoint_suffix}')}
    assert left == {'epoch_1', 'epoch_3'}


@pytest.mark.fault(
    'three checkpoints in a row cannot be written',
    'training ends with status 74; the last whole one stays',
)
def test_three_failures_in_a_row_end_the_run(tmp_path, checkpoint, full_disk):
    checkpoint = {**checkpoint, 'max_keep_ckpts': 1}
    full_disk(2, 3, 4)
    with pytest.raises(
        SaveError, match=r'Training ends \(3 of 3.*newest.*epoch_1\..*--resume'
    ) as end:
        run(tmp_path, checkpoint, epochs=6)
    assert end.value.exit_status == 74
    _, seen, _ = run(tmp_path, checkpoint, resume=True)
    assert seen[0][0] == 5


def test_what_a_run_that_cannot_save_leaves_to_go_on_from(tmp_path, checkpoint, full_disk):
    """A resumed run has the checkpoint that it began with; one that never saved has none."""
    run(tmp_path, checkpoint, epochs=1)
    full_disk(1)
    with pytest.raises(SaveError, match=r'go on from the newest checkpoint, .*epoch_1.*--resume'):
        run(tmp_path, checkpoint, epochs=2, resume=True)
    full_disk(1)
    with pytest.raises(SaveError, match='begin anew, as no checkpoint has been written'):
        run(tmp_path / 'other', checkpoint, epochs=1)


def test_a_disk_without_room_for_the_pointer_is_a_save_that_failed(
    tmp_path, checkpoint, monkeypatch
):
    write = Path.write_text

    def full_once(path, text, *args, **kwargs):
        if path.name == '.last_checkpoint.partial' and 'epoch_1.' in text:
            raise OSError(errno.ENOSPC, 'No space left on device')
        return write(path, text, *args, **kwargs)

    monkeypatch.setattr(Path, 'write_text', full_once)
    said = run(tmp_path, checkpoint)[2]
    assert 'last_checkpoint could not be written: the disk is full' in said
    assert 'epoch_3.' in (tmp_path / 'last_checkpoint').read_text()
    assert not list(tmp_path.glob('epoch_1.*')), 'nothing would remove it later'


def test_two_failures_in_a_row_do_not_end_it(tmp_path, checkpoint, full_disk):
    full_disk(1, 2, 4, 5)
    _, seen, said = run(tmp_path, checkpoint, epochs=6)
    assert len(seen) == 30
    assert said.count('2 of 3') == 2


def test_a_run_whose_last_checkpoint_failed_does_not_end_well(tmp_path, checkpoint, full_disk):
    full_disk(3)
    with pytest.raises(SaveError, match=r'last checkpoint could not be written.*epoch_2'):
        run(tmp_path, checkpoint)


def test_a_stop_that_cannot_save_says_so(tmp_path, checkpoint, full_disk):
    full_disk(1)
    stop = dict(by_epoch=True, max_epochs=3, stop_at_iter=2)
    with pytest.raises(SaveError, match=r'iter_2.* could not be written: .*disk is full'):
        run(tmp_path, checkpoint, train_cfg=stop)


class EndEarly(Hook):
    """Ends training as EarlyStoppingHook does, which saves nothing."""

    def after_train_epoch(self, runner):
        runner.train_loop.stop_training = runner.epoch == 1


def test_a_run_that_ends_early_without_its_last_checkpoint_does_not_end_well(
    tmp_path, checkpoint, full_disk
):
    full_disk(2)
    with pytest.raises(SaveError, match=r'last checkpoint could not be written.*epoch_1'):
        run(tmp_path, checkpoint, hooks=[EndEarly()])


@pytest.mark.parametrize('loop', ['EpochBasedTrainLoop', 'mmengine.EpochBasedTrainLoop'])
def test_a_stop_that_saves_makes_up_for_what_failed(tmp_path, checkpoint, full_disk, loop):
    full_disk(1, 2)
    hooks = [dict(type='StopAfterHook', iterations=12)] if 'mmengine' in loop else []
    stop = dict() if hooks else dict(stop_at_iter=12)
    run(tmp_path, checkpoint, hooks=hooks, train_cfg=dict(type=loop, max_epochs=3, **stop))
    assert 'iter_12.' in (tmp_path / 'last_checkpoint').read_text()


@pytest.mark.fault(
    'the work dir is moved while a run writes into it, files or shards',
    'it is made again, with an error that says so; training goes on',
)
def test_training_goes_on_when_the_work_dir_is_moved(tmp_path, checkpoint):
    class Move(Hook):
        def after_train_iter(self, runner, *args, **kwargs):
            if runner.iter == 6:
                runner.wait_for_checkpoint()
                (tmp_path / 'here').rename(tmp_path / 'there')

    runner, seen, said = run(tmp_path / 'here', checkpoint, hooks=[Move()])
    suffix = runner.checkpoint_suffix
    assert len(seen) == 15
    assert 'here is not there any more: was it moved?' in said
    assert (tmp_path / 'there' / f'epoch_1{suffix}').exists()
    assert (tmp_path / 'here' / f'epoch_2{suffix}').exists()
    assert (tmp_path / 'here' / 'last_checkpoint').read_text().endswith(f'epoch_3{suffix}')


def test_what_to_do_follows_from_the_error(tmp_path):
    for number, said in (
        (errno.EROFS, 'read-only: make it writable again'),
        (errno.EACCES, 'read-only: make it writable again'),
        (errno.EDQUOT, 'or a quota reached'),
        (errno.EIO, 'Input/output error'),
    ):
        assert said in explain_save_error(OSError(number, 'Input/output error'), tmp_path)
    torchs_own = RuntimeError(
        '[enforce fail at inline_container.cc:671] . unexpected pos 768 vs 662'
    )
    assert 'disk is full' in explain_save_error(torchs_own, tmp_path)
    assert 'was it moved' in explain_save_error(OSError(errno.EIO, 'x'), tmp_path / 'gone')


@pytest.mark.fault(
    'one rank cannot write its shard', 'the rank is named; the checkpoint before stays'
)
def test_a_rank_that_cannot_write_is_named(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise OSError(errno.EIO, 'Input/output error')

    monkeypatch.setattr(dcp.FileSystemWriter, 'write_data', broken)
    write = sharded_write(tmp_path / 'a.dcp', dict(state_dict=dict(x=torch.ones(2))))
    with pytest.raises(SaveError, match=r'a.dcp could not be written: rank 0: .*output error'):
        write()
    assert not list(tmp_path.iterdir())
