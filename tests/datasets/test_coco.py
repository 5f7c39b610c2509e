"""COCO's layout: objects as the file has them, transformed together with their image."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from memengine.datasets import CocoDetection, list_samples

HEIGHT, WIDTH = 10, 12


def annotation(number, image_id, box, **others):
    x, y, w, h = box
    outline = [x, y, x + w, y, x + w, y + h, x, y + h]
    return dict(
        dict(id=number, image_id=image_id, category_id=7, bbox=box, area=w * h, iscrowd=0),
        segmentation=[outline],
        **others,
    )


@pytest.fixture
def coco(tmp_path):
    """Image 5 has two objects, 3 none but a crowd and a line, 8 one that touches the border."""
    annotations = [
        annotation(1, 5, [1, 2, 4, 3]),
        annotation(2, 5, [6, 0, 3, 8]) | dict(category_id=2),
        annotation(3, 3, [0, 0, 5, 5])
        | dict(iscrowd=1, segmentation=dict(counts=[0, 20, 100], size=[HEIGHT, WIDTH])),
        annotation(4, 3, [2, 2, 0, 4]),
        annotation(5, 8, [8, 6, 4, 4]),
    ]
    images = []
    for image_id in (8, 5, 3):
        name = f'{image_id}.png'
        pixels = np.full((HEIGHT, WIDTH, 3), 10 * image_id, np.uint8)
        pixels[:, 0] = 0  # so that left and right can be told apart
        Image.fromarray(pixels).save(tmp_path / name)
        images.append(dict(id=image_id, file_name=name, height=HEIGHT, width=WIDTH))
    categories = [dict(id=2, name='cat'), dict(id=7, name='dog')]
    file = tmp_path / 'instances.json'
    file.write_text(json.dumps(dict(images=images, annotations=annotations, categories=categories)))
    return dict(root=str(tmp_path), annotations=str(file))


def test_an_item_holds_what_the_file_says(coco):
    dataset = CocoDetection(**coco, masks=True)
    assert len(dataset) == 3
    assert dataset.metainfo == {'classes': ['cat', 'dog'], 'category_ids': {'cat': 2, 'dog': 7}}
    item = dataset[1]  # images in the order of their ids: 3, 5, 8
    image, sample = item['inputs'], item['data_samples']
    assert type(image) is torch.Tensor and image.dtype == torch.float32
    assert torch.allclose(image[:, :, 1:], torch.tensor(50 / 255))
    assert (sample['image_id'], sample['index']) == (5, 1)
    assert sample['boxes'].tolist() == [[1, 2, 5, 5], [6, 0, 9, 8]]
    assert sample['boxes'].dtype == torch.float32
    assert sample['labels'].tolist() == [7, 2]
    assert sample['masks'].dtype == torch.bool
    expected = torch.zeros(2, HEIGHT, WIDTH, dtype=torch.bool)
    expected[0, 2:5, 1:5] = expected[1, :8, 6:9] = True
    assert torch.equal(sample['masks'], expected)
    assert all(type(value) in (torch.Tensor, int) for value in sample.values())
    assert 'masks' not in CocoDetection(**coco)[1]['data_samples']


def test_a_flip_turns_objects_with_their_image(coco):
    flip = [dict(type='torchvision/RandomHorizontalFlip', p=1.0)]
    item = CocoDetection(**coco, masks=True, transforms=flip)[1]
    image, sample = item['inputs'], item['data_samples']
    assert image[:, :, -1].max() == 0 < image[:, :, :-1].min()
    assert sample['boxes'].tolist() == [[7, 2, 11, 5], [3, 0, 6, 8]]
    plain = CocoDetection(**coco, masks=True)[1]['data_samples']
    assert torch.equal(sample['masks'], plain['masks'].flip(2))


def test_boxes_of_whole_numbers_are_not_cut_to_whole_pixels(coco):
    half = [dict(type='torchvision/Resize', size=[HEIGHT // 2, WIDTH // 2])]
    boxes = CocoDetection(**coco, transforms=half)[1]['data_samples']['boxes']
    assert boxes.dtype == torch.float32
    assert boxes.tolist() == [[0.5, 1, 2.5, 2.5], [3, 0, 4.5, 4]]


def test_images_without_objects_are_kept_or_left_out(coco):
    empty = CocoDetection(**coco, masks=True)[0]['data_samples']
    assert empty['image_id'] == 3
    assert [tuple(empty[k].shape) for k in ('boxes', 'labels', 'masks')] == [
        (0, 4),
        (0,),
        (0, HEIGHT, WIDTH),
    ]
    annotated = CocoDetection(**coco, only_annotated=True)
    assert [item['data_samples']['image_id'] for item in annotated] == [5, 8]
    assert [item['data_samples']['image_id'] for item in CocoDetection(**coco, indices=[2])] == [8]


def test_a_batch_is_lists(coco):
    items = list(CocoDetection(**coco))
    batch = list_samples(items)
    assert batch['inputs'][2] is items[2]['inputs']
    assert [sample['image_id'] for sample in batch['data_samples']] == [3, 5, 8]


def test_what_is_missing_is_named(coco, tmp_path):
    with pytest.raises(ValueError, match='set annotations to instances_'):
        CocoDetection(coco['root'], str(tmp_path / 'none.json'))
    with pytest.raises(ValueError, match='set root to where the images lie'):
        CocoDetection(str(tmp_path / 'none'), coco['annotations'])
    with pytest.raises(ValueError, match=r'transforms\[0\].*did you mean'):
        CocoDetection(**coco, transforms=[dict(type='torchvision/RandomHorizontalFlipp')])
    with pytest.raises(ValueError, match='must be one of torchvision/<Name>'):
        CocoDetection(**coco, transforms=[dict(type='PackInputs')])
    (tmp_path / '5.png').unlink()
    with pytest.raises(ValueError, match=r'cannot read image 5, .*5\.png'):
        CocoDetection(**coco)[1]


def change(coco, change_it):
    """Change what the file says."""
    content = json.loads(Path(coco['annotations']).read_text())
    change_it(content)
    Path(coco['annotations']).write_text(json.dumps(content))


def test_an_image_of_another_size_than_annotated_is_refused(coco):
    """Turned by its EXIF where it was annotated, say: masks would be folded to another shape."""
    for numbers in ((WIDTH, HEIGHT), (2 * HEIGHT, 2 * WIDTH)):
        change(coco, lambda it, n=numbers: it['images'][1].update(height=n[0], width=n[1]))
        for masks in (False, True):
            with pytest.raises(ValueError, match=r'5\.png.* has 12x10 pixels, and annotations say'):
                CocoDetection(**coco, masks=masks)[1]
    for unknown in (None, 0):
        change(coco, lambda it, n=unknown: it['images'][1].update(height=n, width=n))
        assert len(CocoDetection(**coco)[1]['data_samples']['boxes']) == 2
    change(coco, lambda it: [it['images'][1].pop(name) for name in ('height', 'width')])
    assert len(CocoDetection(**coco)[1]['data_samples']['boxes']) == 2
    with pytest.raises(ValueError, match='masks=True: image 5 has no width and height'):
        CocoDetection(**coco, masks=True)


def test_objects_of_one_id_stay_with_their_images(coco):
    """As in files that were put together out of two."""
    change(coco, lambda it: it['annotations'][0].update(id=5))
    dataset = CocoDetection(**coco)
    assert dataset[1]['data_samples']['boxes'].tolist() == [[1, 2, 5, 5], [6, 0, 9, 8]]
    assert dataset[2]['data_samples']['boxes'].tolist() == [[8, 6, 12, 10]]


def test_objects_need_not_say_that_they_are_no_crowd(coco):
    change(coco, lambda it: it['annotations'][0].pop('iscrowd'))
    assert len(CocoDetection(**coco)[1]['data_samples']['boxes']) == 2


@pytest.mark.parametrize(
    ('change_it', 'said'),
    [
        (lambda it: it['images'][0].update(id=5), 'several of the images have the id 5'),
        (lambda it: it['categories'][0].update(id=7), 'several of the categories have the id 7'),
        (lambda it: it['annotations'][0].update(category_id=3), 'annotation 1 has the category_id'),
        (lambda it: it['annotations'][1].update(segmentation=[]), 'annotation 2 has no segmentati'),
        (lambda it: it['annotations'][1].pop('segmentation'), 'annotation 2 has no segmentation'),
    ],
)
def test_entries_that_do_not_fit_are_named(coco, change_it, said):
    change(coco, change_it)
    with pytest.raises(ValueError, match=said):
        CocoDetection(**coco, masks=True)


def test_a_missing_library_names_its_package(coco, monkeypatch):
    monkeypatch.setitem(sys.modules, 'pycocotools.coco', None)
    with pytest.raises(ImportError, match='pip install pycocotools'):
        CocoDetection(**coco)
