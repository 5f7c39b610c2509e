"""Torchvision's colours, blur, noise and erasing on a batch, each image by its own parameters.

Shapes: images [B, C, H, W], float, 0 to 1; factors [B].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import v2

from memengine.datasets.batched.draws import Draws
from memengine.datasets.batched.geometry import draw_boxes

__all__ = ['ADJUST', 'blur']


def _per_image(values: Tensor) -> Tensor:
    return values[:, None, None, None]


def _grey(images: Tensor) -> Tensor:
    """[B, 1, H, W]."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.split(1, 1)
    return 0.2989 * red + 0.587 * green + 0.114 * blue


def _blend(images: Tensor, others: Tensor | float, factors: Tensor) -> Tensor:
    factors = _per_image(factors)
    return (images * factors + others * (1 - factors)).clamp(0, 1)


def adjust_brightness(images: Tensor, factors: Tensor) -> Tensor:
    """0 gives black, 1 the image."""
    return _blend(images, 0.0, factors)


def adjust_contrast(images: Tensor, factors: Tensor) -> Tensor:
    """0 gives the image's mean grey, 1 the image."""
    return _blend(images, _grey(images).mean((1, 2, 3), keepdim=True), factors)


def adjust_saturation(images: Tensor, factors: Tensor) -> Tensor:
    """0 gives the image in grey, 1 the image."""
    return images if images.shape[1] == 1 else _blend(images, _grey(images), factors)


def adjust_hue(images: Tensor, turns: Tensor) -> Tensor:
    """Turn each pixel's hue by a share of the circle, at the same saturation and value."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    low, high = images.aminmax(dim=1)
    spread = high - low
    divisor = torch.where(spread == 0, 1, spread)
    hue = torch.where(  # in sixths of the circle
        high == red,
        (green - blue) / divisor,
        torch.where(high == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    hue = hue + 6 * turns[:, None, None]
    sixths = torch.stack([(hue + offset) % 6 for offset in (5, 3, 1)], 1)
    part = torch.minimum(sixths, 4 - sixths).clamp(0, 1)
    return high[:, None] - spread[:, None] * part


ADJUST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    'brightness': adjust_brightness,
    'contrast': adjust_contrast,
    'saturation': adjust_saturation,
    'hue': adjust_hue,
}


def color_jitter(transform: v2.ColorJitter, images: Tensor, draws: Draws) -> Tensor:
    """``ColorJitter``, the adjustments in an order of each image's own."""
    limits = {name: getattr(transform, name) for name in ADJUST}
    used = {name: limit for name, limit in limits.items() if limit is not None}
    order = draws.uniform(len(used)).argsort(1)
    factors = [draws.uniform(low=low, high=high) for low, high in used.values()]
    for position in range(len(used)):
        for number, name in enumerate(used):
            rows = (order[:, position] == number).nonzero()[:, 0]
            if len(rows):
                adjusted = ADJUST[name](images[rows], factors[number][rows])
                images = images.index_copy(0, rows, adjusted)
    return images


def random_grayscale(transform: v2.RandomGrayscale, images: Tensor, draws: Draws) -> Tensor:
    """``RandomGrayscale``, with as many channels as before."""
    return torch.where(_per_image(draws.uniform() < transform.p), _grey(images), images)


def random_solarize(transform: v2.RandomSolarize, images: Tensor, draws: Draws) -> Tensor:
    """``RandomSolarize``; a threshold above 1 is one of 8 bits."""
    threshold = transform.threshold / 255 if transform.threshold > 1 else transform.threshold
    chosen = _per_image(draws.uniform() < transform.p) & (images >= threshold)
    return torch.where(chosen, 1 - images, images)


def gaussian_blur(transform: v2.GaussianBlur, images: Tensor, draws: Draws) -> Tensor:
    """``GaussianBlur``."""
    low, high = transform.sigma
    wide, tall = transform.kernel_size[0], transform.kernel_size[-1]
    return blur(images, draws.uniform(low=low, high=high), tall, wide)


def blur(images: Tensor, sigma: Tensor, tall: int, wide: int) -> Tensor:
    """Blur each image with its own standard deviation in pixels, reflected at the borders."""
    for side, size in ((-2, tall), (-1, wide)):
        places = torch.arange(size, device=images.device) - (size - 1) / 2
        weights = (-((places / sigma[:, None]) ** 2) / 2).softmax(1)
        around = (size // 2, size // 2)
        padded = F.pad(images, (*around, 0, 0) if side == -1 else (0, 0, *around), 'reflect')
        length = images.shape[side]
        images = sum(  # type: ignore[assignment]
            _per_image(weights[:, shift]) * padded.narrow(side, shift, length)
            for shift in range(size)
        )
    return images


def gaussian_noise(transform: v2.GaussianNoise, images: Tensor, draws: Draws) -> Tensor:
    """``GaussianNoise``."""
    noisy = images + transform.mean + transform.sigma * draws.normal(*images.shape[1:])
    return noisy.clamp(0, 1) if transform.clip else noisy


def random_erasing(transform: v2.RandomErasing, images: Tensor, draws: Draws) -> Tensor:
    """``RandomErasing``."""
    height, width = images.shape[-2:]
    chosen = draws.uniform() < transform.p
    # Its ratio is of height to width, other than that of RandomResizedCrop.
    left, top, wide, tall, fits = draw_boxes(
        draws, width, height, transform.scale, transform.ratio, smaller=True
    )
    rows = torch.arange(height, device=images.device)[:, None]
    columns = torch.arange(width, device=images.device)
    top, left, tall, wide = (each[:, None, None] for each in (top, left, tall, wide))
    inside = (rows >= top) & (rows < top + tall) & (columns >= left) & (columns < left + wide)
    inside = (inside & (chosen & fits)[:, None, None])[:, None]
    if transform.value is None:  # as torchvision keeps 'random'
        return torch.where(inside, draws.normal(*images.shape[1:]), images)
    return torch.where(
        inside, torch.tensor(transform.value, device=images.device)[:, None, None], images
    )
