"""Average precision of detections, by COCO's own evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from mmengine.evaluator import BaseMetric
from torch import Tensor

from memengine.registry import METRICS
from memengine.suggest import import_optional

_KINDS = {'box': 'bbox', 'mask': 'segm'}  # ours and pycocotools'


@METRICS.register_module()
class CocoMetric(BaseMetric):
    """Average precision (AP) of boxes and masks, computed by pycocotools' ``COCOeval``.

    For each image the model returns ``boxes`` [N, 4] (x1, y1, x2, y2), ``labels`` [N] (the file's
    category ids), ``scores`` [N], and ``masks`` [N, 1, H, W] for mask AP, in pixels of the image
    as the file has it, as ``TorchvisionDetector`` does. Reported, in percent: ``box_ap``, the mean
    over IoU 0.50 to 0.95, ``box_ap50`` and ``box_ap75``, and likewise ``mask_ap``. Only images that
    were evaluated count.

    Args:
        annotations: The JSON file with the truth, in COCO's layout.
        kinds: ``'box'``, ``'mask'`` or both.
        prefix: Put before the names, for several such metrics.

    Raises:
        ImportError: When pycocotools is missing.
        ValueError: For another kind, a missing file, or objects without outlines where ``kinds``
            has ``'mask'``; for a model that returns no masks, and images without any object.

    Cost: the detections of all ranks are gathered, masks run-length encoded.
    """

    default_prefix = ''

    def __init__(
        self,
        annotations: str,
        kinds: Sequence[Literal['box', 'mask']] = ('box',),
        prefix: str | None = None,
    ) -> None:
        super().__init__(prefix=prefix)
        if isinstance(kinds, str) or not kinds or not set(kinds) <= set(_KINDS):
            raise ValueError(f"CocoMetric: kinds must be a list of 'box' and 'mask', got {kinds!r}")
        if not Path(annotations).is_file():
            raise ValueError(f'CocoMetric: there is no file annotations={annotations!r}')
        coco = import_optional('pycocotools.coco', 'CocoMetric')
        with redirect_stdout(StringIO()):
            self._truth = coco.COCO(annotations)
            self._complete(annotations, 'mask' in kinds)
            self._truth.createIndex()
        self._encode = coco.maskUtils.encode
        self.annotations, self.kinds = annotations, list(kinds)

    def _complete(self, annotations: str, with_masks: bool) -> None:
        """What COCOeval relies on, in all annotations.

        It takes an object with the id 0 for one that no detection matches, and of objects with the
        same id forgets all but one: they are numbered from 1 on. The figures are of objects of all
        sizes, so that any area will do.
        """
        for number, each in enumerate(self._truth.dataset['annotations'], 1):
            if with_masks and not each.get('segmentation'):
                raise ValueError(
                    f"CocoMetric: kinds has 'mask', and annotation {each['id']} in {annotations!r} "
                    'has no segmentation'
                )
            each.setdefault('iscrowd', 0)
            if 'area' not in each:
                each['area'] = each['bbox'][2] * each['bbox'][3]
            each['id'] = number

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Keep the detections of a batch."""
        for given, found in zip(data_batch['data_samples'], data_samples, strict=True):
            if 'mask' in self.kinds and 'masks' not in found:
                raise ValueError(
                    "CocoMetric: the model returns no masks; set kinds=['box'], or "
                    "model.detector='MaskRCNN'"
                )
            self.results.append((given['image_id'], self._detections(given['image_id'], found)))

    def _detections(self, image_id: int, found: dict[str, Tensor]) -> list[dict[str, Any]]:
        """Detections of an image as COCO writes them: boxes by corner and size, masks encoded."""
        boxes = found['boxes'].double().cpu()
        boxes[:, 2:] -= boxes[:, :2]
        labels, scores = found['labels'].tolist(), found['scores'].tolist()
        detections: list[dict[str, Any]] = [
            {'image_id': image_id, 'category_id': label, 'score': score, 'bbox': box}
            for label, score, box in zip(labels, scores, boxes.tolist(), strict=True)
        ]
        if 'mask' in self.kinds:
            pixels = (found['masks'][:, 0] > 0.5).cpu().numpy().astype(np.uint8)  # [N, H, W]
            for detection, mask in zip(detections, pixels, strict=True):
                detection['segmentation'] = self._encode(np.asfortranarray(mask))
        return detections

    def compute_metrics(self, results: list[tuple[int, list[dict[str, Any]]]]) -> dict[str, float]:
        """AP in percent from all images."""
        self._check_categories()
        by_image = dict(results)
        image_ids = sorted(by_image)
        detections = [each for image_id in image_ids for each in by_image[image_id]]
        if not self._truth.getAnnIds(imgIds=image_ids, iscrowd=False):
            raise ValueError(
                f'CocoMetric: annotations={self.annotations!r} has no object in the '
                f'{len(image_ids)} images that were evaluated, so there is no precision; is it of '
                'the same images as the data set?'
            )
        metrics = {}
        for kind in self.kinds:
            figures = self._precision(kind, detections, image_ids)
            for name, value in zip(('ap', 'ap50', 'ap75'), figures, strict=True):
                metrics[f'{kind}_{name}'] = 100.0 * value
        return metrics

    def _check_categories(self) -> None:
        """Raise ValueError for categories that the data set, whose ids labels are, lacks.

        The figures may be of some of its categories only.
        """
        stated = (self.dataset_meta or {}).get('category_ids')
        ids = {each['name']: each['id'] for each in self._truth.dataset['categories']}
        if stated is not None and not ids.items() <= stated.items():
            raise ValueError(
                f'CocoMetric: annotations={self.annotations!r} has other categories than the data '
                "set's file, or other ids for them: give both the same"
            )

    def _precision(
        self, kind: str, detections: list[dict[str, Any]], image_ids: list[int]
    ) -> list[float]:
        from pycocotools.cocoeval import COCOeval

        if not detections:  # which pycocotools cannot load
            return [0.0, 0.0, 0.0]
        # With both in one entry pycocotools would take a mask's area from its box.
        unused = 'segmentation' if kind == 'box' else 'bbox'
        entries = [{k: v for k, v in each.items() if k != unused} for each in detections]
        with redirect_stdout(StringIO()):
            evaluation = COCOeval(self._truth, self._truth.loadRes(entries), _KINDS[kind])
            evaluation.params.imgIds = image_ids
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        return [float(value) for value in evaluation.stats[:3]]
