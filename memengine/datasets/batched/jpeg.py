"""JPEG files that are read by the loader's workers and decoded later, as a batch.

Shapes: B samples, L bytes of the longest file.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from memengine.datasets.sources.folders import MOST_PIXELS

FILE = 'jpeg_file'
"""The entry of ``data_samples`` of an item that is such a file: its bytes, the image's size."""


def read(path: str) -> Tensor:
    """A file's bytes, uint8 [L].

    Raises:
        OSError: When it is missing, no JPEG, or of more than ``MOST_PIXELS``.
    """
    with Image.open(path) as image:  # which reads the head alone
        if image.format != 'JPEG':
            raise OSError(f"it is a {image.format}; decode='device' takes JPEG files only")
        if image.width * image.height > MOST_PIXELS:
            raise OSError(f'it has more than {MOST_PIXELS} pixels')
    return torch.from_numpy(np.fromfile(path, np.uint8))


def decode(
    files: Tensor, lengths: Tensor, size: Sequence[int], device: torch.device, names: Sequence[str]
) -> Tensor:
    """Images of files, resized: uint8 [B, 3, height, width] on ``device``.

    Args:
        files: Their bytes, padded: uint8 [B, L] on the CPU.
        lengths: Bytes of each file, Long[B].
        size: [height, width].
        device: Where they are decoded: by nvJPEG on a GPU, else by libjpeg.
        names: What the files are called in errors.

    Raises:
        ValueError: When one cannot be decoded, with the names of those.
    """
    encoded = [file[:length] for file, length in zip(files, lengths.tolist(), strict=True)]
    try:
        images = decode_jpeg(encoded, ImageReadMode.RGB, device)
    except RuntimeError as error:
        broken = [name for name, file in zip(names, encoded, strict=True) if not _is_whole(file)]
        which = ', '.join(broken) or f'one of {", ".join(names)}'
        raise ValueError(f'{which} cannot be decoded on {device}: {error}') from error
    return torch.stack([v2.functional.resize(image, list(size)) for image in images])


def _is_whole(file: Tensor) -> bool:
    try:
        decode_jpeg(file, ImageReadMode.RGB)
    except RuntimeError:
        return False
    return True
