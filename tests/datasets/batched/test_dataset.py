"""A dataset that augments batches: the same sample in any batch, worker and run."""

import pytest
import torch
from torch.utils.data import DataLoader

from memengine.datasets import BatchedImageDataset, ImageDataset, stack_views
from memengine.engine.data_order import ResumableSampler, SeededDataset, batches_from
from tests.datasets.toy import TO_TENSOR, Colours, write_folder

VIEW = [
    dict(type='torchvision/RandomResizedCrop', size=8, scale=(0.3, 1.0), interpolation='bicubic'),
    dict(type='torchvision/RandomHorizontalFlip'),
    *TO_TENSOR,
    dict(
        type='torchvision/RandomApply',
        p=0.5,
        transforms=[dict(type='torchvision/ColorJitter', brightness=0.4, hue=0.1)],
    ),
    dict(type='torchvision/GaussianNoise', sigma=0.1),
    dict(type='torchvision/Normalize', mean=[0.5, 0.5, 0.5], std=[0.5, 0.5, 0.5]),
]
SMALL = [dict(VIEW[0], size=4), *VIEW[1:]]
CROPS = [
    dict(type='MultiCrop', views=[dict(num=2, pipeline=VIEW), dict(num=3, pipeline=SMALL)]),
    dict(type='PackInputs'),
]


def dataset(tmp_path, pipeline=CROPS, **options):
    if not (tmp_path / 'cat').exists():
        write_folder(tmp_path, per_class=6)
    source = dict(type='ImageFolder', root=str(tmp_path))
    return BatchedImageDataset(source=source, pipeline=pipeline, **options)


def flat(batch):
    return torch.cat([view.flatten(1) for view in batch['inputs']], 1)


def test_views_of_several_sizes(tmp_path):
    data = SeededDataset(dataset(tmp_path), seed=3)
    batch = next(iter(DataLoader(data, batch_size=5, collate_fn=stack_views)))
    assert [list(view.shape) for view in batch['inputs']] == [[5, 3, 8, 8]] * 2 + [[5, 3, 4, 4]] * 3
    assert batch['data_samples']['index'].tolist() == [0, 1, 2, 3, 4]
    assert batch['data_samples']['label'].tolist() == [0] * 5
    assert len(torch.stack(batch['inputs'][:2]).flatten(0, 1).unique(dim=0)) == 10


@pytest.mark.parametrize('workers', [0, 2])
def test_a_sample_is_the_same_in_any_batch_worker_and_run(tmp_path, workers):
    data = SeededDataset(dataset(tmp_path), seed=3, workers=workers)

    def passed(batch_size, start=0, epoch=1):
        sampler = ResumableSampler(range(11, -1, -1), 12)
        loader = DataLoader(
            data, batch_size, sampler=sampler, collate_fn=stack_views, num_workers=workers
        )
        sampler.set_epoch(epoch)
        return torch.cat([flat(batch) for batch in batches_from(loader, start)])

    whole = passed(4)
    torch.testing.assert_close(passed(12), whole, atol=1e-5, rtol=0)
    torch.testing.assert_close(passed(1), whole, atol=1e-5, rtol=0)
    assert torch.equal(passed(4, start=2), whole[8:])
    assert not torch.allclose(passed(4, epoch=2), whole, atol=1e-2)


def test_one_view_and_plain_access(tmp_path):
    data = dataset(tmp_path, [*VIEW, dict(type='PackInputs', keys=['label', 'index', 'img_path'])])
    torch.manual_seed(0)
    first = data[7]
    torch.manual_seed(0)
    assert torch.equal(first['inputs'], data[7]['inputs'])
    assert not torch.equal(first['inputs'], data[7]['inputs'])
    assert first['inputs'].shape == (3, 8, 8)
    assert first['data_samples']['img_path'].endswith('dog/1.png')


def test_without_randomness_it_is_the_plain_dataset(tmp_path):
    pipeline = [
        dict(type='torchvision/CenterCrop', size=20),
        *TO_TENSOR,
        dict(type='torchvision/Normalize', mean=[0.5, 0.4, 0.3], std=[0.5, 0.4, 0.3]),
        dict(type='PackInputs'),
    ]
    batched = dataset(tmp_path, pipeline)
    plain = ImageDataset(source=batched.source, pipeline=pipeline)
    for mine, item in zip(
        batched.__getitems__(range(12)), map(plain.__getitem__, range(12)), strict=True
    ):
        torch.testing.assert_close(mine['inputs'], item['inputs'])
        assert mine['data_samples'] == item['data_samples']


def test_images_of_several_sizes_keep_their_places():
    source = Colours(sizes=[(5, 4), (9, 9), (5, 4), (9, 9), (7, 4)])
    resize = [dict(type='torchvision/Resize', size=[6, 6]), *TO_TENSOR, dict(type='PackInputs')]
    data = BatchedImageDataset(source=source, pipeline=resize)
    items = data.__getitems__([4, 1, 0, 3, 2])
    assert [item['data_samples']['index'] for item in items] == [4, 1, 0, 3, 2]
    for item, index in zip(items, [4, 1, 0, 3, 2], strict=True):
        colour = torch.tensor([index, 2 * index, 3 * index]) / 255
        torch.testing.assert_close(item['inputs'], colour[:, None, None].expand(3, 6, 6))


def test_an_unreadable_image_is_skipped_or_named():
    pipeline = [*TO_TENSOR, dict(type='PackInputs')]
    source = Colours(size=20, unreadable=(1,))
    data = BatchedImageDataset(source=source, pipeline=pipeline, on_error='skip')
    assert [each['data_samples']['index'] for each in data.__getitems__([0, 1])] == [0, 2]
    data = BatchedImageDataset(source=source, pipeline=pipeline)
    with pytest.raises(ValueError, match='sample 1 of Colours: sample 1 is torn'):
        data.__getitems__([0, 1])


def test_a_transform_that_fails_is_named():
    pipeline = [dict(type='torchvision/RandomCrop', size=50), *TO_TENSOR, dict(type='PackInputs')]
    with pytest.raises(ValueError, match=r'sample 0.*1 more.*pipeline\[0\] .*RandomCrop.*larger'):
        BatchedImageDataset(source=Colours(), pipeline=pipeline).__getitems__([0, 1])


@pytest.mark.parametrize(
    ('transform', 'said'),
    [
        (dict(type='torchvision/RandomPerspective'), 'RandomPerspective.*no batched form.*ColorJ'),
        (dict(type='TimmRandAugment', policy='rand-m9', image_size=8), 'TimmRandAugment.*no batc'),
        (dict(type='torchvision/RandomAffine', degrees=3, fill=9), 'no batched form with fill=9'),
        (
            dict(
                type='torchvision/RandomApply',
                transforms=[dict(type='torchvision/JPEG', quality=9)],
            ),
            'holds JPEG, which has no batched form',
        ),
        (
            dict(type='MultiCrop', views=[dict(num=1, pipeline=[lambda results: results])]),
            r"views\[0\].pipeline\[0\].*no batched form; take it out, or use type='ImageDataset'",
        ),
    ],
)
def test_what_has_no_batched_form_is_refused(transform, said):
    with pytest.raises(ValueError, match=said):
        BatchedImageDataset(source=Colours(), pipeline=[transform, dict(type='PackInputs')])


def test_order_of_transforms_is_checked():
    normalise = VIEW[-1]
    with pytest.raises(ValueError, match=r'pipeline\[1\] .*before torchvision/Normalize'):
        BatchedImageDataset(
            source=Colours(), pipeline=[normalise, VIEW[0], dict(type='PackInputs')]
        )
    with pytest.raises(
        ValueError, match=r'views\[0\].pipeline\[0\] .*before torchvision/Normalize'
    ):
        crops = dict(type='MultiCrop', views=[dict(num=1, pipeline=[VIEW[0]])])
        BatchedImageDataset(source=Colours(), pipeline=[normalise, crops, dict(type='PackInputs')])
    with pytest.raises(ValueError, match='must end with PackInputs'):
        BatchedImageDataset(source=Colours(), pipeline=[normalise])
