"""Every config under configs/_base_/datasets builds and gives the batch that it promises."""

from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmengine.runner import Runner

from tests.datasets.toy import write_folder

FOLDER = Path(__file__).parents[2] / 'configs' / '_base_' / 'datasets'

# Shape of every view of a sample, of a validation image, and the sizes of the two splits.
EXPECTED = {
    'digits_dino': ([(1, 16, 16)] * 2, (1, 16, 16), 1257, 540),
    'photographs_dino': ([(3, 32, 32)] * 2 + [(3, 16, 16)] * 4, (3, 32, 32), 1600, 800),
    'imagenet_dino': ([(3, 224, 224)] * 2 + [(3, 96, 96)] * 8, (3, 224, 224), 4, 2),
}


@pytest.fixture(autouse=True)
def scope():
    with DefaultScope.overwrite_default_scope('memengine'):
        yield


@pytest.fixture
def config(request, tmp_path):
    config = Config.fromfile(FOLDER / f'{request.param}.py')
    if request.param == 'imagenet_dino':
        write_folder(tmp_path / 'train', classes=('n01440764', 'n01443537'), size=(300, 260))
        write_folder(
            tmp_path / 'val', classes=('n01440764', 'n01443537'), per_class=1, size=(260, 300)
        )
        val = config.val_dataloader.dataset
        for dataset in (config.train_dataloader.dataset, val.bank, val.queries):
            assert dataset.source.root == 'data/imagenet'
            dataset.source.root = str(tmp_path)
    return config


def load(dataloader, **settings):
    return Runner.build_dataloader(
        {**dataloader, 'num_workers': 0, 'persistent_workers': False, **settings}, seed=0
    )


def test_all_multi_crop_configs_are_tested():
    """The others are tested with the quick starts that use them, in tests/test_configs.py."""
    assert {path.stem for path in FOLDER.glob('*_dino.py')} == set(EXPECTED)


@pytest.mark.parametrize('name', EXPECTED)
def test_it_defines_the_three_loaders_and_nothing_else(name):
    config = Config.fromfile(FOLDER / f'{name}.py')
    assert set(config) == {'train_dataloader', 'val_dataloader', 'test_dataloader'}
    assert config.test_dataloader == config.val_dataloader
    assert config.train_dataloader.batch_size == 64
    loaders = config.train_dataloader, config.val_dataloader
    assert [loader.drop_last for loader in loaders] == [True, False]
    assert [loader.sampler.shuffle for loader in loaders] == [True, False]


@pytest.mark.parametrize(('config', 'name'), [(n, n) for n in EXPECTED], indirect=['config'])
def test_the_training_batch(config, name):
    shapes, _, size, _ = EXPECTED[name]
    loader = load(config.train_dataloader, batch_size=4)
    assert len(loader.dataset) == size
    batch = next(iter(loader))
    assert [tuple(view.shape) for view in batch['inputs']] == [(4, *shape) for shape in shapes]
    assert all(view.dtype == torch.float32 for view in batch['inputs'])
    assert batch['data_samples'].keys() == {'label', 'index'}
    labels = [loader.dataset.source[i][1] for i in batch['data_samples']['index'].tolist()]
    assert batch['data_samples']['label'].tolist() == labels
    one, two = batch['inputs'][:2]
    assert not torch.equal(one, two)


@pytest.mark.parametrize(('config', 'name'), [(n, n) for n in EXPECTED], indirect=['config'])
def test_the_validation_batches(config, name):
    _, shape, bank, queries = EXPECTED[name]
    loader = load(config.val_dataloader)
    assert len(loader.dataset) == bank + queries
    assert len(loader.dataset.metainfo['classes']) == {4: 2, 1600: 8, 1257: 10}[bank]
    batches = list(loader)
    assert {tuple(batch['inputs'].shape[1:]) for batch in batches} == {shape}
    samples = {
        key: torch.cat([batch['data_samples'][key] for batch in batches])
        for key in ('label', 'index', 'bank')
    }
    assert samples['index'].tolist() == list(range(bank + queries))
    assert samples['bank'].tolist() == [True] * bank + [False] * queries
    again = next(iter(load(config.val_dataloader)))
    assert torch.equal(again['inputs'], batches[0]['inputs'])  # nothing random in it


@pytest.mark.parametrize('config', ['digits_dino'], indirect=True)
def test_it_runs_as_it_stands_with_its_worker(config):
    batch = next(iter(Runner.build_dataloader(config.train_dataloader, seed=0)))
    assert [tuple(view.shape) for view in batch['inputs']] == [(64, 1, 16, 16)] * 2


@pytest.mark.parametrize('config', ['photographs_dino'], indirect=True)
def test_the_number_of_local_crops_is_one_setting(config):
    config.merge_from_dict({'train_dataloader.dataset.pipeline.0.views.1.num': 1})
    batch = next(iter(load(config.train_dataloader, batch_size=2)))
    assert [view.shape[-1] for view in batch['inputs']] == [32, 32, 16]


@pytest.mark.parametrize('config', ['imagenet_dino'], indirect=True)
def test_imagenet_views_are_those_of_the_paper(config):
    views = config.train_dataloader.dataset.pipeline[0].views
    assert [group.num for group in views] == [1, 1, 8]
    crops = [group.pipeline[0] for group in views]
    assert [(crop.size, crop.scale) for crop in crops] == [
        (224, (0.4, 1.0)),
        (224, (0.4, 1.0)),
        (96, (0.05, 0.4)),
    ]

    def blur_probability(group):
        steps = [step for step in group.pipeline if 'GaussianBlur' in str(step)]
        assert len(steps) == 1
        return steps[0].get('p', 1.0)

    assert [blur_probability(group) for group in views] == [1.0, 0.1, 0.5]
    solarised = [
        [step.p for step in group.pipeline if step.type == 'torchvision/RandomSolarize']
        for group in views
    ]
    assert solarised == [[], [0.2], []]


@pytest.mark.parametrize('config', ['digits_dino'], indirect=True)
def test_digits_are_not_flipped(config):
    assert 'Flip' not in str(config)
