"""Checksums: every flipped bit is found, and files of others are read as they are."""

import contextlib
import random
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file

from memengine.engine.checkpoint.checksums import CHECKSUMS_FILE, verify
from memengine.engine.checkpoint.convert import convert
from memengine.engine.checkpoint.files import CheckpointError, DamagedError, read_pickle
from memengine.engine.checkpoint.saving import write_file
from memengine.engine.checkpoint.sharded_saving import sharded_write
from memengine.engine.cli.main import main
from tests.engine.toy import params, toy_runner

STATE = dict(
    meta=dict(iter=7, epoch=1),
    state_dict={f'layer.{i}.weight': torch.arange(400.0) * i for i in range(4)},
    optimizer=dict(state={0: dict(exp_avg=torch.ones(400))}, param_groups=[dict(params=[0])]),
)


def checkpoints(folder):
    write_file(folder / 'a.pth', STATE)
    sharded_write(folder / 'a.dcp', STATE)()
    convert(folder / 'a.pth', folder / 'a.safetensors')
    return folder / 'a.pth', folder / 'a.dcp'


def flip(file, at, bit):
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << bit
    file.write_bytes(content)


@pytest.mark.fault(
    'one flipped bit, anywhere in a checkpoint', 'found before it is read', '470 of 470 flips'
)
def test_every_flipped_bit_is_found(tmp_path):
    single, folder = checkpoints(tmp_path)
    listed = folder / CHECKSUMS_FILE
    end = single.stat().st_size
    bits = [(single, single, at) for at in range(end - 64, end)]  # the checksum, and about it
    bits += [(folder, listed, at) for at in range(listed.stat().st_size)]
    draw = random.Random(0)
    others = [(single, single), *((folder, file) for file in folder.iterdir() if file != listed)]
    while len(bits) < 470:
        path, file = others[len(bits) % len(others)]
        bits.append((path, file, draw.randrange(file.stat().st_size)))
    for path, file, at in bits:
        bit = draw.randrange(8)
        flip(file, at, bit)
        with pytest.raises(DamagedError):
            verify(path)
        flip(file, at, bit)
    assert len(bits) == 470
    assert verify(single) and verify(folder), 'all was taken back'


def test_a_flipped_bit_in_safetensors_is_found(tmp_path):
    checkpoints(tmp_path)
    path = tmp_path / 'a.safetensors'
    assert verify(path)
    assert load_file(path).keys() == STATE['state_dict'].keys()
    flip(path, -5, 3)
    with pytest.raises(DamagedError, match='its checksum is'):
        convert(path, tmp_path / 'b.pth')


def test_what_is_missing_from_a_folder_is_named(tmp_path):
    _, folder = checkpoints(tmp_path)
    (folder / '__0_0.distcp').unlink()
    with pytest.raises(DamagedError, match=r'there is no __0_0.distcp'):
        verify(folder)
    (folder / CHECKSUMS_FILE).write_text('00000000  ../a.pth\n')
    with pytest.raises(DamagedError, match='in the line'):
        verify(folder)


def test_ranks_share_the_files_of_a_folder(tmp_path):
    _, folder = checkpoints(tmp_path)
    (folder / 'run.pth').write_bytes(b'damaged')
    (folder / '.metadata').write_bytes(b'damaged')
    names = [line.split()[1] for line in (folder / CHECKSUMS_FILE).read_text().splitlines()]
    assert names == ['.metadata', '__0_0.distcp', 'run.pth']
    assert verify(folder, slice(1, None, 2)), 'its share is whole'
    with pytest.raises(DamagedError, match=r'\.metadata is damaged'):
        verify(folder, slice(0, None, 2))


def test_others_read_our_files_and_we_theirs(tmp_path):
    single, _ = checkpoints(tmp_path)
    assert zipfile.ZipFile(single).testzip() is None
    for mapped in (False, True):
        assert torch.equal(
            torch.load(single, mmap=mapped)['state_dict']['layer.2.weight'],
            STATE['state_dict']['layer.2.weight'],
        )
    torch.save(STATE, tmp_path / 'theirs.pth')
    torch.save(STATE, tmp_path / 'old.pth', _use_new_zipfile_serialization=False)
    save_file(STATE['state_dict'], tmp_path / 'theirs.safetensors')
    for name in ('theirs.pth', 'old.pth', 'theirs.safetensors'):
        assert not verify(tmp_path / name)
        convert(tmp_path / name, tmp_path / f'{name}.dcp')
        assert verify(tmp_path / f'{name}.dcp')


def test_a_run_reads_a_checkpoint_without_checksum_and_says_so(tmp_path):
    runner = toy_runner(tmp_path / 'run')
    torch.save(dict(state_dict=params(runner)), tmp_path / 'theirs.pth')
    said = []
    runner.logger.info = said.append
    runner.load_checkpoint(str(tmp_path / 'theirs.pth'))
    assert 'theirs.pth has no checksum: it is read as it is' in said[0]


def test_what_is_damaged_and_has_no_checksum_is_still_one_kind_of_error(tmp_path):
    torch.save(STATE, tmp_path / 'a.pth')
    content, draw, refused = (tmp_path / 'a.pth').read_bytes(), random.Random(0), 0
    for at in draw.sample(range(1000), 60):  # most of its pickle
        (tmp_path / 'a.pth').write_bytes(content[:at] + b'\xf7' + content[at + 1 :])
        with contextlib.suppress(CheckpointError):
            read_pickle(tmp_path / 'a.pth')
            refused -= 1
        refused += 1
    assert refused > 10


def test_the_command_says_which_are_whole(tmp_path, capsys):
    checkpoints(tmp_path)
    torch.save(STATE, tmp_path / 'theirs.pth')
    capsys.readouterr()
    assert main(['verify', str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert [line.split(': ')[1] for line in said.splitlines()] == ['whole'] * 3 + ['no checksum']
    flip(tmp_path / 'a.dcp' / 'run.pth', 100, 0)
    assert main(['verify', str(tmp_path)]) == main(['verify', str(tmp_path / 'a.dcp')]) == 1
    assert 'a.dcp: damaged' in capsys.readouterr().out
    assert main(['verify', str(tmp_path / 'a.pth')]) == 0
    (tmp_path / 'none').mkdir()
    for nothing in ('none', 'missing.pth'):
        assert main(['verify', str(tmp_path / nothing)]) == 1
        assert 'PATH: there is no checkpoint' in capsys.readouterr().err
