import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from memengine.datasets import MultiCrop
from memengine.registry import TRANSFORMS
from tests.datasets.toy import TO_TENSOR

TO_FLOAT = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])


def crop(size, **settings):
    return [dict(type='torchvision/RandomResizedCrop', size=size, **settings), *TO_TENSOR]


def constant(value):
    return [lambda results: {**results, 'img': torch.full((1, 2, 2), float(value))}]


@pytest.fixture
def photograph():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 48, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def views_of(transform, image, seed=0):
    torch.manual_seed(seed)
    return transform({'img': image, 'label': 3, 'index': 7})['img']


def test_views_come_in_the_order_of_their_groups(photograph):
    transform = TRANSFORMS.build(
        dict(
            type='MultiCrop',
            views=[
                dict(num=1, pipeline=constant(1)),
                dict(num=1, pipeline=constant(2)),
                dict(num=3, pipeline=constant(3)),
            ],
        )
    )
    views = views_of(transform, photograph)
    assert [view[0, 0, 0].item() for view in views] == [1, 2, 3, 3, 3]
    assert transform.num_views == 5


def test_every_group_has_its_own_size(photograph):
    transform = MultiCrop([dict(num=2, pipeline=crop(32)), dict(num=3, pipeline=crop(12))])
    views = views_of(transform, photograph)
    assert [tuple(view.shape) for view in views] == [(3, 32, 32)] * 2 + [(3, 12, 12)] * 3


def test_the_views_are_drawn_each_by_itself(photograph):
    views = views_of(MultiCrop([dict(num=6, pipeline=crop(16, scale=(0.2, 0.5)))]), photograph)
    for i in range(6):
        for j in range(i):
            assert not torch.equal(views[i], views[j])


def test_every_view_starts_from_the_whole_image(photograph):
    seen = []

    def look(results):
        seen.append((results['img'], results['label']))
        return {**results, 'img': torch.zeros(1, 2, 2), 'label': 99}

    transform = MultiCrop([dict(num=2, pipeline=[look]), dict(num=1, pipeline=[look])])
    results = transform({'img': photograph, 'label': 3})
    assert seen == [(photograph, 3)] * 3
    assert results['label'] == 3


def test_what_is_written_into_a_view_is_in_no_other_one(photograph):
    erase = dict(type='torchvision/RandomErasing', p=1.0, value=9, inplace=True)
    views = [dict(num=1, pipeline=[]), dict(num=1, pipeline=[erase]), dict(num=1, pipeline=[])]
    image = TO_FLOAT(photograph)
    before, erased, after = views_of(MultiCrop(views), image)
    assert torch.equal(before, TO_FLOAT(photograph)) and torch.equal(after, before)
    assert erased.max() == 9


def test_the_seed_decides_the_views(photograph):
    transform = MultiCrop([dict(num=2, pipeline=crop(16)), dict(num=2, pipeline=crop(8))])
    one, same, other = (views_of(transform, photograph, seed) for seed in (5, 5, 6))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_two_global_views_of_dino_differ_in_blur_and_solarisation(photograph):
    """Global 1 is always blurred; global 2 is solarised alone when its probabilities say so."""
    to_image, to_float = TO_TENSOR
    blur = dict(type='torchvision/GaussianBlur', kernel_size=5, sigma=(1.0, 1.0))
    solarise = dict(type='torchvision/RandomSolarize', threshold=128, p=1.0)
    never = dict(type='torchvision/RandomApply', transforms=[blur], p=0.0)
    one, two, plain = views_of(
        MultiCrop(
            [
                dict(num=1, pipeline=[to_image, blur, to_float]),
                dict(num=1, pipeline=[to_image, never, solarise, to_float]),
                dict(num=1, pipeline=[to_image, to_float]),
            ]
        ),
        photograph,
    )
    assert (one.diff().abs().mean() < 0.5 * plain.diff().abs().mean()).item()
    inverted = torch.where((plain * 255).round() >= 128, 1 - plain, plain)
    torch.testing.assert_close(two.as_subclass(torch.Tensor), inverted.as_subclass(torch.Tensor))


def test_no_local_views_is_a_choice(photograph):
    transform = MultiCrop([dict(num=2, pipeline=crop(8)), dict(num=0, pipeline=crop(4))])
    assert len(views_of(transform, photograph)) == 2


def test_mmcvs_transforms_may_make_views(photograph):
    red = Image.new('RGB', (8, 8), (255, 0, 0))
    scale = dict(type='mmcv.Normalize', mean=[0.0] * 3, std=[255.0] * 3, to_rgb=True)
    views = views_of(MultiCrop([dict(num=2, pipeline=[scale])]), red)
    assert [view[:, 0, 0].tolist() for view in views] == [[1, 0, 0]] * 2

    # ... and may come before it, leaving an array that all views share.
    whole = TRANSFORMS.build(dict(type='mmcv.Resize', scale=(4, 4)))
    results = whole({'img': np.asarray(red)[..., ::-1]})
    views = MultiCrop([dict(num=1, pipeline=[scale]), dict(num=1, pipeline=TO_TENSOR)])(results)[
        'img'
    ]
    assert [view[:, 0, 0].tolist() for view in views] == [[1, 0, 0]] * 2


@pytest.mark.parametrize(
    ('views', 'message'),
    [
        (
            [dict(num=2, pipeline=[]), dict(num=-1, pipeline=[])],
            r'MultiCrop\.views\[1\]\.num must be .* got -1',
        ),
        ([dict(num=2.5, pipeline=[])], r'MultiCrop\.views\[0\]\.num must be .* got 2.5'),
        ([dict(num=True, pipeline=[])], r'MultiCrop\.views\[0\]\.num must be .* got True'),
        ([dict(pipeline=[])], r"MultiCrop\.views\[0\] needs the setting 'num'"),
        ([dict(num=1)], r"MultiCrop\.views\[0\] needs the setting 'pipeline'"),
        (
            [dict(num=1, pipline=[])],
            r"MultiCrop\.views\[0\] has no setting 'pipline'; did you mean 'pipeline'",
        ),
        ([2], r'MultiCrop\.views\[0\] must be dict\(num=, pipeline=\), got 2'),
        ([dict(num=0, pipeline=[])], 'at least one view'),
        ([], 'at least one view'),
        (
            [dict(num=1, pipeline=crop(8, scale=(1.0, 0.4)))],
            r'MultiCrop\.views\[0\]\.pipeline\[0\] \(torchvision/.*Crop\): scale must be',
        ),
        (
            [dict(num=1, pipeline=[dict(type='torchvision/Blur')])],
            r'MultiCrop\.views\[0\]\.pipeline\[0\]: there is no transform named',
        ),
    ],
)
def test_wrong_settings_are_named(views, message):
    with pytest.raises(ValueError, match=message):
        MultiCrop(views)


@pytest.mark.parametrize('views', [2, 'views', dict(num=2, pipeline=[])])
def test_views_must_be_a_list(views):
    with pytest.raises(TypeError, match=r'MultiCrop\.views must be a list'):
        MultiCrop(views)
