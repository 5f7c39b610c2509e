"""Detection and segmentation data in COCO's layout, read by pycocotools and transformed by v2.

Shapes: N objects of an image.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.registry import FUNCTIONS as ROOT_FUNCTIONS
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from memengine.datasets.build import build, one_line
from memengine.datasets.image_dataset import positions
from memengine.datasets.sources.folders import MOST_PIXELS, load_rgb
from memengine.datasets.transforms.torchvision_v2 import TorchvisionTransform
from memengine.registry import DATASETS, FUNCTIONS, TRANSFORMS, TransformConfig
from memengine.suggest import import_optional

# What reading content of another form ends with.
_MALFORMED = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError),
    *(TypeError, ValueError),
)


def _read(annotations: str) -> Any:
    """The annotations as pycocotools has them, without what it prints."""
    library = import_optional('pycocotools.coco', 'CocoDetection')
    if not Path(annotations).is_file():
        raise ValueError(
            f'there is no file {annotations!r}; set annotations to instances_*.json of the split'
        )
    try:
        with redirect_stdout(StringIO()):
            coco = library.COCO(annotations)
        _check_entries(coco.dataset)
    except _MALFORMED as error:
        raise ValueError(
            f'{annotations!r} holds no instances of COCO: {one_line(error)}'
        ) from error
    return coco


def _check_entries(content: Mapping[str, Any]) -> None:
    """Look at what is read later of each image, object and category; no crowd is the default."""
    for image in content['images']:
        Path(image['file_name'])
        operator.index(image['id'])
    for category in content['categories']:
        operator.index(category['id'])
        str(category['name'])
    for kind in ('images', 'categories'):
        counts = Counter(each['id'] for each in content[kind])
        if again := [number for number, count in counts.items() if count > 1]:
            raise ValueError(f'several of the {kind} have the id {again[0]}')
    known = {each['id'] for each in content['categories']}
    for each in content['annotations']:
        x, y, width, height = map(float, each['bbox'])
        if not math.isfinite(x + y + width + height):
            raise ValueError(f'the box {each["bbox"]} is not finite')
        each.setdefault('iscrowd', 0)
        for key in ('category_id', 'image_id', 'iscrowd'):
            operator.index(each[key])
        if each['category_id'] not in known:
            raise ValueError(
                f'annotation {each["id"]} has the category_id {each["category_id"]}, which none of '
                'the categories has'
            )


@DATASETS.register_module()
class CocoDetection(Dataset):
    """Images with boxes, labels and masks: ``instances_*.json`` and the folder of its images.

    An item is ``dict(inputs=..., data_samples=...)``: the image, float [C, H, W] with values of 0
    to 1, and a dict with ``boxes`` float [N, 4] (x1, y1, x2, y2 in pixels), ``labels`` Long[N] (the
    file's category ids), ``image_id`` and ``index``. Crowds, and boxes without area, are left out.
    An image has to be of the size that the file says, if it says one.

    Args:
        root: The folder of the images.
        annotations: The JSON file.
        masks: Whether ``data_samples`` holds ``masks`` Bool[N, H, W], too.
        only_annotated: Leave out images without objects, as for training.
        transforms: Configs of torchvision's transforms (``torchvision/RandomHorizontalFlip``, ...),
            each called with the image and its objects together. For evaluation they must leave
            the image's size, which the metric's annotations are for.
        indices: Which of the images to use: a list of positions, or a number for the first so
            many (negative: the last). Defaults to all.
        max_pixels: An image of more pixels is refused.

    Raises:
        ImportError: When pycocotools is missing.
        ValueError: For a missing file or folder, entries that do not fit each other, a transform
            that is none of torchvision's; on access, for an image that cannot be read or has
            another size (names the file).
    """

    def __init__(
        self,
        root: str,
        annotations: str,
        masks: bool = False,
        only_annotated: bool = False,
        transforms: Sequence[TransformConfig] = (),
        indices: int | Sequence[int] | None = None,
        max_pixels: int = MOST_PIXELS,
    ) -> None:
        self._max_pixels = max_pixels
        self._coco = _read(annotations)
        self._root = Path(root)
        if not self._root.is_dir():
            raise ValueError(f'there is no folder {root!r}; set root to where the images lie')
        ids = sorted(self._coco.getImgIds())
        if only_annotated:
            ids = [image_id for image_id in ids if self._objects(image_id)]
        self._ids = [ids[position] for position in positions(indices, len(ids))]
        if not self._ids:
            raise ValueError(f'the dataset is empty: {annotations!r} or indices holds no image')
        self._masks = masks
        if masks:
            self._check_outlines(annotations)
        self._transform = v2.Compose(
            [_build(cfg, f'transforms[{i}]') for i, cfg in enumerate(transforms)]
            + [
                v2.ToImage(),
                v2.ToDtype({tv_tensors.Image: torch.float32, 'others': None}, scale=True),
            ]
        )
        categories = self._coco.loadCats(self._coco.getCatIds())
        self.metainfo = {
            'classes': [category['name'] for category in categories],
            'category_ids': {category['name']: category['id'] for category in categories},
        }

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The item at ``index``."""
        image_id = self._ids[index]
        try:
            image = load_rgb(self._file(image_id), self._max_pixels)
        except OSError as error:
            raise ValueError(f'cannot read {self.sample_name(index)}: {error}') from error
        objects = self._objects(image_id)
        size = (image.height, image.width)
        self._check_size(index, size)
        corners = torch.tensor([each['bbox'] for each in objects], dtype=torch.float32)
        corners = corners.reshape(-1, 4)
        corners[:, 2:] += corners[:, :2]
        sample: dict[str, Any] = {
            'boxes': tv_tensors.BoundingBoxes(corners, format='XYXY', canvas_size=size),
            'labels': torch.tensor([each['category_id'] for each in objects], dtype=torch.long),
        }
        if self._masks:
            pixels = np.array([self._coco.annToMask(each) for each in objects], dtype=bool)
            sample['masks'] = tv_tensors.Mask(pixels.reshape(-1, *size))
        image, sample = self._transform(image, sample)
        # torchvision's subclasses have done their work, and would slow the network.
        plain = {name: value.as_subclass(torch.Tensor) for name, value in sample.items()}
        return {
            'inputs': image.as_subclass(torch.Tensor),
            'data_samples': {**plain, 'image_id': image_id, 'index': index},
        }

    def sample_name(self, index: int) -> str:
        """What the sample is called in messages, with its file."""
        return f'image {self._ids[index]}, {self._file(self._ids[index])!r}'

    def _file(self, image_id: int) -> str:
        return str(self._root / self._coco.loadImgs(image_id)[0]['file_name'])

    def _objects(self, image_id: int) -> list[dict[str, Any]]:
        # Not by their ids: files that were put together out of several have some twice.
        every = self._coco.imgToAnns[image_id]
        return [each for each in every if not each['iscrowd'] and min(each['bbox'][2:]) > 0]

    def _check_size(self, index: int, size: tuple[int, int]) -> None:
        """Raise ValueError for an image of another size than its objects were drawn in."""
        image = self._coco.imgs[self._ids[index]]
        # Some programs write 0 or null for what they do not know.
        stated = (image.get('height') or size[0], image.get('width') or size[1])
        if stated != size:
            raise ValueError(
                f'{self.sample_name(index)} has {size[1]}x{size[0]} pixels, and annotations say '
                f'{stated[1]}x{stated[0]}, so that its objects would lie elsewhere: give the image '
                'that was annotated (turned as its EXIF says, which is not done here)'
            )

    def _check_outlines(self, annotations: str) -> None:
        """Raise ValueError for what masks need and the file lacks."""
        for image_id in self._ids:
            objects, image = self._objects(image_id), self._coco.imgs[image_id]
            bare = [each['id'] for each in objects if not each.get('segmentation')]
            if bare or (objects and not (image.get('width') and image.get('height'))):
                lacking = (
                    f'annotation {bare[0]} has no segmentation'
                    if bare
                    else (f'image {image_id} has no width and height')
                )
                raise ValueError(f'masks=True: {lacking} in {annotations!r}; give it, or no masks')


def _build(cfg: Any, setting: str) -> Any:
    transform = build(TRANSFORMS, cfg, setting)
    if not isinstance(transform, TorchvisionTransform):
        raise ValueError(f'{setting} must be one of torchvision/<Name>, got {cfg!r}')
    return transform.transform


# MMEngine's Runner looks collate functions up in its root registry only.
@ROOT_FUNCTIONS.register_module()
@FUNCTIONS.register_module()
def list_samples(batch: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Put items to a batch without stacking them, since their sizes differ.

    Args:
        batch: B items ``dict(inputs=..., data_samples=...)``.

    Returns:
        ``inputs`` and ``data_samples``, a list of B each.
    """
    return {key: [item[key] for item in batch] for key in ('inputs', 'data_samples')}
