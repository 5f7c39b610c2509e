"""Streams: who reads what, resuming, commands that fail, broken samples."""

import os
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from PIL import Image

from memengine.datasets import StreamedImageDataset
from memengine.engine import Runner
from memengine.engine.data_order import batches_from
from tests.datasets.test_shards import png, write
from tests.datasets.toy import TO_TENSOR

PIPELINE = [*TO_TENSOR, dict(type='PackInputs', keys=('label', 'index', 'img_path'))]


def shards(folder, number=6, each=4):
    """Tar files whose sample number n is of brightness and label n; a pattern for all."""
    for shard in range(number):
        files = {}
        for n in range(shard * each, (shard + 1) * each):
            files.update({f'{n:03d}.png': png(n), f'{n:03d}.cls': b'%d' % n, f'{n:03d}.txt': b'x'})
        write(folder / f'{shard}.tar', files)
    return f'pipe:cat {folder}/{{0..{number - 1}}}.tar'


def stream(pattern, length=24, resample=False, **options):
    source = dict(type='ShardStream', shards=pattern, resample=resample)
    return StreamedImageDataset(source, PIPELINE, length, **{'shuffle_buffer': 5, **options})


def labels_of(dataset, places, epoch=0):
    return [dataset.read(place, epoch)['data_samples']['label'] for place in places]


def loader(dataset, workers, shuffle=False):
    sampler = dict(type='DefaultSampler', shuffle=shuffle)
    settings = dict(batch_size=2, num_workers=workers, sampler=sampler, drop_last=True)
    settings['collate_fn'] = dict(type='stack_views')
    return Runner.build_dataloader(dict(dataset=dataset, **settings), seed=3)


def test_readers_share_the_shards_and_any_place_can_be_gone_on_from(tmp_path):
    pattern = shards(tmp_path).removeprefix('pipe:cat ')
    orders = []
    for epoch in (0, 1):
        dataset = stream(pattern, shuffle_buffer=0)
        dataset.read_by(seed=1, ranks=2, workers=3, batch_size=2)
        orders.append(labels_of(dataset, range(24), epoch))
        assert sorted(orders[-1]) == list(range(24)), 'each once, where readers have equally many'
        by_reader = [
            orders[-1][rank::2][2 * worker :: 6] for rank in (0, 1) for worker in (0, 1, 2)
        ]
        assert len({label // 4 for part in by_reader for label in part}) == 6
    assert orders[0] != orders[1]
    for options in (dict(), dict(resample=True)):
        whole, later = stream(pattern, **options), stream(pattern, **options)
        for dataset in (whole, later):
            dataset.read_by(seed=1, ranks=2, workers=2, batch_size=2)
        assert labels_of(later, range(13, 24), 2) == labels_of(whole, range(24), 2)[13:]
    drawn = Counter(label // 4 for label in labels_of(stream(pattern, 60, True), range(60)))
    assert set(drawn) == set(range(6)) and len(set(drawn.values())) > 1, drawn


def test_fewer_shards_than_readers_are_shared(tmp_path):
    dataset = stream(shards(tmp_path, number=2, each=6), 12, shuffle_buffer=0)
    dataset.read_by(seed=0, ranks=1, workers=4, batch_size=3)
    assert sorted(labels_of(dataset, range(12))) == list(range(12))


@pytest.mark.parametrize('buffer', [3, 5, 1000])
def test_a_pass_holds_each_sample_once_however_large_the_buffer(tmp_path, buffer):
    dataset = stream(shards(tmp_path), 48, shuffle_buffer=buffer)
    dataset.read_by(seed=0, ranks=1, workers=2, batch_size=3)
    labels = labels_of(dataset, range(48))
    passes = labels[:24], labels[24:]
    assert all(sorted(each) == list(range(24)) for each in passes) and passes[0] != passes[1]


@pytest.mark.parametrize('workers', [0, 2])
def test_batches_of_workers_go_on_in_mid_epoch(tmp_path, workers):
    dataset = stream(shards(tmp_path), shuffle_buffer=3)
    whole = loader(dataset, workers)
    whole.dataset.dataset.read(0, 1)  # opens a pipe, which workers must not read from
    whole.sampler.set_epoch(1)
    batches = [batch['data_samples']['img_path'] for batch in whole]
    assert len(batches) == 12 and len({*chain(*batches)}) > 12
    resumed = loader(stream(shards(tmp_path), shuffle_buffer=3), workers)
    resumed.sampler.set_epoch(1)
    after = [batch['data_samples']['img_path'] for batch in batches_from(resumed, 5)]
    assert after == batches[5:]


def test_a_shuffled_sampler_is_refused(tmp_path):
    with pytest.raises(ValueError, match='shuffle=False'):
        loader(stream(shards(tmp_path, 1)), 0, shuffle=True)


@pytest.mark.parametrize(
    ('command', 'said'),
    [
        ('cat none.tar', 'failed with exit status 1: .*none.tar'),
        ('no-such-program', 'failed with exit status 127'),
        ('cat 0.tar; exit 3', r"'pipe:cat 0.tar; exit 3' failed with exit status 3$"),
        ('false | cat 0.tar', 'failed with exit status 1'),
        ('head -c 4608 0.tar; exit 3', 'failed with exit status 3'),
        ('head -c 4096 0.tar', 'is no whole tar file: it is cut off'),
        ('head -c 4700 0.tar', 'is no whole tar file'),
        ('head -c 4096 0.tar; printf %9000d 1', 'is no whole tar file: it is cut off, or no tar'),
        ('tar cf - --files-from /dev/null', 'holds no .jpg'),
    ],
)
def test_a_source_that_breaks_off_is_an_error_that_names_it(tmp_path, monkeypatch, command, said):
    shards(tmp_path, number=1)
    monkeypatch.chdir(tmp_path)
    dataset = stream(f'pipe:{command}', on_error='skip', max_skipped=1)
    with pytest.raises(ValueError, match=said):
        labels_of(dataset, range(24))


def test_a_command_that_nobody_reads_from_is_ended(tmp_path):
    shards(tmp_path, number=1, each=40)
    dataset = stream(f'pipe:echo $$ > {tmp_path}/pid; cat {tmp_path}/0.tar; exec sleep 60')
    dataset[0]
    process = int((tmp_path / 'pid').read_text())
    os.kill(process, 0)
    del dataset
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.parametrize('workers', [0, 1])
def test_broken_samples_are_skipped_and_counted(tmp_path, workers):
    files = {f'{n:02d}.png': png(n) for n in range(20)}
    write(tmp_path / 'a.tar', {**files, '07.png': b'torn'}, 'w:gz')
    dataset = stream(str(tmp_path / 'a.tar'), 20, on_error='skip', shuffle_buffer=0)
    batches = loader(dataset, workers)
    seen = torch.cat([batch['inputs'][:, 0, 0, 0] for batch in batches])
    assert (seen * 255).round().int().tolist() == [*range(7), 8, *range(8, 20)]
    assert batches.dataset.skipped == 1
    with pytest.raises(ValueError, match="sample 7 of ShardStream, '.*a.tar:07': cannot identify"):
        labels_of(stream(str(tmp_path / 'a.tar'), shuffle_buffer=0), range(20))


def test_hugging_face_streams(tmp_path):
    datasets = pytest.importorskip('datasets', reason='datasets is not installed')
    features = datasets.Features(
        image=datasets.Image(),
        label=datasets.ClassLabel(names=['no', 'yes']),
        text=datasets.Value('string'),
    )
    for file in range(3):
        images = [Image.fromarray(np.full((4, 5, 3), 8 * file + n, np.uint8)) for n in range(8)]
        columns = dict(
            image=images, label=[n % 2 for n in range(8)], text=[str(n) for n in range(8)]
        )
        datasets.Dataset.from_dict(columns, features).to_parquet(tmp_path / f'{file}.parquet')

    def made(buffer=4):
        source = dict(type='HuggingFaceStream', path=str(tmp_path), label='label', caption='text')
        return StreamedImageDataset(source, PIPELINE, 24, shuffle_buffer=buffer)

    dataset = made(buffer=0)
    assert dataset.metainfo['classes'] == ['no', 'yes']
    dataset.read_by(seed=0, ranks=3, workers=2, batch_size=4)
    items = [dataset.read(place, 0) for place in range(24)]
    assert len({float(item['inputs'].mean()) for item in items}) == 24, 'six readers of three files'
    batches = [batch['inputs'] for batch in loader(made(), 2)]
    values = (torch.cat(batches)[:, 0, 0, 0] * 255).round().int().tolist()
    assert values != sorted(values)
    resumed = [batch['inputs'] for batch in batches_from(loader(made(), 2), 7)]
    assert all(map(torch.equal, resumed, batches[7:])) and len(resumed) == 5
    with pytest.raises(ValueError, match="there is no column 'lable'.*'label'"):
        StreamedImageDataset(
            dict(type='HuggingFaceStream', path=str(tmp_path), label='lable'), PIPELINE, 1
        )
