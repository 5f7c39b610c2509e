"""Sources of real images that ship inside a library, so that a first run needs no download."""

from __future__ import annotations

import functools
import importlib.util
import math
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from memengine.registry import DATASETS


def _check_choice(setting: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f'{setting} must be one of {", ".join(map(repr, choices))}, got {value!r}')


@functools.cache
def _read_digits() -> tuple[np.ndarray, np.ndarray]:
    """All images, [1797, 8, 8] uint8, and labels, [1797]; several data sets of a run share them."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)  # [1797, 64] in 0..16
    return np.rint(pixels.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8), labels


@DATASETS.register_module()
class Digits:
    """The 1,797 handwritten digits bundled with scikit-learn: 8x8 pixels, one channel, ten classes.

    Args:
        split: ``'train'`` or ``'test'``.
        split_by: ``'stratified'`` draws the held-out share from every class alike;
            ``'order'`` holds out the last share of the file, which other writers wrote.
        test_fraction: Share that is held out, in (0, 1).
        seed: Seed of the stratified draw. Both splits must be built with the same one.

    Raises:
        ValueError: When a setting is not one of those above.
        ImportError: When scikit-learn is missing.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998.
    """

    def __init__(
        self,
        split: Literal['train', 'test'] = 'train',
        split_by: Literal['stratified', 'order'] = 'stratified',
        test_fraction: float = 0.3,
        seed: int = 0,
    ) -> None:
        _check_choice('split', split, ('train', 'test'))
        _check_choice('split_by', split_by, ('stratified', 'order'))
        if not 0 < test_fraction < 1:
            raise ValueError(f'test_fraction must lie between 0 and 1, got {test_fraction}')
        try:
            from sklearn.model_selection import train_test_split
        except ImportError as error:
            raise ImportError('Digits needs scikit-learn: pip install scikit-learn') from error

        images, labels = _read_digits()
        rows = np.arange(len(labels))
        if split_by == 'stratified':
            train, test = train_test_split(
                rows, test_size=test_fraction, stratify=labels, random_state=seed
            )
        else:
            cut = len(rows) - math.ceil(len(rows) * test_fraction)
            train, test = rows[:cut], rows[cut:]
        chosen = train if split == 'train' else test
        self.images: np.ndarray = images[chosen]  # [N, 8, 8] uint8
        self.labels: list[int] = labels[chosen].tolist()
        self.classes = [str(digit) for digit in range(10)]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[index]), self.labels[index]


# The colour photographs inside scikit-image's wheel. Left out: the right half of the motorcycle's
# stereo pair (the same scene again), drawings, test charts, and what is fetched on first use.
_PHOTOGRAPHS = {
    'astronaut': 'astronaut.png',
    'cat': 'chelsea.png',
    'coffee': 'coffee.png',
    'galaxies': 'hubble_deep_field.jpg',
    'motorcycle': 'motorcycle_left.png',
    'retina': 'retina.jpg',
    'rocket': 'rocket.jpg',
    'tissue': 'ihc.png',
}


@DATASETS.register_module()
class Photographs:
    """Colour crops of the eight photographs bundled with scikit-image, labelled by photograph.

    Training crops come from the left half of each photograph and test crops from the right half,
    so no pixel is in both. Positions are drawn once, from ``seed``.

    Args:
        split: ``'train'`` (left halves) or ``'test'`` (right halves).
        crop_size: Side of the square crops in pixels; at most half the width of the narrowest
            photograph (225).
        crops_per_image: Number of crops of each photograph.
        seed: Seed of the crops' positions.

    Raises:
        ValueError: When ``split`` is unknown, or a crop does not fit into half a photograph.
        ImportError: When scikit-image, or a photograph inside it, is missing.
    """

    def __init__(
        self,
        split: Literal['train', 'test'] = 'train',
        crop_size: int = 32,
        crops_per_image: int = 200,
        seed: int = 0,
    ) -> None:
        _check_choice('split', split, ('train', 'test'))
        for setting, value in (('crop_size', crop_size), ('crops_per_image', crops_per_image)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f'{setting} must be a positive integer, got {value!r}')
        folder = _bundled_folder()
        generator = np.random.default_rng([seed, ('train', 'test').index(split)])
        self.classes = list(_PHOTOGRAPHS)
        self.crop_size = crop_size
        self._halves: list[Image.Image] = []
        self._corners: list[tuple[int, int, int]] = []  # (photograph, left, top) in the half
        for label, name in enumerate(_PHOTOGRAPHS.values()):
            half = _crop_half(folder / name, split)
            room = (half.width - crop_size, half.height - crop_size)
            if min(room) < 0:
                raise ValueError(
                    f'crop_size={crop_size} does not fit into half of {name}, which is '
                    f'{half.width}x{half.height} pixels'
                )
            corners = generator.integers(0, np.array(room) + 1, size=(crops_per_image, 2))
            self._halves.append(half)
            self._corners += [(label, left, top) for left, top in corners.tolist()]
        self.labels: list[int] = [label for label, _, _ in self._corners]

    def __len__(self) -> int:
        return len(self._corners)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        label, left, top = self._corners[index]
        box = (left, top, left + self.crop_size, top + self.crop_size)
        return self._halves[label].crop(box), label


def _bundled_folder() -> Path:
    """The folder of scikit-image's bundled data, found without importing scikit-image."""
    spec = importlib.util.find_spec('skimage')
    if spec is None or not spec.submodule_search_locations:
        raise ImportError('Photographs needs scikit-image: pip install scikit-image')
    return Path(spec.submodule_search_locations[0]) / 'data'


def _crop_half(path: Path, split: str) -> Image.Image:
    """The left (train) or right (test) half of a photograph; a middle column belongs to neither."""
    if not path.is_file():
        raise ImportError(
            f'Photographs needs {path.name}, which the installed scikit-image does not bundle; '
            'install scikit-image 0.22 or newer'
        )
    with Image.open(path) as file:
        photograph = file.convert('RGB')
    half_width = photograph.width // 2
    left = 0 if split == 'train' else photograph.width - half_width
    return photograph.crop((left, 0, left + half_width, photograph.height))
