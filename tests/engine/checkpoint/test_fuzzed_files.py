"""Files with code written into them at random run nothing; they are read or refused by name."""

import pickle
import random
import shutil
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from memengine.engine.checkpoint.files import CheckpointError
from memengine.engine.checkpoint.sharded import read_sharded
from memengine.engine.checkpoint.weights import read_file
from tests.engine import malice

ROUNDS = 100  # of seven kinds, as the mark below says


def mutated(chance, data, attack):
    """The bytes with some gone, doubled or changed, or with an attack in between."""
    at, length = chance.randrange(len(data)), chance.randrange(1, 20)
    code = pickle.dumps(attack, chance.randrange(6))
    return chance.choice(
        [
            data[:at],
            data[:at] + data[at + length :],
            data[:at] + data[at - length : at] + data[at:],
            data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :],
            data[:at] + code[:-1] + data[at:],
            data[:at] + code[2:-1] + b'0' + data[at:],
            data[:at] + code,
            code[:-1] + b'0' + data,
        ]
    )


def mutate_file(chance, file, attack):
    file.write_bytes(mutated(chance, file.read_bytes(), attack))


def mutate_pickle(chance, file, attack):
    """The pickle within an archive of torch's."""
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, 'w') as archive:
        for name, data in parts.items():
            changed = mutated(chance, data, attack) if name.endswith('data.pkl') else data
            archive.writestr(name, changed)


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp('whole')
    state = {'a': torch.arange(6.0), 'b': torch.ones(2, 2, dtype=torch.int8)}
    torch.save({'meta': {'iter': 3}, 'state_dict': state}, folder / 'a.pth')
    torch.save({'state_dict': state}, folder / 'old.pth', _use_new_zipfile_serialization=False)
    save_file(state, folder / 'a.safetensors')
    malice.write_sharded(folder / 'a.dcp', state)
    return folder


@pytest.mark.slow
@pytest.mark.fault(
    'checkpoints changed at random, with code written into them',
    'none is run; each file is read or refused with a sentence',
    '0 of 700',
)
@pytest.mark.parametrize(
    ('name', 'mutate'),
    [
        ('a.pth', mutate_file),
        ('a.pth', mutate_pickle),
        ('old.pth', mutate_file),
        ('a.safetensors', mutate_file),
        ('a.dcp/.metadata', mutate_file),
        ('a.dcp/run.pth', mutate_pickle),
        ('a.dcp/__0_0.distcp', mutate_file),
    ],
)
def test_nothing_runs(tmp_path, whole, name, mutate, monkeypatch):
    monkeypatch.setenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')
    attack, refused = malice.Attack(tmp_path / 'traces'), []
    for seed in range(ROUNDS):
        shutil.copytree(whole, tmp_path / 'copy', dirs_exist_ok=True)
        mutate(random.Random(seed), tmp_path / 'copy' / name, attack)
        try:
            if '.dcp' in name:
                read_sharded(tmp_path / 'copy' / 'a.dcp')
            else:
                read_file(str(tmp_path / 'copy' / name))
        except CheckpointError as error:
            refused.append(str(error))
        assert not (tmp_path / 'traces').exists(), seed
    assert len(refused) > ROUNDS / 4
    assert not [text for text in refused if 'weights_only' in text], 'advice to read unsafely'
