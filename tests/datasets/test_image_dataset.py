import logging
import pickle

import pytest
import torch
from mmengine.dataset import ConcatDataset, RepeatDataset
from mmengine.logging import MMLogger
from mmengine.registry import DefaultScope
from torch.utils.data import DataLoader

from memengine.datasets import ImageDataset, ImageFolder, stack_views
from memengine.registry import DATASETS
from tests.datasets.toy import TO_TENSOR, Colours, error_from, write_folder

PIPELINE = [*TO_TENSOR, dict(type='PackInputs')]


@pytest.fixture
def warnings_logged():
    """The messages that the current MMEngine logger has put out at level WARNING."""
    messages = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = MMLogger.get_current_instance()
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def first_channel(item):
    return round(item['inputs'][0, 0, 0].item() * 255)


def test_items_hold_a_float_image_and_its_labels():
    dataset = ImageDataset(Colours(), PIPELINE)
    item = dataset[3]
    assert item['data_samples'] == {'label': 1, 'index': 3}
    assert type(item['inputs']) is torch.Tensor
    assert item['inputs'].dtype == torch.float32
    expected = torch.tensor([3, 6, 9])[:, None, None].expand(3, 4, 5) / 255
    torch.testing.assert_close(item['inputs'], expected)


def test_it_is_built_from_a_config_with_its_source():
    dataset = DATASETS.build(
        dict(type='ImageDataset', source=dict(type='Digits', split='test'), pipeline=PIPELINE)
    )
    assert len(dataset) == 540
    assert dataset.metainfo == {'classes': [str(d) for d in range(10)]}


@pytest.mark.parametrize(
    'wrap', [lambda it: RepeatDataset(it, times=2), lambda it: ConcatDataset([it, it])]
)
def test_mmengines_wrappers_take_it(wrap):
    digits = dict(type='Digits', split='test')
    inner = dict(type='ImageDataset', source=digits, pipeline=PIPELINE, indices=[5, 7])
    plain = DATASETS.build(inner)
    with DefaultScope.overwrite_default_scope('memengine'):
        dataset = wrap(inner)
    assert len(dataset) == 4
    for index in range(4):
        torch.testing.assert_close(dataset[index]['inputs'], plain[index % 2]['inputs'])


def test_metainfo_may_be_added_to():
    dataset = ImageDataset(Colours(), PIPELINE, metainfo=dict(task='sorting'))
    assert dataset.metainfo == {'classes': ['even', 'odd'], 'task': 'sorting'}


@pytest.mark.parametrize(
    ('indices', 'rows'), [(2, [0, 1]), (-2, [4, 5]), ([5, 0, 5], [5, 0, 5]), (None, list(range(6)))]
)
def test_indices_choose_samples_and_index_counts_them(indices, rows):
    dataset = ImageDataset(Colours(), PIPELINE, indices=indices)
    items = [dataset[i] for i in range(len(dataset))]
    assert [first_channel(item) for item in items] == rows
    assert [item['data_samples']['index'] for item in items] == list(range(len(rows)))


@pytest.mark.parametrize('indices', [0, 7, -7, [6], [-1]])
def test_indices_outside_the_source_are_refused(indices):
    with pytest.raises(ValueError, match='indices'):
        ImageDataset(Colours(), PIPELINE, indices=indices)


def test_an_index_outside_the_dataset_ends_a_loop_over_it():
    assert len(list(ImageDataset(Colours(), PIPELINE, indices=[1, 2]))) == 2
    with pytest.raises(IndexError):
        ImageDataset(Colours(), PIPELINE)[-1]


def test_an_empty_dataset_is_refused():
    with pytest.raises(ValueError, match='empty'):
        ImageDataset(Colours(), PIPELINE, indices=[])


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        (dict(on_error='ignore'), "on_error must be 'stop' or 'skip', got 'ignore'"),
        (dict(max_skipped=12), 'max_skipped must be a share between 0 and 1, got 12'),
        (dict(source=dict(type='Digit')), "source: .*'Digit'; did you mean 'Digits'"),
        (
            dict(source=dict(type='Digits', splitby='order')),
            "no setting 'splitby'; did you mean 'split_by'",
        ),
        (
            dict(source=dict(type='ImageFolder', root='/no/such')),
            r'source \(ImageFolder\): .*set root',
        ),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        ImageDataset(**{'source': Colours(), 'pipeline': PIPELINE, **settings})


def test_a_pipeline_must_end_with_packing():
    with pytest.raises(
        ValueError, match=r'sample 2 of Colours: the pipeline must end with PackInputs.*img'
    ):
        ImageDataset(Colours(), TO_TENSOR)[2]


def test_a_failing_transform_is_named_with_the_sample_and_its_file(tmp_path):
    files = write_folder(tmp_path)
    crop = dict(type='torchvision/RandomCrop', size=64)
    dataset = ImageDataset(dict(type='ImageFolder', root=str(tmp_path)), [crop, *PIPELINE])
    message = rf"sample 2 of ImageFolder, '{files[2]}': pipeline\[0\] \(torchvision/RandomCrop\) "
    message += r'failed on a PIL image of 40x30 pixels .*64'
    with pytest.raises(ValueError, match=message) as caught:
        dataset[2]
    assert '\n' not in str(caught.value)


class TestUnreadableImages:
    @pytest.fixture
    def files(self, tmp_path):
        files = write_folder(tmp_path, per_class=4)
        files[1].write_bytes(b'not a picture')
        files[2].write_bytes(files[2].read_bytes()[:200])
        return files

    def dataset(self, files, max_skipped=0.5, **settings):
        source = ImageFolder(str(files[0].parent.parent))
        return ImageDataset(source, PIPELINE, max_skipped=max_skipped, **settings)

    def test_raise_names_the_file_and_the_remedy(self, files):
        dataset = self.dataset(files)
        message = rf"cannot read sample 1 of ImageFolder, '{files[1]}': .*on_error='skip'"
        with pytest.raises(ValueError, match=message) as caught:
            dataset[1]
        assert '\n' not in str(caught.value)
        assert dataset.skipped == 0

    def test_raise_reaches_the_main_process_with_its_sentence_last(self, files):
        loader = DataLoader(self.dataset(files), 4, num_workers=1, collate_fn=stack_views)
        last = error_from(loader).strip().splitlines()[-1]
        assert last.startswith(f"ValueError: cannot read sample 1 of ImageFolder, '{files[1]}'")

    def test_skip_takes_the_next_readable_sample_and_counts(self, files, warnings_logged):
        dataset = self.dataset(files, on_error='skip')
        samples = [dataset[i]['data_samples'] for i in range(8)]
        assert [sample['index'] for sample in samples] == [0, 3, 3, 3, 4, 5, 6, 7]
        assert [sample['label'] for sample in samples] == [0, 0, 0, 0, 1, 1, 1, 1]
        assert dataset.skipped == 2
        torch.testing.assert_close(dataset[1]['inputs'], dataset[3]['inputs'])
        assert dataset.skipped == 2
        named = [
            [str(file) in message for file in files].index(True) for message in warnings_logged
        ]
        assert named == [1, 2]  # each file once, though sample 2 was met three times

    def test_skip_goes_round_at_the_end(self, tmp_path):
        source = Colours(4, unreadable=(2, 3))
        dataset = ImageDataset(source, PIPELINE, on_error='skip', max_skipped=0.5)
        assert dataset[2]['data_samples']['index'] == 0

    @pytest.mark.parametrize(
        ('start_method', 'workers'),
        [('fork', 2), pytest.param('spawn', 1, marks=pytest.mark.slow)],  # imports torch anew
    )
    def test_what_workers_skip_is_counted_in_the_main_process(self, files, start_method, workers):
        dataset = self.dataset(files, on_error='skip')
        loader = DataLoader(
            dataset,
            batch_size=2,
            num_workers=workers,
            collate_fn=stack_views,
            multiprocessing_context=start_method,
        )
        indices = torch.cat([batch['data_samples']['index'] for batch in loader])
        assert indices.tolist() == [0, 3, 3, 3, 4, 5, 6, 7]
        assert dataset.skipped == 2

    def test_nothing_readable_is_an_error_even_with_skip(self):
        source = Colours(3, unreadable=(0, 1, 2))
        dataset = ImageDataset(source, PIPELINE, on_error='skip', max_skipped=1)
        with pytest.raises(ValueError, match='none of the 3 images of Colours can be read'):
            dataset[0]

    @pytest.mark.fault(
        'images cannot be read, `on_error="skip"`',
        'counted; training stops where they are more than `max_skipped`',
    )
    def test_more_than_a_share_of_unreadable_images_is_an_error(self):
        source = Colours(20, unreadable=(3, 4, 8))
        dataset = ImageDataset(source, PIPELINE, on_error='skip')
        assert [dataset[i]['data_samples']['index'] for i in (3, 4)] == [5, 5]
        message = r'sample 8 of Colours.*that makes 3 of 20 samples, more than max_skipped=0.1'
        with pytest.raises(ValueError, match=message):
            dataset[8]

    def test_other_errors_of_a_source_are_not_skipped(self):
        class Broken(Colours):
            def __getitem__(self, index):
                raise AttributeError('a bug in the source')

        with pytest.raises(AttributeError, match='a bug'):
            ImageDataset(Broken(), PIPELINE, on_error='skip')[0]


def test_seeds_decide_the_crops():
    pipeline = [
        dict(type='torchvision/RandomResizedCrop', size=8),
        dict(type='torchvision/ColorJitter', brightness=0.5, contrast=0.5),
        *PIPELINE,
    ]
    dataset = ImageDataset(dict(type='Photographs', crops_per_image=2), pipeline)

    def draw(seed):
        torch.manual_seed(seed)
        return dataset[5]['inputs']

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_it_can_be_pickled_and_still_counts():
    dataset = pickle.loads(
        pickle.dumps(
            ImageDataset(Colours(3, unreadable=(0,)), PIPELINE, on_error='skip', max_skipped=0.5)
        )
    )
    assert dataset[0]['data_samples']['index'] == 1
    assert dataset.skipped == 1


@pytest.mark.parametrize(
    ('indices', 'said'),
    [(2, '1 of 2 classes'), (-2, '1 of 2 classes'), (3, None), ([0, 1], None), (1, None)],
)
def test_first_samples_of_a_sorted_folder_are_said_to_lack_classes(
    tmp_path, warnings_logged, indices, said
):
    write_folder(tmp_path, ('a', 'b'))
    ImageDataset(
        source=dict(type='ImageFolder', root=str(tmp_path)), pipeline=TO_TENSOR, indices=indices
    )
    found = [text for text in warnings_logged if 'classes' in text]
    assert len(found) == (said is not None)
    assert said is None or f'indices={indices} takes samples of {said}' in found[0]
