"""The two parts of a source hold each sample once."""

import numpy as np
import pytest
from PIL import Image

from memengine.datasets import ImageDataset, ImageFolder, Split, UnlabelledFolder
from tests.datasets.test_folders import save
from tests.datasets.toy import TO_TENSOR, Colours, write_folder


class Labelled(Colours):
    def __init__(self, labels):
        super().__init__(len(labels))
        self.labels = labels


def rows(source, **options):
    return [Split(source, part, **options).rows for part in ('train', 'held_out')]


def test_each_class_gives_its_share():
    labels = [0] * 50 + [1] * 20 + [2] * 2 + [3]
    train, held_out = rows(Labelled(labels), share=0.1)
    assert sorted(train + held_out) == list(range(73))
    assert np.bincount([labels[row] for row in held_out], minlength=4).tolist() == [5, 2, 1, 0]
    assert rows(Labelled(labels), share=0.1) == [train, held_out]
    assert rows(Labelled(labels), share=0.1, seed=1)[1] != held_out
    fewer = rows(Labelled(labels[:70]), share=0.1)[1]
    assert fewer == [row for row in held_out if row < 70]


def test_many_classes_are_found_in_one_pass():
    """A pass for each class of ImageNet took minutes."""

    class Counted(list):
        passes = 0

        def __iter__(self):
            self.passes += 1
            return super().__iter__()

    source = Labelled(Counted([*range(50), *range(50)]))
    Split(source, 'train', share=0.5)
    assert source.labels.passes <= 2


def test_without_labels_the_share_is_one_of_all():
    train, held_out = rows(Colours(40), share=0.25)
    assert len(held_out) == 10 and sorted(train + held_out) == list(range(40))
    assert held_out != list(range(30, 40))


def test_a_part_of_a_folder(tmp_path):
    write_folder(tmp_path, per_class=4)
    listed = tmp_path / 'list.txt'
    listed.write_text('cat/1.png\n\ndog/3.png\n')
    source = dict(type='ImageFolder', root=str(tmp_path))
    part = Split(source, 'held_out', files=str(listed))
    assert part.classes == ['cat', 'dog'] and part.labels == [0, 1]
    assert [part.path(row)[-9:] for row in range(2)] == ['cat/1.png', 'dog/3.png']
    assert part[1][1] == 1
    assert len(Split(source, 'train', files=['cat/1.png', 'dog/3.png'])) == 6
    data = ImageDataset(
        source=dict(type='Split', source=source, part='train', share=0.5),
        pipeline=[*TO_TENSOR, dict(type='PackInputs')],
    )
    assert len(data) == 4 and data.sample_name(0).endswith(".png'")


@pytest.mark.parametrize(
    ('options', 'said'),
    [
        (dict(part='test', share=0.1), "'train' or 'held_out', got 'test'"),
        (dict(part='train'), 'either share or files'),
        (dict(part='train', share=0.1, files=[]), 'either share or files'),
        (dict(part='train', share=1.0), 'between 0 and 1, got 1.0'),
        (dict(part='held_out', files=[]), "nothing of the 4 samples is left for 'held_out'"),
        (dict(part='train', files=['0.png']), "'0.png' is the end of 2 paths"),
        (dict(part='train', files=['cow/0.png']), "'cow/0.png' is the end of 0 paths"),
        (dict(part='train', files='nowhere.txt'), "no file 'nowhere.txt'"),
    ],
)
def test_what_cannot_be_split_is_refused(tmp_path, options, said):
    write_folder(tmp_path)
    with pytest.raises(ValueError, match=said):
        Split(ImageFolder(str(tmp_path)), **options)


def test_files_of_a_source_without_any_are_refused():
    with pytest.raises(
        ValueError, match='files needs a source whose images are files, not Colours'
    ):
        Split(Colours(), 'train', files=['a'])


def test_a_folder_without_labels(tmp_path):
    for name in ('b.png', 'a/deep/c.PNG', 'a/d.jpg'):
        save(tmp_path / name, np.zeros((3, 4, 3), np.uint8))
    (tmp_path / 'a/notes.txt').write_text('no image')
    (tmp_path / 'a/loop').symlink_to(tmp_path)
    source = UnlabelledFolder(str(tmp_path))
    assert [source.path(row)[len(str(tmp_path)) + 1 :] for row in range(len(source))] == [
        'b.png',
        'a/d.jpg',
        'a/deep/c.PNG',
    ]
    image, label = source[1]
    assert isinstance(image, Image.Image) and label == -1 and source.classes == []
    part = Split(source, 'train', share=0.4)
    assert part.labels == [-1, -1] and part.captions(0) == []


def test_a_folder_without_images_is_refused(tmp_path):
    with pytest.raises(ValueError, match='there is no .jpg.* in root'):
        UnlabelledFolder(str(tmp_path))
    with pytest.raises(ValueError, match='there is no folder'):
        UnlabelledFolder(str(tmp_path / 'nowhere'))
