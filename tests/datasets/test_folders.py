import os
import pickle

import numpy as np
import pytest
import torchvision
from PIL import Image

from memengine.datasets import CIFAR10, CIFAR100, ImageFolder, ImageNet, UnlabelledFolder
from memengine.datasets.sources import folders
from memengine.datasets.sources.folders import load_rgb
from memengine.registry import DATASETS
from tests.datasets.toy import write_cifar
from tests.engine.malice import Attack, bare_pickle


def save(path, pixels, mode=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels, mode).save(path)


def flat(value, channels=3):
    return np.full((4, 5, channels), value, np.uint8)


class TestLoadRgb:
    def check(self, path, expected):
        image = load_rgb(str(path))
        assert image.mode == 'RGB'
        np.testing.assert_array_equal(np.asarray(image)[0, 0], expected)

    def test_grey_is_repeated(self, tmp_path):
        save(tmp_path / 'grey.png', np.full((4, 4), 90, np.uint8))
        self.check(tmp_path / 'grey.png', [90, 90, 90])

    def test_transparency_is_dropped(self, tmp_path):
        pixels = np.broadcast_to(np.array([10, 20, 30, 40], np.uint8), (4, 4, 4)).copy()
        save(tmp_path / 'rgba.png', pixels)
        self.check(tmp_path / 'rgba.png', [10, 20, 30])

    def test_a_palette_with_transparency_keeps_its_colours(self, tmp_path, recwarn):
        image = Image.fromarray(flat([200, 0, 100])).convert('P', palette=Image.Palette.ADAPTIVE)
        image.save(tmp_path / 'palette.png', transparency=b'\x80')
        self.check(tmp_path / 'palette.png', [200, 0, 100])
        assert not recwarn.list

    @pytest.mark.parametrize('suffix', ['png', 'tif'])
    def test_sixteen_bits_are_scaled_not_cut_off(self, tmp_path, suffix):
        pixels = np.array([[0, 257, 128 * 257, 65535]] * 4, np.uint16)
        Image.fromarray(pixels).save(tmp_path / f'deep.{suffix}')
        image = np.asarray(load_rgb(str(tmp_path / f'deep.{suffix}')))
        assert image[0, :, 1].tolist() == [0, 1, 128, 255]

    def test_pixels_of_unknown_range_are_an_error(self, tmp_path):
        Image.fromarray(np.ones((4, 4), np.float32)).save(tmp_path / 'float.tif')
        with pytest.raises(OSError, match='floating point'):
            load_rgb(str(tmp_path / 'float.tif'))

    def test_a_truncated_file_is_an_error(self, tmp_path):
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        for name in ('whole.jpg', 'whole.png'):
            save(tmp_path / name, noise)
            whole = (tmp_path / name).read_bytes()
            (tmp_path / name).write_bytes(whole[: len(whole) // 2])
            with pytest.raises(OSError, match='truncated'):
                load_rgb(str(tmp_path / name))

    def test_a_broken_chunk_is_an_error_of_the_same_kind(self, tmp_path):
        noise = np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8)
        save(tmp_path / 'a.png', noise)
        data = bytearray((tmp_path / 'a.png').read_bytes())
        data[data.index(b'IDAT', 100)] = 0  # the name of the second block of pixels
        (tmp_path / 'a.png').write_bytes(data)
        with pytest.raises(OSError, match='broken PNG file'):
            load_rgb(str(tmp_path / 'a.png'))

    def test_what_is_no_image_is_an_error(self, tmp_path):
        (tmp_path / 'a.png').write_bytes(b'no image')
        with pytest.raises(OSError, match='cannot identify'):
            load_rgb(str(tmp_path / 'a.png'))

    @pytest.mark.fault(
        'an image of more than 100 million pixels (a decompression bomb)',
        'not decoded; it counts as unreadable unless `max_pixels` of its source is raised',
    )
    def test_a_decompression_bomb_is_an_error_of_the_same_kind(self, tmp_path):
        for side in (10_001, 100_000):
            (tmp_path / 'bomb.ppm').write_text(f'P6 {side} {side} 255 ')
            with pytest.raises(OSError, match='more pixels than max_pixels=100000000'):
                load_rgb(str(tmp_path / 'bomb.ppm'))
        save(tmp_path / 'a.png', flat(1))
        with pytest.raises(OSError, match='more pixels than max_pixels=19'):
            load_rgb(str(tmp_path / 'a.png'), max_pixels=19)
        assert load_rgb(str(tmp_path / 'a.png'), max_pixels=20).size == (5, 4)

    def test_more_pixels_are_read_when_asked_for(self, tmp_path, monkeypatch):
        save(tmp_path / 'a.png', flat(1))
        monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 5)  # of Pillow, which is not asked
        assert load_rgb(str(tmp_path / 'a.png')).size == (5, 4)
        assert Image.MAX_IMAGE_PIXELS == 5

    @pytest.mark.fault('a pipe or a device among the images', 'an unreadable image; no waiting')
    def test_what_is_no_regular_file_is_an_error(self, tmp_path):
        os.mkfifo(tmp_path / 'pipe.png')
        (tmp_path / 'device.png').symlink_to('/dev/zero')
        for name in ('pipe.png', 'device.png'):
            with pytest.raises(OSError, match='no regular file'):
                load_rgb(str(tmp_path / name))


class TestImageFolder:
    def test_classes_are_numbered_in_sorted_order(self, tmp_path):
        save(tmp_path / 'zebra' / 'a.png', flat(2))
        save(tmp_path / 'ant' / 'deeper' / 'b.png', flat(1))
        save(tmp_path / 'ant' / 'c.png', np.full((4, 4), 7, np.uint8))
        source = DATASETS.build(dict(type='ImageFolder', root=str(tmp_path)))
        assert source.classes == ['ant', 'zebra']
        found = {source.path(i).rsplit('/', 1)[-1]: source[i] for i in range(len(source))}
        assert {name: label for name, (_, label) in found.items()} == {
            'a.png': 1,
            'b.png': 0,
            'c.png': 0,
        }
        assert {image.mode for image, _ in found.values()} == {'RGB'}

    @pytest.mark.fault(
        'GIFs, files of unknown suffixes and without any among the images',
        'left out; one warning counts them by suffix',
    )
    def test_files_of_other_kinds_are_counted_in_one_line(self, tmp_path, monkeypatch):
        said = []
        monkeypatch.setattr(folders, 'print_log', lambda text, **options: said.append(text))
        save(tmp_path / 'cat' / 'a.png', flat(0))
        for name in ('b.gif', 'c.GIF', 'notes.txt', 'README'):
            (tmp_path / 'cat' / name).write_bytes(b'')
        assert len(ImageFolder(str(tmp_path))) == 1
        where = f"1 images in '{tmp_path}'"
        kinds = '(2 .gif, 1 .txt, 1 without suffix)'
        assert said == [f'ImageFolder: {where}; 4 files of other kinds are left out {kinds}']

    def test_what_is_hidden_is_no_class_and_no_image(self, tmp_path):
        """Notebooks keep copies in ``.ipynb_checkpoints``, which would be the first class."""
        for name in ('cat/0.png', '.ipynb_checkpoints/0.png', 'cat/.ipynb_checkpoints/0.png'):
            save(tmp_path / name, flat(0))
        (tmp_path / 'cat' / '._0.png').write_bytes(b'of another system')
        source = ImageFolder(str(tmp_path))
        assert source.classes == ['cat'] and len(source) == 1
        assert len(UnlabelledFolder(str(tmp_path))) == 1

    def test_a_missing_folder_names_root(self, tmp_path):
        with pytest.raises(ValueError, match=r"no folder '.*nowhere'; set root") as caught:
            ImageFolder(str(tmp_path / 'nowhere'))
        assert '\n' not in str(caught.value)

    def test_a_folder_without_classes_names_root(self, tmp_path):
        save(tmp_path / 'a.png', flat(0))
        with pytest.raises(ValueError, match='root=.* one folder of images per class'):
            ImageFolder(str(tmp_path))

    def test_a_class_without_images_names_it(self, tmp_path):
        save(tmp_path / 'full' / 'a.png', flat(0))
        (tmp_path / 'hollow').mkdir()
        with pytest.raises(ValueError, match='hollow'):
            ImageFolder(str(tmp_path))

    @pytest.mark.fault(
        'links among the folders of images that form a loop, or lead into another class',
        'no folder is entered twice; the number of links not followed is said',
    )
    def test_no_folder_is_entered_twice(self, tmp_path, monkeypatch):
        said = []
        monkeypatch.setattr(folders, 'print_log', lambda text, **options: said.append(text))
        for name in ('ant', 'bee', 'cow'):
            save(tmp_path / 'data' / name / '1.png', flat(1))
            save(tmp_path / 'data' / name / '2.png', flat(1))
        save(tmp_path / 'elsewhere' / '3.png', flat(1))
        links = dict(up='..', other='../bee', out='../../elsewhere', twice='../../elsewhere')
        for name, target in links.items():
            (tmp_path / 'data' / 'ant' / name).symlink_to(target)
        (tmp_path / 'elsewhere' / 'home').symlink_to('../data')
        source = ImageFolder(str(tmp_path / 'data'))
        assert len(source) == 7, 'six, and the one that a link leads to'
        assert [source[i][1] for i in range(7)] == [0, 0, 0, 1, 1, 2, 2]
        assert '4 links lead to folders that are read already' in said[0]

    def test_a_class_is_no_link_to_another(self, tmp_path):
        save(tmp_path / 'ant' / '1.png', flat(1))
        (tmp_path / 'bee').symlink_to('ant')
        with pytest.raises(ValueError, match="bee' is a link to another class"):
            ImageFolder(str(tmp_path))

    def test_links_to_classes_elsewhere_are_followed(self, tmp_path):
        save(tmp_path / 'store' / 'ant' / '1.png', flat(1))
        (tmp_path / 'data').mkdir()
        (tmp_path / 'data' / 'ant').symlink_to('../store/ant')
        assert ImageFolder(str(tmp_path / 'data')).classes == ['ant']

    def test_the_limit_of_pixels_is_a_setting(self, tmp_path):
        save(tmp_path / 'train' / 'ant' / '1.png', flat(1))
        with pytest.raises(OSError, match='max_pixels=3'):
            ImageNet(str(tmp_path), max_pixels=3)[0]


class TestImageNet:
    def test_splits_are_its_folders(self, tmp_path):
        save(tmp_path / 'train' / 'n01440764' / 'a.JPEG', flat(0))
        save(tmp_path / 'train' / 'n01443537' / 'b.JPEG', flat(0))
        save(tmp_path / 'val' / 'n01440764' / 'c.JPEG', flat(0))
        assert ImageNet(str(tmp_path)).classes == ['n01440764', 'n01443537']
        assert ImageNet(str(tmp_path), 'val').path(0).endswith('val/n01440764/c.JPEG')

    def test_a_missing_split_is_named(self, tmp_path):
        (tmp_path / 'train').mkdir()
        with pytest.raises(ValueError, match=r"no folder '.*val'; set root .*train and val"):
            ImageNet(str(tmp_path), 'val')

    def test_a_wrong_split_is_named(self, tmp_path):
        with pytest.raises(ValueError, match="split must be 'train' or 'val', got 'test'"):
            ImageNet(str(tmp_path), 'test')


class TestCifar:
    @pytest.mark.parametrize(('name', 'batches'), [('CIFAR10', 5), ('CIFAR100', 1)])
    def test_its_layout_is_read(self, tmp_path, monkeypatch, name, batches):
        folder = write_cifar(tmp_path, monkeypatch, name, counts=12)
        train = DATASETS.build(dict(type=name, root=str(tmp_path), train=True))
        test = DATASETS.build(dict(type=name, root=str(tmp_path), train=False))
        assert (len(train), len(test)) == (12 * batches, 12)
        assert train.classes == [f'class{i}' for i in range(10)]
        image, label = test[3]
        assert (image.mode, image.size, label) == ('RGB', (32, 32), 3)
        file = getattr(torchvision.datasets, name).test_list[0][0]
        planes = pickle.loads((folder / file).read_bytes())['data'][3].reshape(3, 32, 32)
        np.testing.assert_array_equal(np.asarray(image), planes.transpose(1, 2, 0))

    def test_a_missing_folder_names_root(self, tmp_path):
        with pytest.raises(ValueError, match='set root to where the data lies'):
            CIFAR100(str(tmp_path / 'nowhere'))

    def test_missing_data_names_root_and_download(self, tmp_path):
        with pytest.raises(ValueError, match=r'CIFAR100 is missing .* root=.*download=True'):
            CIFAR100(str(tmp_path))

    def test_damaged_data_is_refused(self, tmp_path, monkeypatch):
        folder = write_cifar(tmp_path, monkeypatch, 'CIFAR10', counts=12)
        with open(folder / 'data_batch_1', 'ab') as file:
            file.write(b'!')
        with pytest.raises(ValueError, match='damaged'):
            CIFAR10(str(tmp_path))

    @pytest.mark.fault("CIFAR's pickles replaced by ones with code", 'not unpickled; refused')
    @pytest.mark.parametrize('file', ['data_batch_1', 'batches.meta'])
    def test_other_pickles_are_not_read(self, tmp_path, monkeypatch, file):
        folder = write_cifar(tmp_path, monkeypatch, 'CIFAR10', counts=12)
        bare_pickle(Attack(tmp_path / 'traces'), folder / file)
        with pytest.raises(ValueError, match='damaged'):
            CIFAR10(str(tmp_path))
        assert not (tmp_path / 'traces').exists()

    def test_a_failed_download_says_so(self, tmp_path, monkeypatch):
        def offline(self):
            raise OSError('no route to host')

        monkeypatch.setattr(torchvision.datasets.CIFAR10, 'download', offline)
        with pytest.raises(ValueError, match='download failed .*no route to host'):
            CIFAR10(str(tmp_path / 'new'), download=True)


def test_images_beside_the_folders_are_counted(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(folders, 'print_log', lambda text, **kwargs: said.append(text))
    for name in ('a/1.png', 'b/1.png', 'lost.png', 'also.JPG', 'notes.txt'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        save(tmp_path / name, flat(0)) if name.endswith('png') else (tmp_path / name).touch()
    assert len(ImageFolder(str(tmp_path))) == 2
    (warning,) = said
    assert warning.startswith('ImageFolder: 2 images lie beside the folders of the classes')
    assert 'also.JPG' in warning
