"""Views that the model's device makes are those that a worker makes."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from memengine.datasets import BatchedViews, PlainImageDataset, stack_views
from memengine.engine.data_order import SeededDataset
from tests.datasets.batched.test_dataset import CROPS, VIEW, dataset
from tests.datasets.toy import write_folder


def first_batch(data):
    return next(iter(DataLoader(SeededDataset(data, seed=3), 6, collate_fn=stack_views)))


@pytest.mark.parametrize('pipeline', [CROPS[:1], VIEW], ids=['crops', 'one view'])
@pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=pytest.mark.gpu)])
def test_views_are_the_same_wherever_they_are_made(tmp_path, pipeline, device):
    by_worker = first_batch(dataset(tmp_path, [*pipeline, dict(type='PackInputs')]))
    plain = first_batch(PlainImageDataset(dict(type='ImageFolder', root=str(tmp_path))))
    assert plain['inputs'].dtype == torch.uint8 and plain['inputs'].shape == (6, 3, 30, 40)
    made = BatchedViews(pipeline).to(device)(plain, training=True)
    assert made['data_samples'].keys() == by_worker['data_samples'].keys()
    views, expected = made['inputs'], by_worker['inputs']
    if isinstance(expected, torch.Tensor):
        views, expected = [views], [expected]
    assert len(views) == len(expected)
    for view, same in zip(views, expected, strict=True):
        assert view.device.type == device
        torch.testing.assert_close(view.cpu(), same, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_views_are_not_rounded_to_the_precision_of_a_step(tmp_path, dtype):
    """A turned image would be read at places that are off by up to half a pixel in bf16."""
    write_folder(tmp_path, per_class=3)
    plain = first_batch(PlainImageDataset(dict(type='ImageFolder', root=str(tmp_path))))
    turned = dict(type='torchvision/RandomAffine', degrees=20, translate=(0.1, 0.1))
    views = BatchedViews([dict(type='torchvision/RandomResizedCrop', size=16), turned])
    expected = views(plain, training=True)['inputs']
    with torch.autocast('cpu', dtype):
        made = views(plain, training=True)['inputs']
    assert made.dtype == torch.float32 and torch.equal(made, expected)


def test_what_is_not_trained_on_passes_and_foreign_batches_are_refused(tmp_path):
    batch = first_batch(dataset(tmp_path))
    views = BatchedViews(VIEW)
    assert torch.equal(views(batch)['inputs'][0], batch['inputs'][0])
    with pytest.raises(ValueError, match="type='PlainImageDataset'"):
        views(batch, training=True)
    resized = PlainImageDataset(dict(type='ImageFolder', root=str(tmp_path)), size=[8, 6])
    assert resized[0]['inputs'].shape == (3, 8, 6)


def write_jpegs(root):
    """Smooth images of several sizes, in two classes."""
    for number in range(6):
        wide, tall = 40 + 4 * number, 64 - 6 * number
        across = np.linspace(0, 200, wide)[None, :, None]
        up = np.linspace(0, 50, tall)[:, None, None]
        pixels = np.broadcast_to(across + up, (tall, wide, 3)) * np.array([1.0, 0.7, 0.2])
        folder = root / ('a' if number < 3 else 'b')
        folder.mkdir(exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f'{number}.jpg', quality=95)
    return dict(type='ImageFolder', root=str(root))


@pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=pytest.mark.gpu)])
def test_files_that_are_decoded_late_give_the_same_views(tmp_path, device):
    if device == 'cuda' and torch.cuda.get_device_name() == 'Simulated GPU':
        pytest.skip('the simulated GPU has no nvJPEG')
    source = write_jpegs(tmp_path)
    by_worker = first_batch(PlainImageDataset(source, size=[24, 32]))
    files = first_batch(PlainImageDataset(source, size=[24, 32], decode='device'))
    assert files['inputs'].dtype == torch.uint8 and files['inputs'].ndim == 2
    lengths = [path.stat().st_size for path in sorted(tmp_path.rglob('*.jpg'))]
    assert files['data_samples']['jpeg_file'][:, 0].tolist() == lengths
    views = BatchedViews(CROPS[:1]).to(device)
    expected, made = views(by_worker, training=True), views(files, training=True)
    assert made['data_samples'].keys() == expected['data_samples'].keys()
    assert made['data_samples']['label'].tolist() == [0, 0, 0, 1, 1, 1]
    for view, same in zip(made['inputs'], expected['inputs'], strict=True):
        assert view.device.type == device and view.shape == same.shape
        assert (view - same).abs().max() < 0.05  # decoders and resizers round by themselves
    plain = views(files)['inputs']
    assert plain.shape == (6, 3, 24, 32) and plain.dtype == torch.uint8


def test_what_cannot_be_decoded_is_named(tmp_path):
    source = write_jpegs(tmp_path)
    Image.new('RGB', (8, 8)).save(tmp_path / 'a' / '0.jpg', format='PNG')
    whole = (tmp_path / 'b' / '4.jpg').read_bytes()
    (tmp_path / 'b' / '4.jpg').write_bytes(whole[: len(whole) - 100])
    with pytest.raises(ValueError, match=r'sample 0 .*a/0.jpg.*it is a PNG.*takes JPEG files only'):
        PlainImageDataset(source, size=[8, 8], decode='device')[0]
    data = PlainImageDataset(source, size=[8, 8], decode='device', on_error='skip', max_skipped=0.5)
    batch = first_batch(data)
    assert data.skipped == 1
    with pytest.raises(ValueError, match=r'^sample 4 cannot be decoded on cpu'):
        BatchedViews(CROPS[:1])(batch, training=True)


def test_late_decoding_needs_a_size_and_files(tmp_path):
    source = write_jpegs(tmp_path)
    with pytest.raises(ValueError, match=r'needs size=\[height, width\]'):
        PlainImageDataset(source, decode='device')
    with pytest.raises(ValueError, match='a source of files, got size=.* and Digits'):
        PlainImageDataset(dict(type='Digits', split='train'), size=[8, 8], decode='device')
    with pytest.raises(ValueError, match="'worker' or 'device'"):
        PlainImageDataset(source, size=[8, 8], decode='gpu')
