"""All crops of a sample in one transform."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch

from memengine.datasets.transforms.images import to_torchvision
from memengine.datasets.transforms.pipeline import Pipeline
from memengine.registry import TRANSFORMS, TransformConfig
from memengine.suggest import did_you_mean


class _Group(TypedDict):
    num: int
    pipeline: Sequence[TransformConfig]


@TRANSFORMS.register_module()
class MultiCrop:
    """Replace the image by a list of views of it, each drawn by itself.

    Of the frames of a video (see ``VideoFrames``) the first view is made of the first one, the
    second of the second, and so on, from the first again where there are more views.

    DINO's ImageNet recipe has two global views with a pipeline each, then eight local ones::

        dict(type='MultiCrop', views=[
            dict(num=1, pipeline=global_1),
            dict(num=1, pipeline=global_2),
            dict(num=8, pipeline=local),
        ])

    Args:
        views: Groups of views, in the order of the list that comes out: the global ones first,
            because the algorithms take the first views for global. A group is
            ``dict(num=<count>, pipeline=[<transforms>])``; ``num=0`` leaves it out.

    Raises:
        ValueError: When a group is not as above, or no view is left.
        TypeError: When ``views`` is no list.
    """

    def __init__(self, views: Sequence[_Group]) -> None:
        if isinstance(views, (str, Mapping)) or not isinstance(views, Sequence):
            raise TypeError(
                f'MultiCrop.views must be a list of dict(num=, pipeline=), got {views!r}'
            )
        self.groups: list[tuple[int, Pipeline]] = []
        for position, group in enumerate(views):
            where = f'MultiCrop.views[{position}]'
            _check_group(where, group)
            self.groups.append((group['num'], Pipeline(group['pipeline'], f'{where}.pipeline')))
        if self.num_views == 0:
            raise ValueError('MultiCrop.views must ask for at least one view: raise a num above 0')

    @property
    def num_views(self) -> int:
        """How many views come out."""
        return sum(num for num, _ in self.groups)

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        """Replace ``results['img']`` by the list of its views; of several frames each has one."""
        image, order = results['img'], results.pop('channel_order', 'bgr')
        frames = [to_torchvision(one, order) for one in _listed(image)]
        views: list[Any] = []
        for num, pipeline in self.groups:
            given = (frames[(len(views) + place) % len(frames)] for place in range(num))
            samples = [{**results, 'img': _not_shared(frame)} for frame in given]
            for view in pipeline.apply_to_all(samples):
                views.append(to_torchvision(view['img'], view.get('channel_order', 'bgr')))
        results['img'] = views
        return results

    def __repr__(self) -> str:
        return f'MultiCrop(views={[num for num, _ in self.groups]})'


def _listed(image: Any) -> list[Any]:
    return image if isinstance(image, list) else [image]


def _not_shared(image: Any) -> Any:
    """A tensor of a view's own, which a transform may write into; a PIL image it never does."""
    return image.clone() if isinstance(image, torch.Tensor) else image


def _check_group(where: str, group: Any) -> None:
    if not isinstance(group, Mapping):
        raise ValueError(f'{where} must be dict(num=, pipeline=), got {group!r}')
    for key in group:
        if key not in ('num', 'pipeline'):
            raise ValueError(
                f'{where} has no setting {key!r}{did_you_mean(key, ("num", "pipeline"), after=";")}'
            )
    for key in ('num', 'pipeline'):
        if key not in group:
            raise ValueError(f'{where} needs the setting {key!r}')
    num = group['num']
    if not isinstance(num, int) or isinstance(num, bool) or num < 0:
        raise ValueError(f'{where}.num must be a whole number of views, 0 or more, got {num!r}')
