"""A run goes on from the newest checkpoint that is whole, never from scratch beside some."""

import shutil

import pytest
import torch

from memengine.engine.checkpoint.files import CheckpointError, DamagedError
from memengine.engine.checkpoint.latest import find_latest, newest_first
from memengine.engine.checkpoint.saving import write_file
from memengine.engine.checkpoint.sharded_saving import sharded_write
from tests.engine.toy import Losses, toy_runner

HOOKS = {
    '.pth': dict(checkpoint=dict(interval=1)),
    '.dcp': dict(checkpoint=dict(interval=1, sharded=True)),
}


@pytest.fixture(scope='module', params=HOOKS)
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp('trained') / 'run'
    toy_runner(folder, default_hooks=HOOKS[request.param]).train()
    return folder, request.param


@pytest.fixture
def run(trained, tmp_path):
    """A run of three epochs, of which each test has a copy, and the suffix of its checkpoints."""
    folder, suffix = trained
    copy = shutil.copytree(folder, tmp_path / 'run')
    (copy / 'last_checkpoint').write_text(str(copy / f'epoch_3{suffix}'))
    return copy, suffix


def damage(checkpoint):
    """Flip a bit in the middle of a tensor, or of the largest file."""
    files = [checkpoint] if checkpoint.is_file() else [*checkpoint.iterdir()]
    file = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def resume(folder, suffix):
    losses, said = Losses(), []
    runner = toy_runner(folder, losses, resume=True, default_hooks=HOOKS[suffix])
    runner.logger.warning = said.append
    runner.train()
    return [iteration for iteration, _ in losses.seen], '\n'.join(map(str, said))


@pytest.mark.fault(
    'the newest checkpoint is damaged', '`--resume` goes on from the one before, with a warning'
)
def test_a_damaged_newest_one_falls_back_to_the_one_before(run):
    folder, suffix = run
    damage(folder / f'epoch_3{suffix}')
    trained, said = resume(folder, suffix)
    assert trained == [10, 11, 12, 13, 14]
    assert f'epoch_3{suffix}' in said and 'going on from the checkpoint before it' in said


def test_two_damaged_ones_fall_back_further_and_none_is_no_scratch(run):
    folder, suffix = run
    damage(folder / f'epoch_3{suffix}')
    damage(folder / f'epoch_2{suffix}')
    copy = shutil.copytree(folder, folder / 'copy')
    assert resume(copy, suffix)[0][0] == 5
    damage(folder / f'epoch_1{suffix}')
    with pytest.raises(CheckpointError, match=r'none of the 3 checkpoint.*--resume PATH'):
        resume(folder, suffix)


@pytest.mark.fault(
    '`last_checkpoint` is missing, empty or names what is gone',
    'the newest checkpoint beside it is found by looking',
)
@pytest.mark.parametrize('pointer', ['missing', 'empty', 'damaged', 'of one that is gone'])
def test_the_newest_is_found_by_looking(run, pointer):
    folder, suffix = run
    last = folder / 'last_checkpoint'
    begin = 15
    if pointer == 'missing':
        last.unlink()
    elif pointer == 'of one that is gone':
        gone = folder / f'epoch_3{suffix}'
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        begin = 10
    else:
        last.write_bytes(b'' if pointer == 'empty' else b'/\xff\0')
    assert [*resume(folder, suffix)[0], 15][0] == begin


def test_neither_the_best_nor_what_cannot_be_read_is_gone_on_from(run):
    folder, suffix = run
    (folder / 'last_checkpoint').unlink()
    best = dict(meta=dict(iter=45), state_dict=dict(x=torch.ones(1)))
    if suffix == '.pth':
        write_file(folder / 'best_epoch_9.pth', best)
    else:
        sharded_write(folder / 'best_epoch_9.dcp', best)()
    (folder / 'epoch_4.pth').write_bytes(b'no checkpoint')
    warned = []
    names = [path.name for path in newest_first(folder, warn=warned.append)]
    assert names == [*(f'epoch_{i}{suffix}' for i in (3, 2, 1)), 'epoch_4.pth']
    assert len(warned) == 1 and 'epoch_4.pth' in warned[0]


@pytest.mark.fault(
    'none of the checkpoints in a work dir can be read, with `last_checkpoint` or without',
    '`--resume` ends with an error that says how many there are; nothing begins from scratch',
)
@pytest.mark.parametrize('pointer', ['there', 'missing'])
def test_a_run_whose_checkpoints_none_can_be_read_does_not_begin_again(run, pointer):
    folder, suffix = run
    for number in (1, 2, 3):
        checkpoint = folder / f'epoch_{number}{suffix}'
        file = checkpoint if checkpoint.is_file() else checkpoint / 'run.pth'
        content = bytearray(file.read_bytes())
        content[content.index(b'optimizer')] ^= 1  # in its pickle: no state of that name is left
        file.write_bytes(content)
    if pointer == 'missing':
        (folder / 'last_checkpoint').unlink()
    with pytest.raises(CheckpointError, match=r'none of the 3 checkpoint.*--resume PATH'):
        resume(folder, suffix)


def test_the_folder_of_a_run_stands_for_its_newest_that_is_whole(run, tmp_path):
    folder, suffix = run
    damage(folder / f'epoch_3{suffix}')
    losses, options = Losses(), dict(resume=True, default_hooks=HOOKS[suffix])
    toy_runner(tmp_path / 'other', losses, load_from=str(folder), **options).train()
    assert [iteration for iteration, _ in losses.seen] == [10, 11, 12, 13, 14]
    (tmp_path / 'empty').mkdir()
    with pytest.raises(CheckpointError, match='no checkpoint of a run in .*empty'):
        toy_runner(tmp_path / 'other', load_from=str(tmp_path / 'empty'), **options).train()


def test_one_that_the_user_names_is_that_one_or_none(run):
    folder, suffix = run
    damage(folder / f'epoch_2{suffix}')
    runner = toy_runner(folder, resume=True, load_from=str(folder / f'epoch_2{suffix}'))
    with pytest.raises(DamagedError, match='is damaged: its checksum'):
        runner.train()


def test_a_pointer_beside_nothing_is_no_reason_to_start_from_scratch(tmp_path):
    assert find_latest(tmp_path) is None
    (tmp_path / 'last_checkpoint').write_text('/gone/epoch_3.dcp')
    with pytest.raises(CheckpointError, match=r'epoch_3.dcp, which is not there.*--resume PATH'):
        find_latest(tmp_path)


def test_last_checkpoint_may_be_remote(tmp_path):
    (tmp_path / 'last_checkpoint').write_text('s3://bucket/epoch_3.pth')
    assert find_latest(tmp_path) == 's3://bucket/epoch_3.pth'
