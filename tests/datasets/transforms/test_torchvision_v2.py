import inspect
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from memengine.datasets.transforms import Pipeline, TorchvisionTransform
from memengine.registry import TRANSFORMS

# Arguments for the transforms that need some.
REQUIRED = {
    'AutoAugment': dict(policy='cifar10'),
    'CenterCrop': dict(size=8),
    'ColorJitter': dict(brightness=0.5),
    'Compose': dict(transforms=[dict(type='torchvision/CenterCrop', size=8)]),
    'FiveCrop': dict(size=8),
    'GaussianBlur': dict(kernel_size=3),
    'Lambda': dict(lambd=lambda image: image),
    'JPEG': dict(quality=50),
    'LinearTransformation': dict(
        transformation_matrix=torch.eye(3 * 32 * 24), mean_vector=torch.zeros(3 * 32 * 24)
    ),
    'Normalize': dict(mean=[0.5], std=[0.5]),
    'Pad': dict(padding=2),
    'RandomAdjustSharpness': dict(sharpness_factor=2),
    'RandomAffine': dict(degrees=10),
    'RandomApply': dict(transforms=[dict(type='torchvision/Pad', padding=2)]),
    'RandomChoice': dict(transforms=[dict(type='torchvision/Pad', padding=2)]),
    'RandomCrop': dict(size=8),
    'RandomOrder': dict(transforms=[dict(type='torchvision/Pad', padding=2)]),
    'RandomPosterize': dict(bits=3),
    'RandomResize': dict(min_size=8, max_size=16),
    'RandomResizedCrop': dict(size=8),
    'RandomRotation': dict(degrees=10),
    'RandomShortestSize': dict(min_size=8),
    'RandomSolarize': dict(threshold=0.5),
    'Resize': dict(size=[6, 8]),
    'ScaleJitter': dict(target_size=[32, 32]),
    'TenCrop': dict(size=8),
    'ToDtype': dict(dtype='float64'),
}
# They take an 8-bit or a PIL image, not the float tensor that the others are tried on.
ON_BYTES = {'AugMix', 'AutoAugment', 'JPEG', 'RandAugment', 'RandomPosterize', 'TrivialAugmentWide'}
ON_PIL = {'PILToTensor', 'RandomEqualize'}
NOT_FOR_IMAGES = {
    *('CutMix', 'MixUp', 'UniformTemporalSubsample', 'SetClampingMode', 'ConvertBoundingBoxFormat'),
    *('ClampBoundingBoxes', 'SanitizeBoundingBoxes', 'ClampKeyPoints', 'SanitizeKeyPoints'),
    'RandomIoUCrop',
}
NAMES = sorted(
    name
    for name, value in vars(v2).items()
    if inspect.isclass(value) and issubclass(value, v2.Transform) and name != 'Transform'
)


def make(name, **arguments):
    return Pipeline([dict(type=f'torchvision/{name}', **arguments)]).steps[0][1]


def test_all_of_torchvisions_transforms_are_there():
    assert len(NAMES) > 50
    registered = {name for name in TRANSFORMS.module_dict if name.startswith('torchvision/')}
    assert registered == {f'torchvision/{name}' for name in NAMES} | {
        f'torchvision/{name}' for name in ('Compose', 'RandomApply', 'RandomChoice', 'RandomOrder')
    }


@pytest.mark.filterwarnings('ignore:.*deprecated')  # torchvision's own, of ToTensor and JPEG
@pytest.mark.parametrize('name', [name for name in NAMES if name not in NOT_FOR_IMAGES])
def test_it_does_what_torchvisions_does(name):
    arguments = REQUIRED.get(name, {})
    image = torch.rand(3, 32, 24, generator=torch.Generator().manual_seed(0))
    if name in ON_BYTES:
        image = (image * 255).to(torch.uint8)
    elif name in ON_PIL:
        image = v2.functional.to_pil_image(image)
    transform = make(name, **arguments)
    torch.manual_seed(3)
    actual = transform({'img': image, 'label': 1})
    torch.manual_seed(3)
    expected = transform.transform(image)
    assert type(transform.transform) is getattr(v2, name)
    assert actual['label'] == 1
    assert type(actual['img']) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(actual['img'], expected)
    elif isinstance(expected, Image.Image):
        assert np.array_equal(np.asarray(actual['img']), np.asarray(expected))


@pytest.mark.parametrize('name', sorted(NOT_FOR_IMAGES & set(NAMES)))
def test_what_would_do_nothing_to_an_image_is_refused(name):
    arguments = {
        'ConvertBoundingBoxFormat': dict(format='XYXY'),
        'UniformTemporalSubsample': dict(num_samples=2),
    }
    arguments['SetClampingMode'] = dict(clamping_mode='soft')
    with pytest.raises(ValueError, match=f"{name} works on .*, not on a sample's image"):
        make(name, **arguments.get(name, {}))


@pytest.mark.parametrize(
    'mode', ['nearest', 'nearest_exact', 'nearest-exact', 'bilinear', 'bicubic']
)
def test_interpolation_is_given_as_a_string(mode):
    transform = make('Resize', size=8, interpolation=mode).transform
    assert transform.interpolation is v2.InterpolationMode(mode.replace('_', '-'))


def test_types_and_policies_are_given_as_strings():
    assert make('ToDtype', dtype='float16').transform.dtype is torch.float16
    assert make('AutoAugment', policy='svhn').transform.policy is v2.AutoAugmentPolicy.SVHN


def test_torchvisions_own_values_are_taken_too():
    transform = make('Resize', size=8, interpolation=v2.InterpolationMode.BOX).transform
    assert transform.interpolation is v2.InterpolationMode.BOX
    assert make('ToDtype', dtype=torch.float32).transform.dtype is torch.float32


def test_transforms_nest():
    inner = dict(
        type='torchvision/RandomOrder',
        transforms=[dict(type='torchvision/GaussianBlur', kernel_size=3)],
    )
    transform = make('RandomApply', transforms=[inner, v2.Identity()], p=0.25).transform
    assert transform.p == 0.25
    blur = transform.transforms[0].transforms[0]
    assert isinstance(blur, v2.GaussianBlur)
    assert isinstance(transform.transforms[1], v2.Identity)


@pytest.mark.parametrize(
    ('name', 'arguments', 'message'),
    [
        (
            'Resize',
            dict(size=8, interpolation='linear'),
            "interpolation must be one of 'nearest', .*, got 'linear'",
        ),
        ('ToDtype', dict(dtype='float33'), "dtype must name a torch dtype .*, got 'float33'"),
        ('ToDtype', dict(dtype='nn'), "dtype must name a torch dtype .*, got 'nn'"),
        ('AutoAugment', dict(policy='coco'), "policy must be one of .*, got 'coco'"),
        (
            'RandomResizedCrop',
            dict(size=8, scale=(0.9, 0.2)),
            r'scale must be \(smallest, largest\), got \(0.9, 0.2\)',
        ),
        ('RandomResizedCrop', dict(size=8, scale=(0.0, 0.2)), r'scale must be two shares'),
        ('RandomResizedCrop', dict(size=8, scale=(0.4, 1.5)), r'scale must be two shares'),
        ('RandomResizedCrop', dict(size=8, scale=0.4), r'scale must be two shares'),
        ('RandomResizedCrop', dict(size=8, ratio=(2, 1)), r'ratio must be \(smallest, largest\)'),
        ('RandomResizedCrop', dict(size=0), 'size must be one or two positive integers, got 0'),
        ('Resize', dict(size=[8, 8.5]), 'size must be one or two positive integers'),
        ('RandomAffine', dict(degrees=(15, -15)), r'degrees must be \(smallest, largest\)'),
        (
            'RandomAffine',
            dict(degrees=15, scale=(1.2, 0.8)),
            r'scale must be \(smallest, largest\)',
        ),
        (
            'GaussianBlur',
            dict(kernel_size=3, sigma=(2.0, 0.1)),
            r'sigma must be \(smallest, largest\)',
        ),
        ('GaussianBlur', dict(kernel_size=4), 'odd'),
        ('ColorJitter', dict(brightness=(1.2, 0.8)), r'brightness must be \(smallest, largest\)'),
        ('ColorJitter', dict(brightness=-1), 'brightness'),
        (
            'RandomApply',
            dict(transforms=[dict(type='torchvision/Identity')], p=1.5),
            'p.* should be',
        ),
        ('RandomGrayscale', dict(p=-0.1), 'p.* should be'),
        ('RandomAffine', dict(degreess=15), "no setting 'degreess'; did you mean 'degrees'"),
        ('RandomAffine', dict(), "needs the setting 'degrees'"),
        (
            'RandomApply',
            dict(transforms=[dict(type='torchvision/GaussianBlur', kernel=3)]),
            r"transforms\[0\] \(torchvision/.*Blur\) has no setting 'kernel'; did you mean",
        ),
        (
            'RandomApply',
            dict(transforms=[dict(type='PackInputs')]),
            r'transforms\[0\] must be one of torchvision/<Name>',
        ),
    ],
)
def test_wrong_settings_are_refused_by_name(name, arguments, message):
    with pytest.raises(ValueError, match=rf'pipeline\[0\] \(torchvision/{name}\).*{message}'):
        make(name, **arguments)


def test_good_ranges_are_not_refused():
    make('RandomAffine', degrees=15, translate=(0.3, 0.1), shear=(-5, 5, -10, 10), scale=(0.8, 1.2))
    make('RandomChoice', transforms=[dict(type='torchvision/Identity')] * 2, p=[0.9, 0.1])
    make('Resize', size=None, max_size=20)
    make('RandomResizedCrop', size=8, scale=(1.0, 1.0))


def test_views_are_transformed_each_by_itself():
    views = [torch.full((1, 4, 4), 0.5), torch.full((1, 2, 2), 0.5)]
    noisy = make('GaussianNoise', sigma=0.1)({'img': views})['img']
    assert [view.shape for view in noisy] == [(1, 4, 4), (1, 2, 2)]
    assert all(view.std() > 0 for view in noisy)
    assert not torch.equal(noisy[0][:, :2, :2], noisy[1])


def test_the_signature_is_torchvisions():
    assert inspect.signature(TRANSFORMS.get('torchvision/Resize')) == inspect.signature(v2.Resize)


def test_they_can_be_used_without_a_config_and_pickled():
    cls = TRANSFORMS.get('torchvision/CenterCrop')
    assert issubclass(cls, TorchvisionTransform)
    crop = pickle.loads(pickle.dumps(cls(4)))
    assert crop({'img': Image.new('L', (8, 8))})['img'].size == (4, 4)
    assert repr(crop) == 'CenterCrop(size=(4, 4))'
