"""Readers of files that are damaged at random: each reads, or says which file it cannot read."""

import functools
import io
import json
import random
import tempfile
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save

from memengine.datasets import ImageDataset
from memengine.datasets.coco import CocoDetection
from memengine.datasets.text import TextBlocks
from memengine.datasets.tokenizers import TransformersTokenizer
from memengine.engine.checkpoint.checksums import CHECKSUMS_FILE
from memengine.engine.checkpoint.latest import find_latest
from memengine.engine.checkpoint.sharded import read_sharded
from memengine.engine.checkpoint.weights import read_file
from memengine.engine.config.file import load_config
from tests.engine.toy import toy_runner

NAMED = (ValueError, OSError)  # CheckpointError and ConfigError are ValueErrors


def checkpoint():
    file = io.BytesIO()
    torch.save({'meta': {'iter': 3}, 'state_dict': {'w': torch.arange(40.0)}}, file)
    return file.getvalue()


def old_checkpoint():
    file = io.BytesIO()
    torch.save({'w': torch.arange(9.0)}, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def image(kind):
    file = io.BytesIO()
    Image.effect_noise((12, 9), 50).convert('RGB').save(file, kind)
    return file.getvalue()


def read_image(path):
    source = {'type': 'ImageFolder', 'root': str(path.parent.parent)}
    to_float = {'type': 'torchvision/ToDtype', 'dtype': 'float32', 'scale': True}
    pipeline = [{'type': 'torchvision/ToImage'}, to_float, {'type': 'PackInputs'}]
    return ImageDataset(source, pipeline)[0]


def coco():
    box = {'id': 1, 'image_id': 1, 'category_id': 1, 'bbox': [0, 0, 2, 2], 'area': 4, 'iscrowd': 0}
    images = [{'id': 1, 'file_name': 'x.png', 'width': 12, 'height': 9}]
    content = {'images': images, 'annotations': [box], 'categories': [{'id': 1, 'name': 'cat'}]}
    return json.dumps(content).encode()


def read_coco(path):
    (path.parent / 'x.png').write_bytes(image('PNG'))
    return CocoDetection(str(path.parent), str(path))[0]


def read_pointer(path):
    (path.parent / 'iter_1.pth').write_bytes(checkpoint())
    return find_latest(path.parent)


@functools.cache
def run():
    """A run, and the files of its checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        runner = toy_runner(folder, train_cfg=dict(by_epoch=True, max_epochs=1))
        runner.train()
        for kind in ('a.pth', 'a.dcp'):
            runner.save_checkpoint(folder, kind)()
        found = [*Path(folder).glob('a.dcp/*'), Path(folder, 'a.pth')]
        return runner, {path.name: path.read_bytes() for path in found}


def part(name):
    return lambda: run()[1][name]


def read_with_checksums(path):
    return run()[0].load_checkpoint(str(path))


def complete(folder, but=()):
    for name, content in run()[1].items():
        if name not in but and not (folder / name).exists():
            (folder / name).write_bytes(content)
    return folder


def read_folder_with_checksums(path):
    return run()[0].load_checkpoint(str(complete(path.parent)))


def read_folder(path):
    return read_sharded(complete(path.parent, but=[CHECKSUMS_FILE]))


def tokenizer():
    ids = {'[PAD]': 0, '[UNK]': 1, 'cat': 2}
    words = {'type': 'WordLevel', 'vocab': ids, 'unk_token': '[UNK]'}
    content = {'added_tokens': [], 'pre_tokenizer': {'type': 'Whitespace'}, 'model': words}
    return json.dumps({'version': '1.0', **content}).encode()


def tokenizer_config():
    return b'{"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}'


def read_tokenizer(path):
    pytest.importorskip('transformers')
    for name, make in (
        ('tokenizer.json', tokenizer),
        ('tokenizer_config.json', tokenizer_config),
    ):
        if name != path.name:
            (path.parent / name).write_bytes(make())
    return TransformersTokenizer(str(path.parent), 4)('cat')


PARTS = ('.metadata', 'run.pth', '__0_0.distcp')

READERS = {
    'checkpoint.pth': (checkpoint, lambda path: read_file(str(path))),
    'old.pth': (old_checkpoint, lambda path: read_file(str(path))),
    'weights.safetensors': (
        lambda: save({'w': torch.arange(40.0)}),
        lambda path: read_file(str(path)),
    ),
    'config.py': (lambda: b"model = dict(type='DINO')\nseed = [1, 2]\n", load_config),
    'config.json': (lambda: b'{"model": {"type": "DINO"}, "resume": false}', load_config),
    'config.yaml': (lambda: b'model:\n  type: DINO\nresume: false\n', load_config),
    'photos/cat/x.png': (lambda: image('PNG'), read_image),
    'photos/cat/x.jpg': (lambda: image('JPEG'), read_image),
    'photos/cat/x.webp': (lambda: image('WEBP'), read_image),
    'photos/cat/x.tiff': (lambda: image('TIFF'), read_image),
    'coco.json': (coco, read_coco),
    'text.txt': (
        lambda: b'some text that is long enough' * 3,
        lambda path: TextBlocks(str(path), 8)[0],
    ),
    'run/last_checkpoint': (lambda: b'iter_1.pth', read_pointer),
    'a.pth': (part('a.pth'), read_with_checksums),
    **{
        f'listed.dcp/{name}': (part(name), read_folder_with_checksums)
        for name in (*PARTS, CHECKSUMS_FILE)
    },
    **{f'unlisted.dcp/{name}': (part(name), read_folder) for name in PARTS},
    'words/tokenizer.json': (tokenizer, read_tokenizer),
    'words/tokenizer_config.json': (tokenizer_config, read_tokenizer),
}


def damaged(content, draw):
    """The content cut off, with some bits flipped, or something else in its place."""
    match draw.randrange(5):
        case 0:
            return content[: draw.randrange(len(content))]
        case 1:
            return draw.randbytes(draw.randrange(200))
        case 2:
            return draw.choice(list(READERS.values()))[0]()
        case _:
            changed = bytearray(content)
            for _ in range(draw.choice([1, 1, 3, 20])):
                changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
            return bytes(changed)


def fuzz(name, tmp_path, times):
    make, read = READERS[name]
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(make())
    read(path)
    draw, refused = random.Random(name), 0
    for number in range(times):
        path.write_bytes(damaged(make(), draw))
        try:
            read(path)
        except NAMED as error:
            refused += 1
            if path.name not in str(error) and f'{path.parent}' not in str(error):
                raise AssertionError(f'damage {number}: the file is not named') from error
    return refused


@pytest.mark.parametrize('name', READERS)
def test_a_damaged_file_is_read_or_named(name, tmp_path):
    assert fuzz(name, tmp_path, 12)


@pytest.mark.slow
@pytest.mark.fault('Any file that is read is cut off, changed or another one', 'read, or named')
@pytest.mark.parametrize('name', READERS)
def test_many_damaged_files_are_read_or_named(name, tmp_path):
    assert fuzz(name, tmp_path, 150)
