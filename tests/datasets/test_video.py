"""Frames of videos as views: which are drawn, and that those are read."""

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from memengine.datasets import BatchedImageDataset, ImageDataset, PlainImageDataset, VideoFrames
from memengine.engine.data_order import DrawnIndex, SeededDataset
from tests.datasets.toy import TO_TENSOR

LENGTH, STEP = 20, 12  # frame i is a flat grey of 12 i, which compression does not blur away


def write_video(path, length=LENGTH, codec='mp4v'):
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*codec), 25, (32, 24))
    assert writer.isOpened()
    for number in range(length):
        frame = np.full((24, 32, 3), STEP * number, np.uint8)
        frame[..., 0] = 0  # no blue, so that the order of colours shows
        writer.write(frame)
    writer.release()


def write_frames(folder, length=LENGTH):
    folder.mkdir(parents=True)
    for number in range(length):
        grey = STEP * number
        Image.new('RGB', (32, 24), (grey, grey, 0)).save(folder / f'{number:04d}.png')


def places_of(frames):
    """Which frames these are, by their colour."""
    arrays = [np.asarray(frame, float) for frame in frames]
    assert all(array[..., 2].mean() < 20 for array in arrays), 'RGB'
    return [round(array[..., 0].mean() / STEP) for array in arrays]


@pytest.mark.parametrize('kind', ['mp4', 'avi', 'folder'])
def test_the_frames_that_are_drawn_are_read(tmp_path, kind):
    if kind == 'folder':
        write_frames(tmp_path / 'clip')
    else:
        write_video(tmp_path / f'clip.{kind}', codec='mp4v' if kind == 'mp4' else 'MJPG')
    source = VideoFrames(str(tmp_path), frames=3, distance=(2, 7))
    assert len(source) == 1 and source.classes == [] and source.path(0).startswith(str(tmp_path))
    seen = set()
    for seed in range(30):
        torch.manual_seed(seed)
        expected = source._places(LENGTH)
        torch.manual_seed(seed)
        frames, label = source[0]
        assert places_of(frames) == expected and label == -1
        seen.update(np.diff(expected).tolist())
        assert expected[0] >= 0 and expected[-1] < LENGTH
    assert seen == {2, 3, 4, 5, 6, 7}
    middle, _ = VideoFrames(str(tmp_path), frames=1)[0]
    assert places_of([middle]) == [LENGTH // 2]


def test_short_videos_and_those_that_are_too_short(tmp_path):
    write_frames(tmp_path / 'clip', length=5)
    torch.manual_seed(0)
    assert places_of(VideoFrames(str(tmp_path), frames=3, distance=30)[0][0]) == [0, 2, 4]
    with pytest.raises(OSError, match='5 frames, fewer than the 6'):
        VideoFrames(str(tmp_path), frames=6)[0]


def test_what_is_no_video_is_a_broken_sample(tmp_path):
    write_video(tmp_path / 'a.mp4')
    (tmp_path / 'b.mp4').write_bytes(b'no video')
    with pytest.raises(OSError, match='0 frames, fewer than the 2'):
        VideoFrames(str(tmp_path))[1]
    with pytest.raises(OSError, match='max_pixels=100'):
        VideoFrames(str(tmp_path), max_pixels=100)[0]
    pipeline = [*TO_TENSOR, dict(type='PackInputs')]
    source = dict(type='VideoFrames', root=str(tmp_path))
    dataset = ImageDataset(source, pipeline, on_error='skip', max_skipped=0.5)
    assert dataset[1]['data_samples']['index'] == 0 and dataset.skipped == 1


def test_folders_are_classes_when_asked(tmp_path):
    write_frames(tmp_path / 'walk' / 'one', length=3)
    write_video(tmp_path / 'run' / 'two.mp4', length=3)
    source = VideoFrames(str(tmp_path), labelled=True)
    assert source.classes == ['run', 'walk'] and source.labels == [0, 1] and source[1][1] == 1
    write_video(tmp_path / 'three.mp4', length=3)
    with pytest.raises(ValueError, match='three.mp4.* lies in no folder of a class'):
        VideoFrames(str(tmp_path), labelled=True)


@pytest.mark.parametrize(
    ('options', 'reason'),
    [
        (dict(frames=0), 'frames must be at least 1'),
        (dict(distance=0), 'distance must be a number of frames'),
        (dict(distance=(5, 2)), 'distance must be a number of frames'),
        (dict(), 'no .mp4'),
    ],
)
def test_settings_that_cannot_be(tmp_path, options, reason):
    with pytest.raises(ValueError, match=reason):
        VideoFrames(str(tmp_path), **options)


def crops(*numbers):
    return [
        dict(type='MultiCrop', views=[dict(num=number, pipeline=TO_TENSOR) for number in numbers]),
        dict(type='PackInputs'),
    ]


def test_each_view_is_of_another_frame_and_of_the_sample_s_seed(tmp_path):
    write_frames(tmp_path / 'clip')
    dataset = ImageDataset(
        dict(type='VideoFrames', root=str(tmp_path), distance=[5, 9]), crops(2, 3)
    )
    seeded = SeededDataset(dataset, seed=0)

    def views(epoch):
        inputs = seeded[DrawnIndex(0, epoch)]['inputs']
        return [round(255 * float(view[0].mean()) / STEP) for view in inputs]

    first, second, *local = views(0)
    assert 5 <= second - first <= 9 and local == [first, second, first]
    assert views(0) == [first, second, *local] != views(1)


@pytest.mark.parametrize('kind', [BatchedImageDataset, PlainImageDataset])
def test_whole_batches_take_no_frames(tmp_path, kind):
    write_frames(tmp_path / 'clip')
    options = dict(pipeline=crops(2)) if kind is BatchedImageDataset else {}
    dataset = kind(dict(type='VideoFrames', root=str(tmp_path)), **options)
    with pytest.raises(ValueError, match="frames of a video become views by type='ImageDataset'"):
        dataset[0]
