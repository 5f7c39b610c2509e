import pytest
import torch
from mmengine.registry import FUNCTIONS as ROOT_FUNCTIONS
from torch.utils.data import DataLoader

from memengine.datasets import ImageDataset, stack_views
from memengine.registry import FUNCTIONS
from tests.datasets.toy import TO_TENSOR, Colours, error_from


def item(inputs, index=0, **samples):
    return {'inputs': inputs, 'data_samples': {'label': index % 2, 'index': index, **samples}}


def test_images_are_stacked_and_labels_become_tensors():
    batch = stack_views([item(torch.full((3, 4, 5), float(i)), i, bank=i > 0) for i in range(3)])
    assert batch['inputs'].shape == (3, 3, 4, 5)
    assert batch['inputs'][:, 0, 0, 0].tolist() == [0, 1, 2]
    samples = batch['data_samples']
    assert {key: value.tolist() for key, value in samples.items()} == {
        'label': [0, 1, 0],
        'index': [0, 1, 2],
        'bank': [False, True, True],
    }
    assert {key: value.dtype for key, value in samples.items()} == {
        'label': torch.int64,
        'index': torch.int64,
        'bank': torch.bool,
    }


def test_views_become_a_list_of_batches():
    views = [[torch.full((1, s, s), 10.0 * i + s) for s in (8, 8, 4)] for i in range(2)]
    batch = stack_views([item(view, i) for i, view in enumerate(views)])
    assert [tuple(view.shape) for view in batch['inputs']] == [
        (2, 1, 8, 8),
        (2, 1, 8, 8),
        (2, 1, 4, 4),
    ]
    assert batch['inputs'][2][:, 0, 0, 0].tolist() == [4, 14]


def test_strings_stay_a_list():
    batch = stack_views([item(torch.zeros(1, 2, 2), i, img_path=f'{i}.png') for i in range(2)])
    assert batch['data_samples']['img_path'] == ['0.png', '1.png']


def test_a_ragged_batch_names_the_sample_and_the_remedy():
    batch = [
        item(torch.zeros(3, 4, 4), 7),
        item(torch.zeros(3, 4, 4), 8),
        item(torch.zeros(3, 4, 9), 9),
    ]
    message = r'^sample 9 has the shape \[3, 4, 9\], but sample 7 has \[3, 4, 4\].*Crop\(size='
    with pytest.raises(ValueError, match=message):
        stack_views(batch)


def test_a_ragged_view_is_named():
    batch = [
        item([torch.zeros(3, 4, 4), torch.zeros(3, 2, 2)]),
        item([torch.zeros(3, 4, 4), torch.zeros(3, 3, 2)], 1),
    ]
    with pytest.raises(ValueError, match=r'^view 1 of sample 1 has the shape \[3, 3, 2\]'):
        stack_views(batch)


@pytest.mark.parametrize('dtype', [torch.float32, torch.int64, torch.uint8])
def test_sequences_are_not_filled_up_unasked(dtype):
    batch = [item(torch.ones(length, dtype=dtype), length) for length in (5, 7)]
    with pytest.raises(ValueError, match=r'sample 7 has the shape \[7\].*\[5\].*one shape'):
        stack_views(batch)


def test_different_channels_have_another_remedy():
    with pytest.raises(ValueError, match='number of channels with torchvision/'):
        stack_views([item(torch.zeros(3, 4, 4)), item(torch.zeros(1, 4, 4), 1)])


def test_different_numbers_of_views_are_named():
    with pytest.raises(
        ValueError, match=r"sample 1 has 1 views, but sample 0 has 2.*MultiCrop.views' num"
    ):
        stack_views([item([torch.zeros(3, 4, 4)] * 2), item([torch.zeros(3, 4, 4)], 1)])


def test_different_labels_are_named():
    with pytest.raises(
        ValueError, match=r"sample 1 has the data_samples \['bank', 'index', 'label'\], but"
    ):
        stack_views([item(torch.zeros(1, 2, 2)), item(torch.zeros(1, 2, 2), 1, bank=True)])


@pytest.mark.parametrize('workers', [0, 1])
def test_images_of_different_sizes_fail_in_a_loader_with_the_sample(workers):
    source = Colours(sizes=[(5, 4), (5, 4), (6, 4), (5, 4)])
    dataset = ImageDataset(source, [*TO_TENSOR, dict(type='PackInputs')])
    loader = DataLoader(dataset, 4, collate_fn=stack_views, num_workers=workers)
    assert 'sample 2 has the shape [3, 4, 6]' in error_from(loader)


def test_it_is_found_by_name():
    assert FUNCTIONS.get('stack_views') is stack_views
    assert FUNCTIONS.get('memengine.stack_views') is stack_views
    assert ROOT_FUNCTIONS.get('stack_views') is stack_views
