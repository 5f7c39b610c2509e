"""Folders of validation and test that hold other classes than training."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from mmengine.config import Config
from PIL import Image

from memengine.engine import Runner
from memengine.registry import DATASETS
from tests.engine.faults.faulty import FaultyBackbone

_COUNT = itertools.count()
GREY = [dict(type=f'torchvision/{kind}') for kind in ('Grayscale', 'PILToTensor')]
PIPELINE = [*GREY, dict(type='torchvision/ToDtype', dtype='float32'), dict(type='PackInputs')]


def loader(tmp_path, classes):
    """Of two images of each class."""
    root = tmp_path / '-'.join(classes)
    for name in classes:
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(2):
            Image.new('RGB', (8, 8)).save(root / name / f'{number}.png')
    return dict(
        dataset=dict(
            type='ImageDataset', source=dict(type='ImageFolder', root=str(root)), pipeline=PIPELINE
        ),
        sampler=dict(type='DefaultSampler', shuffle=False),
        batch_size=2,
        num_workers=0,
        collate_fn=dict(type='default_collate'),
    )


def build(tmp_path, trained='abc', evaluated='bc', metric='AccuracyMetric', **cfg):
    evaluation = dict(evaluator=dict(type=metric), dataloader=loader(tmp_path, evaluated), cfg={})
    loops = ('val', 'test')
    backbone = dict(type=FaultyBackbone)
    defaults = dict(
        model=dict(type='Classifier', backbone=backbone, num_classes=3),
        work_dir=str(tmp_path),
        train_dataloader=loader(tmp_path, trained),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)),
        **{f'{loop}_{key}': value for loop in loops for key, value in evaluation.items()},
        log_level='WARNING',
        experiment_name=f'classes{next(_COUNT)}',
    )
    return Runner.from_cfg(Config({**defaults, **cfg}))


def labels(dataset):
    return [item['data_samples']['label'] for item in dataset]


def test_evaluated_labels_are_those_of_the_training_classes(tmp_path):
    runner = build(tmp_path)
    runner.train()
    assert labels(runner.val_dataloader.dataset) == [1, 1, 2, 2]
    runner = build(tmp_path, load_from=str(tmp_path / 'epoch_1.pth'))
    runner.test()
    assert labels(runner.test_dataloader.dataset) == [1, 1, 2, 2]
    assert runner.test_evaluator.dataset_meta['classes'] == ['a', 'b', 'c']


@pytest.mark.parametrize('evaluated', [['a', 'b', 'zz'], ['xx', 'yy']])
def test_a_class_that_training_lacks_is_refused_before_it(tmp_path, evaluated):
    runner = build(tmp_path, evaluated=evaluated)
    named = 'zz' if 'zz' in evaluated else r"xx' \(and 1 more\)"
    with pytest.raises(ValueError, match=f"val_dataloader.dataset: there is a class '{named}"):
        runner.train()
    assert runner.iter == 0


@pytest.mark.parametrize('unnamed', ['trained', 'evaluated'])
def test_numbers_that_stand_for_names_are_left_as_they_are(tmp_path, unnamed):
    runner = build(tmp_path, **{unnamed: '012'})
    runner.train()
    assert (
        labels(runner.val_dataloader.dataset)[::2] == [0, 1, 2][: 3 if unnamed != 'trained' else 2]
    )


def test_classes_of_anothers_checkpoint_may_be_called_otherwise(tmp_path):
    build(tmp_path).train()
    runner = build(tmp_path, evaluated=['xx', 'yy'], load_from=str(tmp_path / 'epoch_1.pth'))
    runner.test()
    assert labels(runner.test_dataloader.dataset) == [0, 0, 1, 1]


@DATASETS.register_module()
class Categories(list):
    """Samples of a file whose categories have ids of their own."""

    def __init__(self, ids):
        super().__init__(
            dict(inputs=torch.zeros(1, 8, 8), data_samples=dict(label=0, index=row))
            for row in range(4)
        )
        self.metainfo = dict(classes=list(ids), category_ids=ids)


@pytest.mark.parametrize(
    ('evaluated', 'said'),
    [
        (dict(cat=2, dog=1), "val_dataloader.dataset: the category 'cat' has the id 2.*is 1; a d"),
        (dict(cow=1), "'cow' has the id 1, which in training is that of 'cat'"),
        (dict(dog=2, cow=3), ''),
    ],
)
def test_categories_have_the_ids_of_training(tmp_path, evaluated, said):
    """Other files may number the same categories otherwise, and a detector learns numbers."""
    loaders = {
        loop: {**loader(tmp_path, 'a'), 'dataset': dict(type=Categories, ids=ids)}
        for loop, ids in (('train', dict(cat=1, dog=2)), ('val', evaluated), ('test', evaluated))
    }
    cfg = {f'{loop}_dataloader': its for loop, its in loaders.items()}
    runner = build(tmp_path, **cfg)
    with pytest.raises(ValueError, match=said) if said else nullcontext():
        runner.train()
    assert runner.iter == (0 if said else 2)


@pytest.mark.parametrize(
    ('now', 'numbers', 'said'),
    [
        ('abc', [0, 1, 2], None),
        ('abcd', [0, 1, 2, 3], None),
        ('ac', [0, 2], 'gone: b'),
        ('0abc', [3, 0, 1, 2], 'new: 0'),
        ('0ab', [3, 0, 1], 'new: 0; gone: c'),
    ],
)
def test_resumed_labels_keep_their_numbers(tmp_path, now, numbers, said):
    build(tmp_path).train()
    evaluation = dict(val_dataloader=None, val_evaluator=None, val_cfg=None)
    runner = build(tmp_path, trained=now, resume=True, **evaluation)
    runner.train()
    assert labels(runner.train_dataloader.dataset)[::2] == numbers
    log = max(tmp_path.glob('*/*.log'), key=lambda path: path.stat().st_mtime)
    warned = [line for line in log.read_text().splitlines() if 'labels keep' in line]
    assert len(warned) == (said is not None)
    assert all(f'({said});' in line for line in warned)


def test_resumed_classes_in_another_order_keep_their_numbers(tmp_path):
    build(tmp_path).train()
    named = loader(tmp_path, 'abc')
    named['dataset']['metainfo'] = dict(classes=['c', 'a', 'b'])
    runner = build(tmp_path, train_dataloader=named, resume=True)
    runner.train()
    assert labels(runner.train_dataloader.dataset)[::2] == [2, 0, 1]
