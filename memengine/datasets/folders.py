"""Sources on disk: folders of images, ImageNet's layout and CIFAR's pickles, by torchvision."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from memengine.datasets.build import one_line
from memengine.registry import DATASETS

__all__ = ['CIFAR10', 'CIFAR100', 'ImageFolder', 'ImageNet', 'load_rgb']


def load_rgb(path: str) -> Image.Image:
    """Read an image file as 8-bit RGB, whatever it holds.

    Sixteen-bit greyscale is scaled to eight bits (Pillow's own conversion cuts it off at 255),
    grey is repeated over the channels, transparency is dropped.

    Args:
        path: The file.

    Returns:
        A PIL image of mode ``RGB``.

    Raises:
        OSError: When the file is missing, truncated, or no image that can be read.
    """
    try:
        with Image.open(path) as image:
            image.load()
            return _as_rgb(image)
    except (
        SyntaxError,  # Pillow's error for a broken PNG
        EOFError,
        ValueError,
        struct.error,
        Image.DecompressionBombError,
    ) as error:
        raise OSError(one_line(error)) from error


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode == 'F':
        raise ValueError('its pixels are floating point, of unknown range; store 8 or 16 bits')
    if image.mode.startswith('I'):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError('its pixels need more than 16 bits; store 8 or 16 bits')
        image = Image.fromarray(np.rint(values / 257).astype(np.uint8))
    elif image.mode == 'P' and 'transparency' in image.info:
        image = image.convert('RGBA')
    return image.convert('RGB')


def _existing_folder(root: str, setting: str = 'root') -> Path:
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f'there is no folder {str(folder)!r}; set {setting} to where the data lies'
        )
    return folder


@DATASETS.register_module()
class ImageFolder:
    """Images in one folder per class: ``root/<class>/**/<image>``, read as RGB.

    Args:
        root: The folder that holds one folder per class, in whose sorted order the classes are
            numbered.

    Raises:
        ValueError: When ``root`` is no folder, holds no class folder, or a class without images.
    """

    def __init__(self, root: str) -> None:
        from torchvision import datasets

        folder = _existing_folder(root)
        try:
            self._files = datasets.ImageFolder(str(folder), loader=load_rgb)
        except FileNotFoundError as error:
            raise ValueError(
                f'root={str(folder)!r} must hold one folder of images per class: {one_line(error)}'
            ) from error
        self.classes: list[str] = self._files.classes

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return self._files[index]

    def path(self, index: int) -> str:
        """The file that sample ``index`` is read from."""
        return self._files.samples[index][0]


@DATASETS.register_module()
class ImageNet(ImageFolder):
    """ImageNet-1k as usually unpacked: ``root/train/<wnid>/*.JPEG`` and ``root/val/<wnid>/*.JPEG``.

    Args:
        root: The folder that holds ``train`` and ``val``.
        split: ``'train'`` or ``'val'``.

    Raises:
        ValueError: When the split's folder is missing or not sorted into one folder per class.
    """

    def __init__(self, root: str, split: Literal['train', 'val'] = 'train') -> None:
        if split not in ('train', 'val'):
            raise ValueError(f"split must be 'train' or 'val', got {split!r}")
        folder = _existing_folder(root) / split
        super().__init__(str(_existing_folder(str(folder), 'root (the folder of train and val)')))


class _Cifar:
    """What both CIFAR sets share; ``_name`` is torchvision's class."""

    _name: str

    def __init__(self, root: str, train: bool = True, download: bool = False) -> None:
        from torchvision import datasets

        if not download:
            _existing_folder(root)
        reader: Any = getattr(datasets, self._name)
        try:
            self._images = reader(str(Path(root).expanduser()), train=train, download=download)
        except (RuntimeError, OSError) as error:
            remedy = (
                'the download failed'
                if download
                else 'set root to the folder that holds it, or download=True to fetch it'
            )
            raise ValueError(
                f'{self._name} is missing or damaged under root={root!r}; {remedy} '
                f'({one_line(error)})'
            ) from error
        self.classes: list[str] = self._images.classes

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return self._images[index]


@DATASETS.register_module()
class CIFAR10(_Cifar):
    """CIFAR-10 in its Python layout, ``root/cifar-10-batches-py``: 32x32 RGB, ten classes.

    Args:
        root: The folder that holds ``cifar-10-batches-py``.
        train: The 50,000 training images, else the 10,000 test images.
        download: Fetch the data into ``root`` when it is missing.

    Raises:
        ValueError: When the data is missing or damaged (checked by MD5), or cannot be fetched.
    """

    _name = 'CIFAR10'


@DATASETS.register_module()
class CIFAR100(_Cifar):
    """CIFAR-100 in its Python layout, ``root/cifar-100-python``: 32x32 RGB, a hundred classes.

    Args:
        root: The folder that holds ``cifar-100-python``.
        train: The 50,000 training images, else the 10,000 test images.
        download: Fetch the data into ``root`` when it is missing.

    Raises:
        ValueError: When the data is missing or damaged (checked by MD5), or cannot be fetched.
    """

    _name = 'CIFAR100'
