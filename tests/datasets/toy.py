"""Small sources and folders that the tests of datasets share."""

import numpy as np
from PIL import Image

TO_TENSOR = [
    dict(type='torchvision/ToImage'),
    dict(type='torchvision/ToDtype', dtype='float32', scale=True),
]


class Colours:
    """Flat images, sample i of the colour (i, 2i, 3i); ``sizes`` holds (width, height) of each."""

    classes = ['even', 'odd']

    def __init__(self, size=6, sizes=None, unreadable=()):
        self.sizes = sizes or [(5, 4)] * size
        self.unreadable = unreadable

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        if index in self.unreadable:
            raise OSError(f'sample {index} is torn')
        return Image.new('RGB', self.sizes[index], (index, 2 * index, 3 * index)), index % 2


def write_folder(root, classes=('cat', 'dog'), per_class=2, size=(40, 30), seed=0):
    """An ImageFolder of random images; returns its files in order."""
    generator = np.random.default_rng(seed)
    files = []
    for name in classes:
        (root / name).mkdir(parents=True)
        for number in range(per_class):
            files.append(root / name / f'{number}.png')
            pixels = generator.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
            Image.fromarray(pixels).save(files[-1])
    return files


def error_from(loader):
    """What a data loader's error says.

    Its traceback is let go of: in a cycle it would keep the loader, whose workers then take five
    seconds to end when the garbage is collected.
    """
    try:
        list(loader)
    except ValueError as error:
        error.with_traceback(None)
        return str(error)
    raise AssertionError('the data loader raised no error')
