"""Pickles that write over memory are refused before torch reads them, as older ones do not."""

import collections
import pickle
import zipfile

import pytest
import torch
from mmengine.logging import HistoryBuffer
from torch import nn

from memengine.engine.checkpoint.files import CheckpointError, safe_loading
from memengine.engine.checkpoint.vetting import _ITEM_BYTES, vet


def rewrite(path, old, new):
    """Other bytes in the archive's pickle."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, 'w') as archive:
        for name, data in parts.items():
            if name.endswith('data.pkl'):
                assert old in data
                data = data.replace(old, new)
            archive.writestr(name, data)


@pytest.mark.fault(
    'a checkpoint that writes over memory when it is read (CVE-2026-24747, torch before 2.10)',
    'refused before torch reads it',
)
@pytest.mark.parametrize(
    ('old', 'new'),
    [
        pytest.param(b'K\x06tq', b'M\xff\xfftq', id='a storage of more values than there are'),
        pytest.param(b'Rq\x0b.', b'Rq\x0bK\x00K\x01s.', id='an item of a tensor is set'),
        pytest.param(b'Rq\x0b.', b'Rq\x0b(K\x00K\x01u.', id='items of a tensor are set'),
        pytest.param(b'Rq\x0b.', b'Rr\xff\xff\xff\x00.', id='memory for 33 million objects'),
    ],
)
def test_what_writes_over_memory_is_refused(tmp_path, old, new):
    path = tmp_path / 'gift.pth'
    torch.save(torch.arange(6.0), path)
    vet(path)
    rewrite(path, old, new)
    with pytest.raises(pickle.UnpicklingError, match='damaged'):
        vet(path)
    with pytest.raises(CheckpointError, match='gift.pth'), safe_loading(path):
        torch.load(path)


@pytest.mark.filterwarnings('ignore:TypedStorage is deprecated')
def test_items_have_the_bytes_that_torch_gives_them():
    abstract = ('Storage', 'TypedStorage')
    kinds = [name for name in dir(torch) if name.endswith('Storage') and name not in abstract]
    assert len(kinds) > 10
    for name in kinds:
        item_bytes = getattr(getattr(torch, name), 'dtype', torch.uint8).itemsize
        assert _ITEM_BYTES[name.removesuffix('Storage')] == item_bytes, name


@pytest.mark.filterwarnings('error:TypedStorage is deprecated')
@pytest.mark.parametrize('archive', [True, False])
def test_what_is_all_right_is_let_pass(tmp_path, archive):
    state = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).state_dict()
    shared = torch.arange(10)
    whole = {
        'state_dict': state,
        'parts': [shared[2:4], shared[::2], torch.empty(0), torch.ones((), dtype=torch.bfloat16)],
        'parameter': nn.Parameter(torch.ones(2)),
        'counter': collections.Counter('abba'),
        'log': HistoryBuffer([1.0], [1]),
        'sparse': torch.eye(3).to_sparse(),
        'complex': torch.ones(2, dtype=torch.complex64),
    }
    torch.save(whole, tmp_path / 'a.pth', _use_new_zipfile_serialization=archive)
    with open(tmp_path / 'a.pth', 'rb') as file:
        vet(file)
        assert file.tell() == 0
    with safe_loading(tmp_path / 'a.pth'):
        read = torch.load(tmp_path / 'a.pth')
    assert read['counter'] == whole['counter'] and read['parts'][1].tolist() == [0, 2, 4, 6, 8]
