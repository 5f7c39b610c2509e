"""Torchvision's, mmcv's and one's own transforms in one list."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from memengine.datasets import PackInputs, Pipeline
from memengine.datasets.transforms.images import describe, to_bgr_array, to_torchvision

RED, GREEN, BLUE = 200, 100, 50  # an image on which swapped channels show
TO_TENSOR = [
    dict(type='torchvision/ToImage'),
    dict(type='torchvision/ToDtype', dtype='float32', scale=True),
]
MEAN, STD = [120.0, 110.0, 100.0], [60.0, 50.0, 40.0]  # of red, green, blue


def image():
    return Image.new('RGB', (6, 4), (RED, GREEN, BLUE))


def run(*transforms, img=None):
    return Pipeline(list(transforms))(
        {'img': image() if img is None else img, 'label': 1, 'index': 0}
    )


def colour(results):
    """The first pixel of what a pipeline made, as it would reach the model."""
    inputs = PackInputs(keys=())(results)['inputs']
    return inputs[:, 0, 0].tolist()


class See:
    """Keep what the transforms before it handed on."""

    def __call__(self, results):
        self.img, self.order = results['img'], results.get('channel_order')
        return results


class TestImages:
    def test_rgb_becomes_bgr_and_comes_back(self):
        array = to_bgr_array(image())
        assert array.shape == (4, 6, 3)
        assert array.dtype == np.uint8
        assert array[0, 0].tolist() == [BLUE, GREEN, RED]
        assert to_torchvision(array).getpixel((0, 0)) == (RED, GREEN, BLUE)
        assert to_torchvision(array[..., ::-1], 'rgb').getpixel((0, 0)) == (RED, GREEN, BLUE)

    def test_tensors_become_channels_last_and_come_back(self):
        tensor = torch.rand(3, 4, 6)
        array = to_bgr_array(tensor)
        np.testing.assert_array_equal(array, tensor.permute(1, 2, 0).numpy()[..., ::-1])
        assert torch.equal(to_torchvision(array), tensor)

    @pytest.mark.parametrize('shape', [(4, 6), (4, 6, 1)])
    def test_grey_stays_grey(self, shape):
        grey = np.arange(24, dtype=np.uint8).reshape(shape)
        assert to_torchvision(grey).mode == 'L'
        assert to_torchvision(grey.astype(np.float32)).shape == (1, 4, 6)
        assert np.array_equal(to_bgr_array(Image.fromarray(grey.reshape(4, 6))), grey.reshape(4, 6))
        assert to_bgr_array(torch.zeros(1, 4, 6)).shape == (4, 6)

    def test_an_array_may_be_written_into_without_changing_the_image(self):
        tensor = torch.zeros(3, 4, 6)
        to_bgr_array(tensor)[:] = 1
        to_bgr_array(tensor[:1])[:] = 1
        assert tensor.sum() == 0

    def test_other_pil_modes_become_rgb(self):
        assert to_bgr_array(image().convert('RGBA'))[0, 0].tolist() == [BLUE, GREEN, RED]

    @pytest.mark.parametrize(
        ('array', 'message'),
        [
            (np.zeros((4, 6, 4), np.uint8), r'\[H, W\] or \[H, W, 1 or 3\], got \(4, 6, 4\)'),
            (np.zeros(5, np.uint8), r'got \(5,\)'),
            (np.zeros((4, 6), np.int32), 'must be uint8 or float, got int32'),
        ],
    )
    def test_other_arrays_are_refused(self, array, message):
        with pytest.raises(ValueError, match=message):
            to_torchvision(array)

    def test_several_views_are_no_array(self):
        with pytest.raises(TypeError, match='one image, got 2 views'):
            to_bgr_array([torch.zeros(3, 4, 4)] * 2)

    @pytest.mark.parametrize(
        ('what', 'words'),
        [
            (Image.new('L', (6, 4)), 'a PIL image of 6x4 pixels (mode L)'),
            (torch.zeros(1, 4, 6), 'a float32 tensor [1, 4, 6]'),
            (np.zeros((4, 6), np.uint8), 'a uint8 array [4, 6]'),
            (None, 'a NoneType'),
        ],
    )
    def test_errors_describe_an_image(self, what, words):
        assert describe(what) == words


class TestPipeline:
    def test_transforms_run_in_order(self):
        results = run(lambda r: {**r, 'seen': [1]}, lambda r: {**r, 'seen': [*r['seen'], 2]})
        assert results['seen'] == [1, 2]

    def test_in_step_is_the_same_as_one_after_the_other(self):
        pipeline = Pipeline([dict(type='torchvision/Resize', size=[2, 2]), *TO_TENSOR])
        images = [image(), Image.new('RGB', (3, 3), (1, 2, 3))]
        together = pipeline.apply_to_all([{'img': img} for img in images])
        alone = [pipeline({'img': img}) for img in images]
        for one, two in zip(together, alone, strict=True):
            assert torch.equal(one['img'], two['img'])

    @pytest.mark.parametrize('transforms', [None, 'Resize', dict(type='PackInputs')])
    def test_no_list_is_refused(self, transforms):
        with pytest.raises(TypeError, match='pipeline must be a list of transforms'):
            Pipeline(transforms)

    def test_what_is_no_transform_is_refused(self):
        with pytest.raises(
            TypeError, match=r"pipeline\[1\] must be a dict with the key 'type', got 'Resize'"
        ):
            Pipeline([*TO_TENSOR[:1], 'Resize'])
        with pytest.raises(TypeError, match=r'train\[0\] must be a config or a callable'):
            Pipeline([object()], setting='train')

    @pytest.mark.parametrize(
        ('wrong', 'right'),
        [
            ('torchvision/RandomResizeCrop', 'torchvision/RandomResizedCrop'),
            ('ToImage', 'torchvision/ToImage'),
            ('MultiCrops', 'MultiCrop'),
            ('packinputs', 'PackInputs'),
        ],
    )
    def test_a_misspelt_transform_gives_the_nearest_name(self, wrong, right):
        with pytest.raises(
            ValueError, match=rf"pipeline\[1\]: .*named '{wrong}'; did you mean .*'{right}'"
        ):
            Pipeline([*TO_TENSOR[:1], dict(type=wrong)])

    def test_a_failing_transform_is_named_on_one_line(self):
        def fail(results):
            raise RuntimeError('first\nsecond')

        message = r'^pipeline\[1\] \(function\) failed on a uint8 tensor \[3, 4, 6\]: first second$'
        with pytest.raises(ValueError, match=message):
            run(TO_TENSOR[0], fail)

    def test_normalising_the_wrong_number_of_channels_is_named(self):
        with pytest.raises(ValueError, match=r'pipeline\[2\] \(torchvision/Normalize\) failed'):
            run(*TO_TENSOR, dict(type='torchvision/Normalize', mean=[0.5] * 2, std=[0.5] * 2))

    def test_a_transform_that_returns_nothing_is_named(self):
        with pytest.raises(
            ValueError, match=r'pipeline\[0\] \(function\) must return a dict, got NoneType'
        ):
            run(lambda results: None)


class TestPackInputs:
    def test_the_item(self):
        item = run(*TO_TENSOR, dict(type='PackInputs', keys=['label']))
        assert item.keys() == {'inputs', 'data_samples'}
        assert item['data_samples'] == {'label': 1}
        assert type(item['inputs']) is torch.Tensor

    @pytest.mark.parametrize('transforms', [[], TO_TENSOR[:1]])
    def test_what_is_no_float_tensor_is_refused_with_the_remedy(self, transforms):
        with pytest.raises(
            ValueError, match=r'PackInputs needs a float tensor .*, got a .*torchvision/ToDtype'
        ):
            run(*transforms, dict(type='PackInputs'))

    def test_a_missing_key_gives_the_nearest(self):
        with pytest.raises(
            ValueError, match="PackInputs.keys: the sample has no 'labels'; did you mean 'label'"
        ):
            run(*TO_TENSOR, dict(type='PackInputs', keys=['labels']))

    def test_keys_must_be_a_list(self):
        with pytest.raises(ValueError, match="keys must be a list of names, got 'label'"):
            Pipeline([dict(type='PackInputs', keys='label')])


class TestMmcv:
    @pytest.mark.parametrize('name', ['mmcv.Resize', 'Resize'])
    def test_it_is_found_with_and_without_its_scope(self, name):
        see = See()
        results = run(dict(type=name, scale=(12, 8)), see)
        assert see.img.shape == (8, 12, 3)
        assert results['img_shape'] == (8, 12)

    def test_it_gets_bgr_and_torchvision_after_it_gets_rgb(self):
        see = See()
        assert colour(
            run(dict(type='mmcv.Resize', scale=(12, 8)), see, *TO_TENSOR)
        ) == pytest.approx([RED / 255, GREEN / 255, BLUE / 255])
        assert see.img[0, 0].tolist() == [BLUE, GREEN, RED]

    def test_it_takes_torchvisions_tensors(self):
        flip = dict(type='mmcv.RandomFlip', prob=1.0)
        left_to_right = torch.arange(72.0).view(3, 4, 6)
        results = run(*TO_TENSOR, flip, dict(type='torchvision/Identity'), img=left_to_right)
        assert torch.equal(results['img'], left_to_right.flip(-1))

    @pytest.mark.parametrize('to_rgb', [True, False])
    @pytest.mark.parametrize(
        'rest',
        [
            [],
            [dict(type='mmcv.ImageToTensor', keys=['img'])],
            [dict(type='mmcv.RandomFlip', prob=1.0)],
            [dict(type='mmcv.RandomFlip', prob=1.0), dict(type='mmcv.ImageToTensor', keys=['img'])],
            [dict(type='torchvision/RandomHorizontalFlip', p=1.0)],
            [dict(type='torchvision/Identity'), dict(type='mmcv.RandomFlip', prob=1.0)],
        ],
    )
    def test_normalising_gives_rgb_in_the_end_whichever_order_it_had(self, to_rgb, rest):
        order = (
            slice(None) if to_rgb else slice(None, None, -1)
        )  # mmcv's mean is in the output's order
        normalise = dict(type='mmcv.Normalize', mean=MEAN[order], std=STD[order], to_rgb=to_rgb)
        expected = [(c - m) / s for c, m, s in zip((RED, GREEN, BLUE), MEAN, STD, strict=True)]
        assert colour(run(normalise, *rest)) == pytest.approx(expected, rel=1e-5)

    def test_two_normalisations_do_not_swap_the_channels(self):
        halve = dict(type='mmcv.Normalize', mean=[0.0] * 3, std=[2.0] * 3, to_rgb=True)
        assert colour(run(halve, halve)) == pytest.approx([RED / 4, GREEN / 4, BLUE / 4])

    def test_grey_images_pass_through(self):
        img = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(4, 6))
        results = run(dict(type='mmcv.RandomFlip', prob=1.0), *TO_TENSOR, img=img)
        expected = torch.arange(24.0).view(1, 4, 6).flip(-1) / 255
        torch.testing.assert_close(results['img'].as_subclass(torch.Tensor), expected)

    def test_its_wrappers_take_its_own_transforms_and_torchvisions(self):
        to_float = dict(type='memengine.torchvision/ToDtype', dtype='float32', scale=True)
        inner = [
            dict(type='RandomFlip', prob=1.0),
            dict(type='memengine.torchvision/ToImage'),
            to_float,
        ]
        results = run(dict(type='mmcv.RandomApply', transforms=inner, prob=1.0))
        assert colour(results) == pytest.approx([RED / 255, GREEN / 255, BLUE / 255])

    def test_its_errors_are_named(self):
        with pytest.raises(
            ValueError, match=r'pipeline\[0\] \(mmcv.Resize\) has no setting .scales.; did you mean'
        ):
            run(dict(type='mmcv.Resize', scales=(3, 3)))
        with pytest.raises(ValueError, match=r'pipeline\[0\] \(mmcv.CenterCrop\): AssertionError'):
            run(dict(type='mmcv.CenterCrop', crop_size=0))

    def test_its_image_reader_may_replace_the_image(self, tmp_path):
        Image.new('RGB', (6, 4), (1, 2, 3)).save(tmp_path / 'a.png')
        reader = Pipeline([dict(type='mmcv.LoadImageFromFile'), *TO_TENSOR])
        results = reader({'img': image(), 'img_path': str(tmp_path / 'a.png')})
        assert (results['img'][:, 0, 0] * 255).tolist() == pytest.approx([1, 2, 3])

    def test_its_randomness_follows_numpys_global_seed(self):
        flip = Pipeline([dict(type='mmcv.RandomFlip', prob=0.5)])
        flips = []
        for seed in (0, 0, 1, 2, 3, 4):
            np.random.seed(seed)
            flips.append(flip({'img': image()})['flip'])
        assert flips[0] == flips[1]
        assert len(set(flips)) == 2


def test_without_mmcv_the_error_says_what_to_install(monkeypatch):
    from mmengine.registry import TRANSFORMS as ROOT

    for name in [name for name in sys.modules if name.split('.')[0] == 'mmcv']:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, 'mmcv', None)
    monkeypatch.setattr(ROOT, '_module_dict', {})
    for name in ('mmcv.Resize', 'Resize'):
        with pytest.raises(ValueError, match=rf"named '{name}'.*pip install mmcv-lite"):
            Pipeline([dict(type=name, scale=(4, 4))])
    with pytest.raises(ValueError, match="did you mean 'torchvision/Resize'") as caught:
        Pipeline([dict(type='torchvision/Resiz', size=4)])
    assert 'mmcv' not in str(caught.value)
