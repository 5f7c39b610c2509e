"""Views that the model's device makes are those that a worker makes."""

import pytest
import torch
from torch.utils.data import DataLoader

from memengine.datasets import BatchedViews, PlainImageDataset, stack_views
from memengine.engine.data_order import SeededDataset
from tests.datasets.batched.test_dataset import CROPS, VIEW, dataset


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


def test_what_is_not_trained_on_passes_and_foreign_batches_are_refused(tmp_path):
    batch = first_batch(dataset(tmp_path))
    views = BatchedViews(VIEW)
    assert torch.equal(views(batch)['inputs'][0], batch['inputs'][0])
    with pytest.raises(ValueError, match="type='PlainImageDataset'"):
        views(batch, training=True)
    resized = PlainImageDataset(dict(type='ImageFolder', root=str(tmp_path)), size=[8, 6])
    assert resized[0]['inputs'].shape == (3, 8, 6)
