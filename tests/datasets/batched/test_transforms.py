"""The batched form of a transform is torchvision's on each image, with the same parameters."""

import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

from memengine.datasets.batched import Draws, augment, colour, geometry

B, H, W = 12, 18, 23
MODES = {False: v2.InterpolationMode.BILINEAR, True: v2.InterpolationMode.BICUBIC}


def draws():
    return Draws.from_seeds(range(100, 100 + B))


def images(channels=3):
    pixels = torch.rand(B, channels, H, W, generator=torch.Generator().manual_seed(0))
    pixels[0] = 0.3  # without colour, where a hue is not defined
    return pixels


def assert_each(batched, one):
    """Compare a batch with what ``one(number, image)`` says of each image."""
    expected = torch.stack([one(number, image) for number, image in enumerate(images())])
    torch.testing.assert_close(batched, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize('cubic', [False, True])
@pytest.mark.parametrize('size', [(7, 5), (30, 41), (18, 23)])
def test_resized_crop(cubic, size):
    *box, fits = geometry.draw_boxes(draws(), H, W, (0.2, 0.9), (0.5, 2.0))
    assert fits.all() and len(set(zip(*(each.tolist() for each in box), strict=True))) == B
    assert_each(
        geometry.resized_crop(images(), box, size, cubic),
        lambda number, image: TF.resized_crop(
            image, *(int(each[number]) for each in box), list(size), MODES[cubic], antialias=True
        ).clamp(0, 1),
    )


def test_boxes_are_those_that_torchvision_draws():
    """The same distribution: means of 4000 boxes each, whose standard errors are below 0.05."""
    kind = v2.RandomResizedCrop(8, scale=(0.2, 0.7), ratio=(0.5, 2.0))
    mine = torch.stack(
        geometry.draw_boxes(Draws(torch.arange(4000)), H, W, kind.scale, kind.ratio)[:4], 1
    ).float()
    torch.manual_seed(0)
    names = ('top', 'left', 'height', 'width')
    drawn = [kind.make_params([images()[0]]) for _ in range(4000)]
    theirs = [[each[name] for name in names] for each in drawn]
    torch.testing.assert_close(mine.mean(0), torch.tensor(theirs).float().mean(0), atol=0.3, rtol=0)
    torch.testing.assert_close(mine.std(0), torch.tensor(theirs).float().std(0), atol=0.3, rtol=0)


def test_the_middle_is_taken_where_no_box_fits():
    crop = v2.RandomResizedCrop((6, 6), scale=(0.99, 1.0), ratio=(1.0, 1.0))  # of 18 x 23
    out = augment([crop], images(), draws())
    assert_each(out, lambda _, image: TF.resized_crop(image, 0, 2, 18, 18, [6, 6], antialias=True))


def test_affine():
    degrees, scale = torch.linspace(-170, 170, B), torch.linspace(0.6, 1.5, B)
    moved = [torch.arange(B) - 5.0, 3.0 - torch.arange(B)]
    shear = [torch.linspace(-20, 15, B), torch.linspace(10, -5, B)]
    matrices = geometry.affine_matrices(degrees, moved, scale, shear)
    assert_each(
        geometry.affine(images(), matrices, 'bilinear'),
        lambda number, image: TF.affine(
            image,
            float(degrees[number]),
            [float(each[number]) for each in moved],
            float(scale[number]),
            [float(each[number]) for each in shear],
            v2.InterpolationMode.BILINEAR,
            fill=None,
        ),
    )


@pytest.mark.parametrize('name', colour.ADJUST)
@pytest.mark.parametrize('channels', [1, 3])
def test_colours(name, channels):
    factors = torch.linspace(-0.5, 0.5, B) if name == 'hue' else torch.linspace(0, 1.9, B)
    adjust = getattr(TF, f'adjust_{name}')
    batch = images(channels)
    expected = [adjust(image, float(by)) for image, by in zip(batch, factors, strict=True)]
    out = colour.ADJUST[name](batch, factors)
    torch.testing.assert_close(out, torch.stack(expected), atol=2e-5, rtol=0)


def test_blur():
    sigma = torch.linspace(0.1, 2, B)
    assert_each(
        colour.blur(images(), sigma, 7, 5),
        lambda number, image: TF.gaussian_blur(image, [5, 7], [float(sigma[number])]),
    )


def test_colour_jitter_takes_its_adjustments_in_any_order():
    jitter = v2.ColorJitter(brightness=(0.5, 0.5), contrast=(0.4, 0.4), hue=(0.2, 0.2))
    out, found = augment([jitter], images(), draws()), set()
    orders = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    adjust = [
        lambda image: TF.adjust_brightness(image, 0.5),
        lambda image: TF.adjust_contrast(image, 0.4),
        lambda image: TF.adjust_hue(image, 0.2),
    ]
    for image, mine in zip(images()[1:], out[1:], strict=True):
        fitting = []
        for order in orders:
            expected = image
            for number in order:
                expected = adjust[number](expected)
            if torch.allclose(mine, expected, atol=2e-5):
                fitting.append(order)
        assert fitting
        found.update(fitting)
    assert len(found) > 2


def test_noise_is_of_each_images_own_draws():
    out = augment([v2.GaussianNoise(mean=0.1, sigma=0.5, clip=False)], images(), draws())
    drawn = draws().split().normal(3, H, W)
    torch.testing.assert_close(out, images() + 0.1 + 0.5 * drawn, atol=1e-6, rtol=0)
    clipped = augment([v2.GaussianNoise(sigma=5.0)], images(), draws())
    assert clipped.min() == 0 and clipped.max() == 1


@pytest.mark.parametrize(
    ('kind', 'change'),
    [
        (v2.RandomHorizontalFlip, lambda image: image.flip(-1)),
        (v2.RandomVerticalFlip, lambda image: image.flip(-2)),
        (v2.RandomGrayscale, lambda image: TF.rgb_to_grayscale(image, 3)),
        (lambda p: v2.RandomSolarize(0.5, p=p), lambda image: TF.solarize(image, 0.5)),
        (lambda p: v2.RandomSolarize(127.5, p=p), lambda image: TF.solarize(image, 0.5)),
        (
            lambda p: v2.RandomApply([v2.ColorJitter(brightness=(0.5, 0.5))], p=p),
            lambda image: TF.adjust_brightness(image, 0.5),
        ),
    ],
)
def test_what_is_done_to_some_images_only(kind, change):
    out = augment([kind(p=0.5)], images(), draws())
    changed = []
    for image, mine in zip(images()[1:], out[1:], strict=True):
        changed.append(torch.allclose(mine, change(image), atol=1e-5))
        assert changed[-1] or torch.equal(mine, image)
    assert 1 < sum(changed) < B - 2
    assert torch.equal(augment([kind(p=0.0)], images(), draws()), images())


def test_random_crop():
    batch = images()
    out = augment([v2.RandomCrop((9, 11), padding=[2, 3])], batch, draws())
    padded = TF.pad(batch, [2, 3])
    places = set()
    for image, mine in zip(padded[1:], out[1:], strict=True):
        windows = image.unfold(1, 9, 1).unfold(2, 11, 1)  # [C, tops, lefts, 9, 11]
        equal = (windows == mine[:, None, None]).flatten(3).all(-1).all(0).nonzero().tolist()
        assert equal
        places.add(tuple(equal[0]))
    assert len(places) > 5
    with pytest.raises(ValueError, match='larger than the images'):
        augment([v2.RandomCrop(40)], batch, draws())


def test_random_erasing():
    out = augment([v2.RandomErasing(p=0.5, value=[7.0, 8.0, 9.0])], images(), draws())
    erased = 0
    for image, mine in zip(images(), out, strict=True):
        where = (mine != image).any(0)
        if not where.any():
            continue
        erased += 1
        rows, columns = where.any(1), where.any(0)
        assert torch.equal(where, rows[:, None] & columns)  # a box
        assert torch.equal(
            mine[:, where], torch.tensor([[7.0], [8.0], [9.0]]).expand(3, where.sum())
        )
        assert 0.01 < where.float().mean() < 0.4
    assert 1 < erased < B - 1
    random = augment([v2.RandomErasing(p=1, value='random')], images(), draws())
    assert random.min() < 0


@pytest.mark.parametrize(
    'settings', [dict(ratio=(0.3, 0.5)), dict(ratio=(2.0, 4.0)), dict(scale=(0.5, 1.0))]
)
def test_erased_boxes_are_those_that_torchvision_draws(settings):
    """The same distribution of sides and of images without a box, by 4000 of each."""
    kind = v2.RandomErasing(p=1.0, value=1.0, **settings)
    mine = augment([kind], torch.zeros(4000, 1, H, W), Draws(torch.arange(4000)))
    torch.manual_seed(0)
    theirs = torch.stack([kind(torch.zeros(1, H, W)) for _ in range(4000)])
    mine, theirs = (_sides(erased[:, 0] > 0) for erased in (mine, theirs))
    for measure in (torch.mean, torch.std):
        torch.testing.assert_close(measure(mine, 0), measure(theirs, 0), atol=0.4, rtol=0)
    assert mine[:, 0].max() < H and mine[:, 1].max() < W
    missing = [(sides.sum(1) == 0).float().mean().item() for sides in (mine, theirs)]
    assert missing[0] == pytest.approx(missing[1], abs=0.03)


def _sides(erased):
    """Height and width of the boxes of bool [B, H, W], 0 where there is none."""
    return torch.stack([erased.any(2).sum(1), erased.any(1).sum(1)], 1).float()


@pytest.mark.parametrize(
    'kind',
    [v2.Resize(10), v2.CenterCrop(8), v2.Pad(2), v2.Grayscale(3), v2.Normalize([0.5], [0.25])],
)
def test_what_draws_nothing_is_torchvisions(kind):
    assert_each(augment([kind], images(), draws()), lambda _, image: kind(image))


@pytest.mark.parametrize(
    ('fill', 'scale'), [(0, 1), (124, 255), ([124, 116, 104], 255), ([0.5, 0.25, 0.75], 1)]
)
def test_pad_fills_with_the_colour_that_an_image_of_8_bits_gets(fill, scale):
    padded = augment([v2.Pad([2, 1], fill=fill)], images(), draws())
    colour = (torch.tensor(fill) / scale).expand(B, 3)
    torch.testing.assert_close(padded[:, :, 0, -1], colour)
    assert torch.equal(padded[:, :, 1:-1, 2:-2], images())


def test_a_bicubic_affine_map_stays_within_what_an_image_holds():
    turned = v2.RandomAffine(30, interpolation=v2.InterpolationMode.BICUBIC)
    out = augment([turned], images().round(), draws())
    assert out.min() == 0 and out.max() == 1
