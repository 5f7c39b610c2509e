import pytest
import torch
from mmengine.registry import DefaultScope

from memengine.datasets import BankAndQueries, ImageDataset
from memengine.registry import DATASETS
from tests.datasets.toy import TO_TENSOR, Colours

PIPELINE = [*TO_TENSOR, dict(type='PackInputs')]


def test_bank_comes_first_and_the_index_is_unique():
    both = BankAndQueries(ImageDataset(Colours(3), PIPELINE), ImageDataset(Colours(2), PIPELINE))
    samples = [item['data_samples'] for item in both]
    assert samples == [
        {'label': 0, 'index': 0, 'bank': True},
        {'label': 1, 'index': 1, 'bank': True},
        {'label': 0, 'index': 2, 'bank': True},
        {'label': 0, 'index': 3, 'bank': False},
        {'label': 1, 'index': 4, 'bank': False},
    ]
    assert both.metainfo == {'classes': ['even', 'odd']}


def test_the_images_are_those_of_the_two_parts():
    bank, queries = ImageDataset(Colours(3), PIPELINE), ImageDataset(Colours(6), PIPELINE)
    both = BankAndQueries(bank, queries)
    assert both[1]['inputs'].equal(bank[1]['inputs'])
    assert both[3 + 5]['inputs'].equal(queries[5]['inputs'])


def test_it_is_built_from_configs():
    def part(split):
        return dict(type='ImageDataset', source=dict(type='Digits', split=split), pipeline=PIPELINE)

    both = DATASETS.build(dict(type='BankAndQueries', bank=part('train'), queries=part('test')))
    assert len(both) == 1797


def test_a_replaced_sample_keeps_its_own_index_and_is_counted():
    queries = ImageDataset(Colours(3, unreadable=(0,)), PIPELINE, on_error='skip', max_skipped=1)
    both = BankAndQueries(ImageDataset(Colours(4), PIPELINE), queries)
    assert both[4]['data_samples'] == {'label': 1, 'index': 5, 'bank': False}
    assert both.skipped == 1


@pytest.mark.parametrize('index', [-1, 5])
def test_an_index_outside_is_refused(index):
    both = BankAndQueries(ImageDataset(Colours(3), PIPELINE), ImageDataset(Colours(2), PIPELINE))
    with pytest.raises(IndexError, match='5 samples'):
        both[index]


@pytest.mark.parametrize('classes', [['odd', 'even'], ['odd']])
def test_queries_are_numbered_as_the_bank(classes):
    bank = ImageDataset(Colours(3), PIPELINE)
    queries = ImageDataset(Colours(len(classes)), PIPELINE, metainfo=dict(classes=classes))
    both = BankAndQueries(bank, queries)
    assert [item['data_samples']['label'] for item in both] == [0, 1, 0, 1, 0][: len(both)]
    both.follow_classes(['none', 'odd', 'even'])
    assert [item['data_samples']['label'] for item in both] == [2, 1, 2, 1, 2][: len(both)]
    assert both.metainfo['classes'] == ['none', 'odd', 'even']


def test_a_class_that_the_bank_lacks_is_refused():
    other = ImageDataset(Colours(2), PIPELINE, metainfo=dict(classes=['even', 'uneven']))
    with pytest.raises(ValueError, match="queries: there is a class 'uneven' that the bank lacks"):
        BankAndQueries(ImageDataset(Colours(3), PIPELINE), other)


def test_foreign_queries_must_have_the_banks_classes():
    class Foreign:
        metainfo = dict(classes=['odd', 'even'])

    with pytest.raises(ValueError, match=r'same classes .* \(even, odd, \.\.\.\) and 2 \(odd, ev'):
        BankAndQueries(ImageDataset(Colours(3), PIPELINE), Foreign())


def test_errors_say_which_part_is_wrong():
    bank = ImageDataset(Colours(3), PIPELINE)
    wrong = dict(type='ImageDataset', source=dict(type='Digits', split='val'), pipeline=PIPELINE)
    with pytest.raises(
        ValueError, match=r'queries \(ImageDataset\): source \(Digits\): split must be'
    ):
        BankAndQueries(bank, wrong)


def concat(datasets):
    with DefaultScope.overwrite_default_scope('memengine'):
        return DATASETS.build(dict(type='ConcatDataset', datasets=datasets))


def colours(size):
    return dict(type='ImageDataset', source=Colours(size), pipeline=PIPELINE)


def test_samples_of_several_data_sets_keep_numbers_of_their_own():
    """k-NN takes what has the same number for a repetition, and does not count it."""
    both = BankAndQueries(concat([colours(3), colours(2)]), concat([colours(2), colours(2)]))
    assert [item['data_samples']['index'] for item in both] == list(range(9))
    assert both.sample_name(4) == 'sample 1 of Colours'
    both.follow_classes(['odd', 'even'])
    assert [item['data_samples']['label'] for item in both] == [1, 0, 1, 1, 0, 1, 0, 1, 0]
    assert both.metainfo['classes'] == ['odd', 'even']


def test_data_that_are_held_in_memory_are_not_written_to():
    class Held(torch.utils.data.Dataset):
        metainfo = dict(classes=['even', 'odd'])
        items = (dict(inputs=None, data_samples=dict(label=0, index=0)),)

        def __len__(self):
            return 1

        def __getitem__(self, index):
            return self.items[index]

    both = BankAndQueries(ImageDataset(Colours(3), PIPELINE), Held())
    assert [both[3]['data_samples']['index'] for _ in range(2)] == [3, 3]
    assert Held.items[0]['data_samples'] == dict(label=0, index=0)
