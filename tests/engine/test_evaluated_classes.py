"""Folders of validation and test that hold other classes than training."""

import itertools

import pytest
from mmengine.config import Config
from PIL import Image

from memengine.engine import Runner
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
