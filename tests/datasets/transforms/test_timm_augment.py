"""RandAugment of timm, in a pipeline."""

import random

import numpy as np
import pytest
import torch
from PIL import Image

from memengine.datasets.transforms import Pipeline, TimmRandAugment

POLICY = 'rand-m9-mstd0.5-inc1'


def photograph():
    generator = np.random.default_rng(0)
    return Image.fromarray(generator.integers(0, 256, (16, 16, 3), dtype=np.uint8))


def pipeline(policy=POLICY):
    return Pipeline([dict(type='TimmRandAugment', policy=policy, image_size=16)])


def test_it_changes_the_image_as_the_seed_says():
    def draw(seed):
        random.seed(seed)
        np.random.seed(seed)
        return np.asarray(pipeline()({'img': photograph()})['img'])

    images = [draw(seed) for seed in range(8)]
    assert all(image.shape == (16, 16, 3) for image in images)
    assert len({image.tobytes() for image in images}) > 4
    np.testing.assert_array_equal(images[3], draw(3))


def test_full_magnitude_keeps_an_image_that_pillow_takes():
    """At magnitude 10 timm asks Pillow for no bit of a colour, which newer versions refuse."""
    augment = pipeline('rand-m10-inc1').steps[0][1].augment
    (posterize,) = [each for each in augment.ops if each.name.startswith('Posterize')]
    posterize.prob = 1.0
    assert set(np.unique(np.asarray(posterize(photograph())))) == {0, 128}


def test_geometric_operations_interpolate_as_is_asked_for():
    used = {
        interpolation: {
            operation.kwargs['resample']
            for operation in TimmRandAugment(POLICY, 16, interpolation=interpolation).augment.ops
        }
        for interpolation in ('random', 'bilinear', 'bicubic')
    }
    linear, cubic = Image.Resampling.BILINEAR, Image.Resampling.BICUBIC
    assert used == {'random': {(linear, cubic)}, 'bilinear': {linear}, 'bicubic': {cubic}}


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="interpolation must be 'random'.*got 'cubic'"):
        TimmRandAugment(POLICY, 16, interpolation='cubic')
    with pytest.raises(ValueError, match="timm cannot read policy='augment'"):
        pipeline('augment')
    with pytest.raises(ValueError, match='put it before torchvision/ToImage'):
        pipeline()({'img': torch.zeros(3, 4, 4)})
