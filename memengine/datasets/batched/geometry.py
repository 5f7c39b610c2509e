"""Torchvision's crops, flips and affine maps on a batch, each image with parameters of its own.

Shapes: images [B, C, H, W], float, 0 to 1; parameters [B].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import v2

from memengine.datasets.batched.draws import Draws

__all__ = ['affine', 'affine_matrices', 'draw_boxes', 'resized_crop', 'height_and_width']


def height_and_width(size: Sequence[int]) -> tuple[int, int]:
    """Height and width, of which torchvision keeps one where both are the same."""
    return size[0], size[-1]


def draw_boxes(
    draws: Draws,
    height: int,
    width: int,
    scale: Sequence[float],
    ratio: Sequence[float],
    smaller: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Boxes of a share of the image's area and of a ratio of width to height, that fit into it.

    Of ten tries the first that fits is taken, as torchvision does.

    Args:
        draws: Those of B images.
        height: Of the images.
        width: Of the images.
        scale: Least and largest share of the area.
        ratio: Least and largest ratio.
        smaller: Whether a box fits only if the image is larger along both sides; then it may also
            be empty.

    Returns:
        top, left, height and width, Long[B], and whether any try fitted, Bool[B].
    """
    area = height * width * draws.uniform(10, low=scale[0], high=scale[1])
    shape = draws.uniform(10, low=math.log(ratio[0]), high=math.log(ratio[1])).exp()
    widths, heights = (area * shape).sqrt().round(), (area / shape).sqrt().round()
    if smaller:
        fits = (widths < width) & (heights < height)
    else:
        fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
    first = fits.float().argmax(1, keepdim=True)
    box_height, box_width = (each.gather(1, first)[:, 0] for each in (heights, widths))
    place = draws.uniform(2)
    top = (place[:, 0] * (height - box_height + 1)).floor()
    left = (place[:, 1] * (width - box_width + 1)).floor()
    box = (each.long() for each in (top, left, box_height, box_width))
    return *box, fits.any(1)  # type: ignore[return-value]


def _central_box(height: int, width: int, ratio: Sequence[float]) -> tuple[int, int, int, int]:
    """The largest in the middle whose ratio is allowed: top, left, height, width."""
    tall, wide = height, width
    if width / height < min(ratio):
        tall = round(width / min(ratio))
    elif width / height > max(ratio):
        wide = round(height * max(ratio))
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def random_resized_crop(transform: v2.RandomResizedCrop, images: Tensor, draws: Draws) -> Tensor:
    """``RandomResizedCrop`` with antialiasing."""
    height, width = images.shape[-2:]
    *drawn, fits = draw_boxes(draws, height, width, transform.scale, transform.ratio)
    central = _central_box(height, width, transform.ratio)
    box = [torch.where(fits, mine, other) for mine, other in zip(drawn, central, strict=True)]
    cubic = v2.InterpolationMode(transform.interpolation) is v2.InterpolationMode.BICUBIC
    return resized_crop(images, box, height_and_width(transform.size), cubic)


def resized_crop(
    images: Tensor, box: Sequence[Tensor], size: tuple[int, int], cubic: bool
) -> Tensor:
    """Crop each image to its own box and resize that to ``size``, antialiased.

    What a crop and a resize do along a side is one matrix, so that a batch takes two products.

    Args:
        images: [B, C, H, W].
        box: top, left, height and width of each, Long[B].
        size: Height and width that come out.
        cubic: By bicubic interpolation, held within 0 and 1, else by bilinear.
    """
    top, left, tall, wide = box
    rows = _resampling(top, tall, images.shape[-2], size[0], cubic)
    columns = _resampling(left, wide, images.shape[-1], size[1], cubic)
    out = rows[:, None] @ images @ columns[:, None].transpose(-1, -2)
    return out.clamp(0, 1) if cubic else out


def _resampling(start: Tensor, length: Tensor, size: int, out: int, cubic: bool) -> Tensor:
    """Weights [B, out, size] of an image's pixels along one side, those outside the box zero."""
    scale = (length / out)[:, None, None]
    centre = (torch.arange(out, device=start.device) + 0.5)[:, None] * scale  # in the box
    place = torch.arange(size, device=start.device) - start[:, None, None]
    distance = ((place + 0.5 - centre) / scale.clamp(min=1)).abs()
    weights = _cubic(distance) if cubic else (1 - distance).clamp(min=0)
    weights = weights * ((place >= 0) & (place < length[:, None, None]))
    return weights / weights.sum(-1, keepdim=True)


def _cubic(x: Tensor) -> Tensor:
    """Keys' kernel with a of -0.5, as Pillow has it, of a distance of at least 0."""
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0))


def pad(transform: v2.Pad, images: Tensor, draws: Draws) -> Tensor:
    """``Pad``; a ``fill`` with a value above 1 is one of 8 bits."""
    fill = torch.as_tensor(transform.fill or 0.0, dtype=torch.float32)
    fill = fill / 255 if fill.max() > 1 else fill
    return v2.functional.pad(images, transform.padding, fill.tolist(), transform.padding_mode)


def random_crop(transform: v2.RandomCrop, images: Tensor, draws: Draws) -> Tensor:
    """``RandomCrop``, with zeros around the image where it has padding."""
    if transform.padding is not None:
        images = F.pad(images, transform.padding)  # left, right, top, bottom, for both
    height, width = images.shape[-2:]
    tall, wide = height_and_width(transform.size)
    if tall > height or wide > width:
        raise ValueError(f'size={[tall, wide]} is larger than the images, {[height, width]}')
    place = draws.uniform(2)
    top = (place[:, :1] * (height - tall + 1)).long()
    left = (place[:, 1:] * (width - wide + 1)).long()
    rows = (top + torch.arange(tall, device=images.device))[:, None, :, None]
    columns = (left + torch.arange(wide, device=images.device))[:, None, None, :]
    batch = torch.arange(len(images), device=images.device)[:, None, None, None]
    channels = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
    return images[batch, channels, rows, columns]


def flip(transform: v2.RandomHorizontalFlip, images: Tensor, draws: Draws) -> Tensor:
    """``RandomHorizontalFlip`` and ``RandomVerticalFlip``."""
    side = -1 if type(transform) is v2.RandomHorizontalFlip else -2
    chosen = draws.uniform() < transform.p
    return torch.where(chosen[:, None, None, None], images.flip(side), images)


def random_affine(transform: v2.RandomAffine, images: Tensor, draws: Draws) -> Tensor:
    """``RandomAffine`` about the middle, with zeros where the image does not reach."""
    height, width = images.shape[-2:]
    limits = [
        transform.degrees,
        *([-share, share] for share in transform.translate or (0, 0)),
        transform.scale or (1, 1),
        (transform.shear or (0, 0))[:2],
        ([*(transform.shear or ()), 0, 0, 0, 0])[2:4],
    ]
    low, high = torch.tensor(limits, dtype=torch.float32, device=images.device).t()
    angle, x, y, scale, *shear = (draws.uniform(6) * (high - low) + low).unbind(1)
    moved = (x * width).round(), (y * height).round()
    matrices = affine_matrices(angle, moved, scale, shear)
    mode = v2.InterpolationMode(transform.interpolation).value
    return affine(images, matrices, mode).clamp(0, 1)  # bicubic goes beyond


def affine_matrices(
    degrees: Tensor, moved: Sequence[Tensor], scale: Tensor, shear: Sequence[Tensor]
) -> Tensor:
    """Where each place of the result comes from, in pixels from the middle: [B, 2, 3].

    Args:
        degrees: Clockwise, [B].
        moved: To the right and down, in pixels, [B] each.
        scale: Larger than 1 enlarges, [B].
        shear: In degrees, along x and along y, [B] each.
    """
    turn, shear_x, shear_y = (each.deg2rad() for each in (degrees, *shear))
    a, c = (turn - shear_y).cos() / shear_y.cos(), (turn - shear_y).sin() / shear_y.cos()
    b, d = -(a * shear_x.tan() + turn.sin()), turn.cos() - c * shear_x.tan()
    inverse = torch.stack([d, -b, -c, a], 1).view(-1, 2, 2) / scale[:, None, None]
    return torch.cat([inverse, -inverse @ torch.stack(list(moved), 1)[:, :, None]], 2)


def affine(images: Tensor, matrices: Tensor, mode: str) -> Tensor:
    """Map each image by its own matrix of :func:`affine_matrices`."""
    height, width = images.shape[-2:]
    half = torch.tensor([width, height], device=images.device) / 2
    x = torch.arange(width, device=images.device) + 0.5 - half[0]
    y = torch.arange(height, device=images.device) + 0.5 - half[1]
    x, y = x.expand(height, width), y[:, None].expand(height, width)
    places = torch.stack([x, y, torch.ones_like(x)], -1).view(1, -1, 3)
    grid = places @ (matrices / half[:, None]).transpose(1, 2)
    grid = grid.view(len(images), height, width, 2)
    return F.grid_sample(images, grid, mode, 'zeros', align_corners=False)
