"""Webdataset's tar files, read by number."""

import io
import tarfile

import numpy as np
import pytest
from PIL import Image

from memengine.datasets import ImageDataset, Shards
from tests.datasets.toy import TO_TENSOR


def png(value):
    file = io.BytesIO()
    Image.fromarray(np.full((4, 5, 3), value, np.uint8)).save(file, 'png')
    return file.getvalue()


def write(path, files, mode='w'):
    with tarfile.open(path, mode) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def two_shards(folder):
    write(
        folder / 'train-00.tar',
        {
            '000.png': png(10),
            '000.txt': b'a dark square\nan image\n',
            '000.cls': b'1\n',
            'in/001.cls': b'0',
            'in/001.PNG': png(20),
            'notes.txt': b'no image',
        },
    )
    write(folder / 'train-01.tar', {'000.png': png(30), '000.cls': b'2', '000.json': b'{}'})
    return str(folder / 'train-{00..01}.tar')


def test_samples_of_several_shards(tmp_path):
    source = Shards(two_shards(tmp_path))
    assert len(source) == 3 and source.labels == [1, 0, 2] and source.classes == ['0', '1', '2']
    values = [np.asarray(source[row][0])[0, 0].tolist() for row in (2, 0, 1)]
    assert values == [[30] * 3, [10] * 3, [20] * 3]
    assert source.captions(0) == ['a dark square', 'an image'] and source.captions(2) == []
    assert source.path(1) == f'{tmp_path}/train-00.tar:in/001'


def test_shards_are_named_by_range_pattern_or_list(tmp_path):
    two_shards(tmp_path)
    for shards in (f'{tmp_path}/train-*.tar', [f'{tmp_path}/train-0{n}.tar' for n in (0, 1)]):
        assert len(Shards(shards, classes=['a', 'b', 'c'])) == 3


def test_images_that_are_no_samples_by_their_names_are_counted(tmp_path, monkeypatch):
    said = []
    log = 'memengine.datasets.sources.shards.print_log'
    monkeypatch.setattr(log, lambda text, **options: said.append(text))
    named = {'a.png': png(1), 'a.mask.png': png(2), 'c.json': b'{}'}
    write(tmp_path / 'a.tar', named)
    assert len(Shards(str(tmp_path / 'a.tar'))) == 1 and not said
    write(tmp_path / 'b.tar', {**named, 'b.0.png': png(3), 'b.1.png': png(4), 'b.1.cls': b'1'})
    assert len(Shards(str(tmp_path / 'b.tar'))) == 1
    (warning,) = said
    assert warning.startswith('Shards: 2 images are left out') and '/b.tar:b.0.png' in warning


def test_a_broken_sample_is_skipped_and_counted(tmp_path):
    files = {f'{number:02d}.png': png(number) for number in range(20)}
    write(tmp_path / 'a.tar', {**files, '03.png': b'torn'})
    pipeline = [*TO_TENSOR, dict(type='PackInputs')]
    source = dict(type='Shards', shards=str(tmp_path / 'a.tar'))
    data = ImageDataset(source=source, pipeline=pipeline, on_error='skip')
    assert data[3]['data_samples'] == {'label': -1, 'index': 4} and data.skipped == 1
    with pytest.raises(ValueError, match=r"a.tar:03': cannot identify"):
        ImageDataset(source=source, pipeline=pipeline)[3]


@pytest.mark.parametrize(
    ('shards', 'options', 'said'),
    [
        ('none-{0..1}.tar', {}, "there is no file '.*none-0.tar'"),
        ('none-*.tar', {}, 'there is no file'),
        ('zip.tar', {}, 'no whole tar file without compression'),
        ('empty.tar', {}, 'there is no .jpg'),
        ('label.tar', {}, "x.cls must hold a number, got 'cat'"),
        ('train-00.tar', dict(classes=['a']), 'classes has 1 names, but there is a label 1'),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, shards, options, said):
    two_shards(tmp_path)
    write(tmp_path / 'zip.tar', {'a.png': png(1)}, 'w:gz')
    write(tmp_path / 'empty.tar', {'a.txt': b''})
    write(tmp_path / 'label.tar', {'x.png': png(1), 'x.cls': b'cat'})
    with pytest.raises(ValueError, match=said):
        Shards(str(tmp_path / shards), **options)


@pytest.mark.parametrize('shards', ['pipe:cat a.tar', 's3://bucket/a.tar'])
def test_what_is_not_local_is_refused(shards):
    with pytest.raises(ValueError, match='from local files only'):
        Shards(shards)
