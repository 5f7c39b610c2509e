import hashlib
from collections import Counter

import numpy as np
import pytest

from memengine.datasets import Digits, Photographs
from memengine.datasets.sources import bundled as sources


def pixels(source, index):
    return np.asarray(source[index][0])


def fingerprint(source, labels=range(10)):
    """A hash of the sum of every image's pixels, with its label, in order."""
    samples = [(int(pixels(source, i).sum()), source[i][1]) for i in range(len(source))]
    lines = [f'{total}:{label}' for total, label in samples if label in labels]
    return hashlib.sha256('\n'.join(lines).encode()).hexdigest()[:16]


class TestDigits:
    @pytest.mark.parametrize(
        ('split', 'split_by', 'size', 'expected'),
        [
            ('train', 'stratified', 1257, 'f6ead828a7cf2fe1'),
            ('test', 'stratified', 540, '8ce11bc8855201d0'),
            ('train', 'order', 1257, '8ccc5ec19d5cd5a5'),
            ('test', 'order', 540, '19177567bcdb200e'),
        ],
    )
    def test_the_split_is_the_same_everywhere(self, split, split_by, size, expected):
        source = Digits(split, split_by)
        assert len(source) == size
        assert fingerprint(source) == expected

    @pytest.mark.parametrize('split_by', ['stratified', 'order'])
    def test_train_and_test_are_the_whole_set_without_overlap(self, split_by):
        from sklearn.datasets import load_digits

        whole = {np.rint(row * 255 / 16).astype(np.uint8).tobytes() for row in load_digits().data}
        assert len(whole) == 1797  # no image is there twice
        train, test = (
            {pixels(source, i).tobytes() for i in range(len(source))}
            for source in (Digits('train', split_by), Digits('test', split_by))
        )
        assert not train & test
        assert train | test == whole

    def test_stratified_holds_out_the_same_share_of_every_class(self):
        train, test = (Counter(Digits(split).labels) for split in ('train', 'test'))
        shares = [test[digit] / (train[digit] + test[digit]) for digit in range(10)]
        assert min(shares) > 0.295
        assert max(shares) < 0.305

    def test_by_order_holds_out_the_end_of_the_file(self):
        from sklearn.datasets import load_digits

        assert Digits('test', 'order').labels == load_digits().target[-540:].tolist()

    def test_images_use_the_whole_range_and_labels_are_digits(self):
        source = Digits()
        image, label = source[0]
        assert (image.mode, image.size) == ('L', (8, 8))
        assert type(label) is int
        assert sorted(set(source.labels)) == list(range(10)) == [int(c) for c in source.classes]
        assert (source.images.min(), source.images.max()) == (0, 255)

    def test_another_seed_is_another_split(self):
        assert fingerprint(Digits(seed=1)) != fingerprint(Digits(seed=0))

    @pytest.mark.parametrize(
        ('setting', 'value'), [('split', 'val'), ('split_by', 'random'), ('test_fraction', 1.0)]
    )
    def test_bad_settings_are_named(self, setting, value):
        with pytest.raises(ValueError, match=setting):
            Digits(**{setting: value})


class TestPhotographs:
    @pytest.mark.parametrize(
        ('split', 'expected'), [('train', '741ec84802a30a5d'), ('test', 'be7a4b0577f6b7de')]
    )
    def test_the_crops_are_the_same_everywhere(self, split, expected):
        # JPEG decoders may differ in a pixel, PNG decoders may not.
        exact = [i for i, name in enumerate(sources._PHOTOGRAPHS.values()) if name.endswith('png')]
        assert len(exact) == 5
        assert fingerprint(Photographs(split, crops_per_image=20), exact) == expected

    def test_train_crops_lie_in_left_halves_and_test_crops_in_right_halves(self):
        from PIL import Image

        folder = sources._bundled_folder()
        photographs = [Image.open(folder / name) for name in sources._PHOTOGRAPHS.values()]
        train, test = (Photographs(split, crops_per_image=300) for split in ('train', 'test'))
        ends, starts = [0] * 8, [10**6] * 8
        for index in range(0, 2400, 7):
            label, left, top = train._corners[index]
            ends[label] = max(ends[label], left + 32)
            box = (left, top, left + 32, top + 32)
            expected = np.asarray(photographs[label].convert('RGB').crop(box))
            np.testing.assert_array_equal(pixels(train, index), expected)

            label, left, top = test._corners[index]
            left += photographs[label].width - test._halves[label].width
            starts[label] = min(starts[label], left)
            box = (left, top, left + 32, top + 32)
            expected = np.asarray(photographs[label].convert('RGB').crop(box))
            np.testing.assert_array_equal(pixels(test, index), expected)
        for end, start, photograph in zip(ends, starts, photographs, strict=True):
            assert end <= photograph.width / 2 <= start

    def test_every_photograph_gives_as_many_colour_crops(self):
        source = Photographs(crops_per_image=3, crop_size=48)
        assert Counter(source[i][1] for i in range(len(source))) == dict.fromkeys(range(8), 3)
        assert len(source.classes) == 8
        assert {(source[i][0].mode, source[i][0].size) for i in range(24)} == {('RGB', (48, 48))}

    def test_seed_and_split_move_the_crops(self):
        one, two = Photographs(crops_per_image=5), Photographs(crops_per_image=5, seed=1)
        assert one._corners != two._corners
        assert one._corners != Photographs('test', crops_per_image=5)._corners

    def test_the_largest_crop_fits_and_a_larger_one_is_refused(self):
        assert Photographs(crop_size=225, crops_per_image=1)[1][0].size == (225, 225)
        with pytest.raises(ValueError, match=r'crop_size=226 .* chelsea\.png.* 225x300'):
            Photographs(crop_size=226)

    @pytest.mark.parametrize(
        ('setting', 'value'), [('split', 'val'), ('crop_size', 0), ('crops_per_image', 1.5)]
    )
    def test_bad_settings_are_named(self, setting, value):
        with pytest.raises(ValueError, match=setting):
            Photographs(**{setting: value})

    def test_a_photograph_that_is_not_bundled_is_named(self, monkeypatch):
        monkeypatch.setitem(sources._PHOTOGRAPHS, 'eagle', 'eagle.png')
        with pytest.raises(ImportError, match=r'eagle\.png.*install scikit-image'):
            Photographs()
