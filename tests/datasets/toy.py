"""Small sources and folders that the tests of datasets share."""

import hashlib
import pickle

import numpy as np
import torchvision
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


def write_cifar(root, monkeypatch, name, counts, paint=None):
    """CIFAR's pickles with a few images of ten classes; torchvision's list of checksums is patched.

    Args:
        paint: Gives the image [32, 32, 3] of a label; random pixels by default.
    """
    reader = getattr(torchvision.datasets, name)
    folder = root / reader.base_folder
    folder.mkdir()
    label_key = {'CIFAR10': 'labels', 'CIFAR100': 'fine_labels'}[name]
    meta_key = reader.meta['key']
    generator = np.random.default_rng(0)

    def write(file, entry):
        data = pickle.dumps(entry)
        (folder / file).write_bytes(data)
        return [file, hashlib.md5(data).hexdigest()]

    def batch(file):
        labels = [i % 10 for i in range(counts)]
        rows = generator.integers(0, 256, (counts, 3072), dtype=np.uint8)
        if paint is not None:
            rows = np.stack([paint(label).transpose(2, 0, 1).reshape(-1) for label in labels])
        return write(file, {'data': rows, label_key: labels})

    monkeypatch.setattr(reader, 'train_list', [batch(file) for file, _ in reader.train_list])
    monkeypatch.setattr(reader, 'test_list', [batch(file) for file, _ in reader.test_list])
    file, digest = write(reader.meta['filename'], {meta_key: [f'class{i}' for i in range(10)]})
    monkeypatch.setattr(reader, 'meta', {'filename': file, 'key': meta_key, 'md5': digest})
    return folder


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
