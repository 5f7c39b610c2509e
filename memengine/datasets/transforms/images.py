"""One image between two libraries: torchvision takes PIL or RGB tensors, mmcv takes BGR arrays.

``results['img']`` is a PIL image, a tensor ``[C, H, W]`` in RGB order, or an array ``[H, W, C]``
(grey: ``[H, W]``) in BGR order, unless ``results['channel_order']`` says ``'rgb'``, which is so
after mmcv's ``Normalize(to_rgb=True)`` only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image


def _swap_channels(array: np.ndarray) -> np.ndarray:
    """RGB to BGR and back; greyscale stays as it is."""
    return array[..., ::-1] if array.ndim == 3 and array.shape[-1] == 3 else array


def to_torchvision(image: Any, channel_order: str = 'bgr') -> Any:
    """An array as torchvision and the collation take it; everything else unchanged.

    Args:
        image: An array ``[H, W]`` or ``[H, W, C]`` with C of 1 or 3, a PIL image or a tensor.
        channel_order: The order of an array's channels, ``'bgr'`` or ``'rgb'``.

    Returns:
        A PIL image for ``uint8`` arrays, a float tensor ``[C, H, W]`` in RGB for float arrays.

    Raises:
        ValueError: For arrays of another type or shape.
    """
    if not isinstance(image, np.ndarray):
        return image
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (1, 3)):
        raise ValueError(f'an image array must be [H, W] or [H, W, 1 or 3], got {image.shape}')
    if channel_order == 'bgr':
        image = _swap_channels(image)
    if image.dtype == np.uint8:
        return Image.fromarray(np.ascontiguousarray(image.squeeze(2) if _is_grey(image) else image))
    if image.dtype.kind != 'f':
        raise ValueError(f'an image array must be uint8 or float, got {image.dtype}')
    channels_last = image[..., None] if image.ndim == 2 else image
    return torch.from_numpy(np.ascontiguousarray(channels_last.transpose(2, 0, 1)))


def _is_grey(image: np.ndarray) -> bool:
    return image.ndim == 3 and image.shape[2] == 1


def to_bgr_array(image: Any, channel_order: str = 'bgr') -> np.ndarray:
    """Any image as mmcv's transforms take it.

    Args:
        image: A PIL image, a tensor ``[C, H, W]`` in RGB, or an array.
        channel_order: The order of an array's channels, ``'bgr'`` or ``'rgb'``.

    Returns:
        An array ``[H, W, 3]`` in BGR or ``[H, W]`` in grey, of the type that ``image`` has.

    Raises:
        TypeError: When ``image`` is something else, such as the list that MultiCrop makes.
    """
    if isinstance(image, np.ndarray):
        return np.ascontiguousarray(image if channel_order == 'bgr' else _swap_channels(image))
    if isinstance(image, Image.Image):
        rgb = np.asarray(image if image.mode in ('L', 'RGB') else image.convert('RGB'))
    elif isinstance(image, torch.Tensor) and image.ndim == 3:
        rgb = image.as_subclass(torch.Tensor).permute(1, 2, 0).numpy()
        rgb = rgb[..., 0] if _is_grey(rgb) else rgb
    else:
        raise TypeError(f"mmcv's transforms take one image, got {describe(image)}")
    return np.array(_swap_channels(rgb), order='C')  # a copy: mmcv may write into it


def describe(image: Any) -> str:
    """What an image is, in a few words, for an error."""
    if isinstance(image, Image.Image):
        return f'a PIL image of {image.width}x{image.height} pixels (mode {image.mode})'
    if isinstance(image, torch.Tensor):
        return f'a {str(image.dtype).removeprefix("torch.")} tensor {list(image.shape)}'
    if isinstance(image, np.ndarray):
        return f'a {image.dtype} array {list(image.shape)}'
    if isinstance(image, (list, tuple)):
        return f'{len(image)} views'
    return f'a {type(image).__name__}'
