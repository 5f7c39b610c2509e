"""Average precision by COCO's own evaluation, against figures that follow from its definition."""

import json
import sys
from pathlib import Path

import pytest
import torch

from memengine.evaluation import CocoMetric

SIZE = 100
BOXES = {1: [10, 10, 40, 40], 2: [20, 30, 50, 50]}  # x, y, width, height of each image's object


def outline(x, y, width, height):
    return [x, y, x + width, y, x + width, y + height, x, y + height]


@pytest.fixture
def annotations(tmp_path):
    truth = dict(
        images=[dict(id=i, height=SIZE, width=SIZE) for i in (1, 2, 3)],
        categories=[dict(id=7, name='thing')],
        annotations=[
            dict(
                id=i,
                image_id=i,
                category_id=7,
                bbox=box,
                area=box[2] * box[3],
                iscrowd=0,
                segmentation=[outline(*box)],
            )
            for i, box in BOXES.items()
        ],
    )
    file = tmp_path / 'instances.json'
    file.write_text(json.dumps(truth))
    return str(file)


def found(boxes, scores=None, label=7):
    """What a model returns of an image: boxes by corner and size, and masks that fill them."""
    corners = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    corners[:, 2:] += corners[:, :2]
    masks = torch.zeros(len(corners), 1, SIZE, SIZE)
    for mask, (x1, y1, x2, y2) in zip(masks, corners.int().tolist(), strict=True):
        mask[0, y1:y2, x1:x2] = 1
    scores = torch.tensor(scores if scores is not None else [0.9] * len(corners))
    labels = torch.full((len(corners),), label)
    return dict(boxes=corners, labels=labels, scores=scores, masks=masks)


def evaluate(metric, predictions):
    for image_id, prediction in predictions.items():
        metric.process(dict(data_samples=[dict(image_id=image_id)]), [prediction])
    return metric.evaluate(len(predictions))


def test_what_is_right_is_a_hundred(annotations):
    metric = CocoMetric(annotations, kinds=['box', 'mask'])
    metrics = evaluate(metric, {i: found([box]) for i, box in BOXES.items()} | {3: found([])})
    names = [f'{kind}_{name}' for kind in ('box', 'mask') for name in ('ap', 'ap50', 'ap75')]
    assert metrics == pytest.approx(dict.fromkeys(names, 100.0))


def test_an_overlap_counts_up_to_its_share(annotations):
    """Boxes of IoU 0.72: right at the thresholds 0.50 to 0.70, 5 of the 10."""
    predictions = {}
    for i, (x, y, width, height) in BOXES.items():
        predictions[i] = found([[x, y, width * 0.72, height]])
    metrics = evaluate(CocoMetric(annotations), predictions)
    assert metrics == pytest.approx({'box_ap': 50.0, 'box_ap50': 100.0, 'box_ap75': 0.0})


def test_masks_and_boxes_count_by_themselves(annotations):
    predictions = {i: found([box]) for i, box in BOXES.items()}
    for prediction in predictions.values():
        prediction['masks'] = prediction['masks'].roll(SIZE // 2, dims=3)
    metrics = evaluate(CocoMetric(annotations, kinds=['box', 'mask']), predictions)
    assert metrics['box_ap'] == pytest.approx(100.0)
    assert metrics['mask_ap'] == 0.0


def test_wrong_classes_and_missed_objects_cost(annotations):
    boxes = {i: found([box], label=3) for i, box in BOXES.items()}
    assert evaluate(CocoMetric(annotations), boxes)['box_ap'] == 0.0
    nothing = {i: found([]) for i in BOXES}
    assert evaluate(CocoMetric(annotations, prefix='a'), nothing)['a/box_ap'] == 0.0
    half = {1: found([BOXES[1]]), 2: found([])}
    share = 100 * 51 / 101  # of the 101 places of recall at which precision is read
    assert evaluate(CocoMetric(annotations), half)['box_ap'] == pytest.approx(share)


def test_only_evaluated_images_count(annotations):
    metrics = evaluate(CocoMetric(annotations), {1: found([BOXES[1]])})
    assert metrics['box_ap'] == pytest.approx(100.0)


@pytest.mark.parametrize('ids', [(0, 1), (4, 4)])
def test_any_ids_of_objects_give_the_same(annotations, ids):
    """COCOeval takes 0 for no object at all, and forgets one of two with the same id."""
    content = json.loads(Path(annotations).read_text())
    for each, number in zip(content['annotations'], ids, strict=True):
        each['id'] = number
        del each['area'], each['iscrowd']  # which some programs leave out
    Path(annotations).write_text(json.dumps(content))
    metric = CocoMetric(annotations, kinds=['box', 'mask'])
    metrics = evaluate(metric, {i: found([box]) for i, box in BOXES.items()})
    assert metrics['box_ap'] == metrics['mask_ap'] == pytest.approx(100.0)


def test_images_without_objects_have_no_precision(annotations):
    with pytest.raises(ValueError, match='no object in the 1 images that were evaluated'):
        evaluate(CocoMetric(annotations), {3: found([BOXES[1]])})


def test_a_file_of_other_categories_than_the_data_is_refused(annotations):
    metric = CocoMetric(annotations)
    for more in ({}, {'other': 9}):
        metric.dataset_meta = dict(category_ids={'thing': 7, **more})
        assert evaluate(metric, {1: found([BOXES[1]])})['box_ap'] == pytest.approx(100.0)
    metric.dataset_meta = dict(category_ids={'thing': 1})
    with pytest.raises(ValueError, match="has other categories than the data set's file"):
        evaluate(metric, {1: found([BOXES[1]])})


def test_masks_need_outlines(annotations):
    content = json.loads(Path(annotations).read_text())
    content['annotations'][1]['segmentation'] = []
    Path(annotations).write_text(json.dumps(content))
    CocoMetric(annotations)
    with pytest.raises(ValueError, match='annotation 2 in .* has no segmentation'):
        CocoMetric(annotations, kinds=['mask'])


def test_what_does_not_fit_is_refused(annotations, monkeypatch):
    for kinds in ('box', [], ['boxes']):
        with pytest.raises(ValueError, match="kinds must be a list of 'box' and 'mask'"):
            CocoMetric(annotations, kinds=kinds)
    with pytest.raises(ValueError, match='there is no file annotations'):
        CocoMetric(annotations + 'x')
    boxes_only = found([BOXES[1]])
    del boxes_only['masks']
    with pytest.raises(ValueError, match='the model returns no masks'):
        evaluate(CocoMetric(annotations, kinds=['mask']), {1: boxes_only})
    monkeypatch.setitem(sys.modules, 'pycocotools.coco', None)
    with pytest.raises(ImportError, match='pip install pycocotools'):
        CocoMetric(annotations)
