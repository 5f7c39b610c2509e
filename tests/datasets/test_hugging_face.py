"""Data sets of Hugging Face, by a stand-in for the package: rows in lists, with its functions."""

import io
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from memengine.datasets import HuggingFace, ImageDataset
from tests.datasets.toy import TO_TENSOR


def png(value):
    file = io.BytesIO()
    Image.fromarray(np.full((4, 5), value, np.uint8)).save(file, 'png')
    return file.getvalue()


class Rows:
    """What is used of ``datasets.Dataset``."""

    def __init__(self, columns, features=None, undecoded=()):
        self.columns, self.undecoded = columns, undecoded
        self.features = features or dict.fromkeys(columns)
        self.column_names = list(columns)

    def cast_column(self, name, feature):
        assert feature == 'undecoded'
        return Rows(self.columns, self.features, (name,))

    def __len__(self):
        return len(self.columns['image'])

    def __getitem__(self, key):
        if isinstance(key, str):
            assert key != 'image', 'all images are decoded at once'
            return self.columns[key]
        assert self.undecoded == ('image',)
        return {name: values[key] for name, values in self.columns.items()}


@pytest.fixture
def rows(tmp_path, monkeypatch):
    file = tmp_path / 'two.png'
    file.write_bytes(png(20))
    columns = {
        'image': [
            {'bytes': png(10), 'path': None},
            {'bytes': None, 'path': str(file)},
            {'bytes': b'torn', 'path': 'x'},
        ],
        'label': [1, 0, 1],
        'text': ['one', ['two', 'another'], 'three'],
        'word': ['a', 'b', 'c'],
    }
    made = Rows(columns, {**dict.fromkeys(columns), 'label': SimpleNamespace(names=['no', 'yes'])})
    module = SimpleNamespace(
        Image=lambda decode: 'decoded' if decode else 'undecoded',
        load_dataset=lambda path, name, split: {('hub/set', None, 'train'): made}[
            path, name, split
        ],
        load_from_disk=lambda path: {'test': made},
    )
    monkeypatch.setitem(sys.modules, 'datasets', module)
    return made


def test_a_data_set_by_name(rows):
    source = HuggingFace('hub/set', label='label', caption='text')
    assert (len(source), source.labels, source.classes) == (3, [1, 0, 1], ['no', 'yes'])
    for index, value in enumerate((10, 20)):
        image, label = source[index]
        assert (image.mode, image.size, image.getpixel((0, 0))) == ('RGB', (5, 4), (value,) * 3)
        assert label == source.labels[index]
    assert [source.captions(index) for index in (0, 1)] == [['one'], ['two', 'another']]


def test_what_is_no_text_is_no_caption(rows):
    rows.columns['text'][:2] = [None, ['two', None, ' ']]
    source = HuggingFace('hub/set', caption='text')
    assert [source.captions(index) for index in (0, 1)] == [[], ['two']]


def test_a_folder_and_its_splits(rows, tmp_path):
    (tmp_path / 'dataset_dict.json').write_text('{}')
    source = HuggingFace(str(tmp_path), split='test')
    assert (source.labels, source.classes, source.captions(0)) == ([-1] * 3, [], [])
    with pytest.raises(ValueError, match=r"no split 'train' \(it has test\)"):
        HuggingFace(str(tmp_path))


def test_a_broken_image_is_named(rows):
    source = dict(type='HuggingFace', path='hub/set')
    data = ImageDataset(source=source, pipeline=[*TO_TENSOR, dict(type='PackInputs')])
    assert data[1]['inputs'].shape == (3, 4, 5)
    with pytest.raises(ValueError, match='cannot read sample 2 of HuggingFace'):
        data[2]


@pytest.mark.parametrize(
    ('options', 'said'),
    [
        (dict(image='img'), "image: there is no column 'img'.*known: image, label, text, word"),
        (dict(label='lable'), "label: there is no column 'lable'.*'label'"),
        (dict(label='word'), "label: column 'word' must hold whole numbers, got 'a'"),
    ],
)
def test_wrong_columns_are_refused(rows, options, said):
    with pytest.raises(ValueError, match=said):
        HuggingFace('hub/set', **options)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, 'datasets', None)
    with pytest.raises(ImportError, match='pip install datasets'):
        HuggingFace('hub/set')
