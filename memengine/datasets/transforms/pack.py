"""The end of every pipeline: from the results dict to the item that the algorithms take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memengine.datasets.transforms.images import describe, to_torchvision
from memengine.registry import TRANSFORMS
from memengine.suggest import did_you_mean


@TRANSFORMS.register_module()
class PackInputs:
    """Make the item ``dict(inputs=..., data_samples=dict(label=..., index=...))``.

    ``inputs`` is a float tensor ``[C, H, W]`` in RGB order, or the list of them that MultiCrop
    made.

    Args:
        keys: What goes into ``data_samples``.

    Raises:
        ValueError: When called on an image that is no float tensor, or without one of ``keys``.
    """

    def __init__(self, keys: Sequence[str] = ('label', 'index')) -> None:
        if isinstance(keys, str):
            raise TypeError(f'PackInputs.keys must be a list of names, got {keys!r}')
        self.keys = tuple(keys)

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        """The item that ``results`` amounts to."""
        image, order = results['img'], results.get('channel_order', 'bgr')
        inputs = (
            [_check_image(view, order) for view in image]
            if isinstance(image, list)
            else _check_image(image, order)
        )
        for key in self.keys:
            if key not in results:
                raise ValueError(
                    f'PackInputs.keys: the sample has no {key!r}'
                    f'{did_you_mean(key, results, after=";")}'
                )
        return {'inputs': inputs, 'data_samples': {key: results[key] for key in self.keys}}


def _check_image(image: Any, channel_order: str) -> torch.Tensor:
    tensor = to_torchvision(image, channel_order)
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.ndim != 3:
        raise ValueError(
            f'PackInputs needs a float tensor [C, H, W], got {describe(image)}: end the pipeline '
            "with torchvision/ToImage and torchvision/ToDtype (dtype='float32', scale=True)"
        )
    return tensor.as_subclass(torch.Tensor)  # torchvision's Image subclass would slow the stacking
