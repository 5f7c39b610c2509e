"""Sources on disk: folders of images, ImageNet's layout, and CIFAR's pickles by torchvision."""

from __future__ import annotations

import logging
import os
import struct
from collections import Counter
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from mmengine.logging import print_log
from PIL import Image

from memengine.datasets.build import one_line
from memengine.datasets.sources.protocols import NO_LABEL
from memengine.registry import DATASETS

MOST_PIXELS = 100_000_000
"""Of an image, unless more are asked for; as RGB they take 300 MB in each worker."""

SUFFIXES = ('.jpg', '.jpeg', '.png', '.ppm', '.bmp', '.pgm', '.tif', '.tiff', '.webp')
"""Of files that are taken for images."""


def load_rgb(path: str | BytesIO, max_pixels: int = MOST_PIXELS) -> Image.Image:
    """Read an image file as 8-bit RGB, whatever it holds.

    Sixteen-bit greyscale is scaled to eight bits (Pillow's own conversion cuts it off at 255),
    grey is repeated over the channels, transparency is dropped.

    Args:
        path: The file, or its content.
        max_pixels: Larger images are refused, before memory is taken for them.

    Raises:
        OSError: When the file is missing, truncated, larger, or no image that can be read; when it
            is no file but a pipe or a device, from which reading might never end.
    """
    if isinstance(path, str) and os.path.exists(path) and not os.path.isfile(path):
        raise OSError('it is no regular file')
    limit_of_pillow, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, max_pixels
    try:
        with Image.open(path) as image:
            if image.width * image.height > max_pixels:
                raise Image.DecompressionBombError
            image.load()
            return _as_rgb(image)
    except Image.DecompressionBombError as error:
        raise OSError(
            f'it has more pixels than max_pixels={max_pixels}, a setting of the source'
        ) from error
    except (
        SyntaxError,  # Pillow's error for a broken PNG
        EOFError,
        ValueError,
        struct.error,
    ) as error:
        raise OSError(one_line(error)) from error
    finally:
        Image.MAX_IMAGE_PIXELS = limit_of_pillow


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


def existing_folder(root: str, setting: str = 'root') -> Path:
    """A folder of a setting; ValueError where there is none."""
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f'there is no folder {str(folder)!r}; set {setting} to where the data lies'
        )
    return folder


def files_below(
    folder: str, entered: set[tuple[int, int]] | None = None, again: list[str] | None = None
) -> Iterator[str]:
    """Files in and below a folder, by folder; each folder once, wherever links lead.

    What is hidden, by a dot before its name, is left out: notebooks and systems keep copies there.

    Args:
        folder: Where to begin.
        entered: Folders that are not entered any more; grows. By default the folder itself.
        again: Takes up the paths of those that were come upon.
    """
    entered = {_identity(folder)} if entered is None else entered
    again = [] if again is None else again
    found = []
    for path, folders, files in os.walk(folder, followlinks=True):
        new = []
        for name in filter(_is_shown, folders):
            below = os.path.join(path, name)
            if _identity(below) in entered:
                again.append(below)
            else:
                entered.add(_identity(below))
                new.append(name)
        folders[:] = new
        found.append((path, sorted(filter(_is_shown, files))))
    return (os.path.join(path, name) for path, files in sorted(found) for name in files)


def _is_shown(name: str) -> bool:
    return not name.startswith('.')


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


@DATASETS.register_module()
class ImageFolder:
    """Images in one folder per class: ``root/<class>/**/<image>``, read as RGB.

    Links to folders are followed, but no folder is entered twice: a loop of links ends, and no
    image gets the label of another class.

    Files whose suffix is none of torchvision's (GIFs are not) are left out, and so are images that
    lie beside the folders of the classes; warnings count them. Hidden files and folders, whose
    names begin with a dot, are none (``.ipynb_checkpoints`` would be a class).

    Args:
        root: The folder that holds one folder per class, in whose sorted order the classes are
            numbered.
        max_pixels: An image of more pixels cannot be read (see the dataset's ``on_error``).

    Raises:
        ValueError: When ``root`` is no folder, holds no class folder, or a class without images.
    """

    def __init__(self, root: str, max_pixels: int = MOST_PIXELS) -> None:
        folder = existing_folder(root)
        self._max_pixels = max_pixels
        self.classes: list[str] = sorted(
            each.name for each in os.scandir(folder) if each.is_dir() and _is_shown(each.name)
        )
        if not self.classes:
            raise ValueError(f'root={str(folder)!r} must hold one folder of images per class')
        again: list[str] = []
        entered = {_identity(str(folder))}
        for name in self.classes:
            if _identity(str(folder / name)) in entered:
                raise ValueError(f'{str(folder / name)!r} is a link to another class or to root')
            entered.add(_identity(str(folder / name)))
        names = [it.name for it in os.scandir(folder) if _is_shown(it.name)]
        beside = [name for name in names if name.lower().endswith(SUFFIXES)]
        if beside := sorted(set(beside) - set(self.classes)):
            self._warn(
                f'{len(beside)} images lie beside the folders of the classes and are left out, as '
                f'they have no label ({str(folder / beside[0])!r})'
            )
        self._samples: list[tuple[str, int]] = []
        left_out: Counter[str] = Counter()
        for label, name in enumerate(self.classes):
            files = list(files_below(str(folder / name), entered, again))
            images = [(file, label) for file in files if file.lower().endswith(SUFFIXES)]
            left_out.update(Path(file).suffix.lower() or 'without suffix' for file in files)
            if not images:
                raise ValueError(
                    f'root={str(folder)!r} must hold one folder of images per class: there is no '
                    f'{", ".join(SUFFIXES)} in {name!r}'
                )
            self._samples += images
        if again:
            self._warn(
                f'{len(again)} links lead to folders that are read already and are not followed '
                f'({again[0]!r})'
            )
        for suffix in SUFFIXES:
            del left_out[suffix]
        if left_out:
            most = sorted(left_out.items(), key=lambda each: (-each[1], each[0]))[:5]
            kinds = ', '.join(f'{count} {kind}' for kind, count in most)
            self._warn(
                f'{len(self)} images in {str(folder)!r}; {left_out.total()} files of other kinds '
                f'are left out ({kinds})'
            )

    def _warn(self, text: str) -> None:
        print_log(f'{type(self).__name__}: {text}', logger='current', level=logging.WARNING)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        path, label = self._samples[index]
        return load_rgb(path, self._max_pixels), label

    @property
    def labels(self) -> list[int]:
        """The label of each sample."""
        return [label for _, label in self._samples]

    def path(self, index: int) -> str:
        """The file that sample ``index`` is read from."""
        return self._samples[index][0]


@DATASETS.register_module()
class UnlabelledFolder:
    """All images in and below a folder, read as RGB, without labels (each has the label -1).

    Links to folders are followed, but no folder is entered twice. Files whose suffix is none of
    torchvision's are left out, and so is what is hidden by a dot before its name.

    Args:
        root: The folder.
        max_pixels: An image of more pixels cannot be read (see the dataset's ``on_error``).

    Raises:
        ValueError: When ``root`` is no folder, or holds no image.
    """

    def __init__(self, root: str, max_pixels: int = MOST_PIXELS) -> None:
        folder = existing_folder(root)
        files = files_below(str(folder))
        self._files = [file for file in files if file.lower().endswith(SUFFIXES)]
        self._max_pixels = max_pixels
        if not self._files:
            raise ValueError(f'there is no {", ".join(SUFFIXES)} in root={str(folder)!r}')
        self.classes: list[str] = []

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return load_rgb(self._files[index], self._max_pixels), NO_LABEL

    def path(self, index: int) -> str:
        """The file that sample ``index`` is read from."""
        return self._files[index]


@DATASETS.register_module()
class ImageNet(ImageFolder):
    """ImageNet-1k as usually unpacked: ``root/train/<wnid>/*.JPEG`` and ``root/val/<wnid>/*.JPEG``.

    Args:
        root: The folder that holds ``train`` and ``val``.
        split: ``'train'`` or ``'val'``.
        max_pixels: As for ``ImageFolder``.

    Raises:
        ValueError: When the split's folder is missing or not sorted into one folder per class.
    """

    def __init__(
        self, root: str, split: Literal['train', 'val'] = 'train', max_pixels: int = MOST_PIXELS
    ) -> None:
        if split not in ('train', 'val'):
            raise ValueError(f"split must be 'train' or 'val', got {split!r}")
        folder = existing_folder(root) / split
        split_folder = existing_folder(str(folder), 'root (the folder of train and val)')
        super().__init__(str(split_folder), max_pixels)


@DATASETS.register_module()
class CIFAR10:
    """CIFAR-10 in its Python layout, ``root/cifar-10-batches-py``: 32x32 RGB, ten classes.

    Args:
        root: The folder that holds ``cifar-10-batches-py``.
        train: The 50,000 training images, else the 10,000 test images.
        download: Fetch the data into ``root`` when it is missing.

    Raises:
        ValueError: When the data is missing or damaged (checked by MD5), or cannot be fetched.
    """

    def __init__(self, root: str, train: bool = True, download: bool = False) -> None:
        from torchvision import datasets

        if not download:
            existing_folder(root)
        name = type(self).__name__
        reader: Any = getattr(datasets, name)
        try:
            self._images = reader(str(Path(root).expanduser()), train=train, download=download)
        except (RuntimeError, OSError) as error:
            remedy = (
                'the download failed'
                if download
                else 'set root to the folder that holds it, or download=True to fetch it'
            )
            raise ValueError(
                f'{name} is missing or damaged under root={root!r}; {remedy} ({one_line(error)})'
            ) from error
        self.classes: list[str] = self._images.classes
        self.labels: list[int] = self._images.targets

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return self._images[index]


@DATASETS.register_module()
class CIFAR100(CIFAR10):
    """CIFAR-100 in its Python layout, ``root/cifar-100-python``, as :class:`CIFAR10`."""
