"""Stacking samples to a batch, with an error that a user can act on when they do not stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mmengine.registry import FUNCTIONS as ROOT_FUNCTIONS
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from memengine.datasets.batched import jpeg
from memengine.registry import FUNCTIONS


# MMEngine's Runner looks collate functions up in its root registry only.
@ROOT_FUNCTIONS.register_module()
@FUNCTIONS.register_module()
def stack_views(batch: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Stack items to a batch.

    Args:
        batch: B items ``dict(inputs=..., data_samples=dict(label=int, ...))``; ``inputs`` is a
            tensor ``[C, H, W]`` or a list of V of them, or a file ``[L]`` that is not decoded yet.

    Returns:
        ``inputs``: a tensor ``[B, C, H, W]``, or a list of V tensors ``[B, C, h, w]``, or files
        ``[B, L]``, the shorter ones with zeros at their ends;
        ``data_samples``: numbers and booleans as tensors ``[B]``, strings as lists.

    Raises:
        ValueError: When the samples differ in their number of views, in the shape of a view, or
            in the names of their ``data_samples``.
    """
    batch = _padded(batch)
    first = batch[0]
    for item in batch[1:]:
        _check_same_shapes(item, first)
        if item['data_samples'].keys() != first['data_samples'].keys():
            raise ValueError(
                f'{_name(item)} has the data_samples {sorted(item["data_samples"])}, but '
                f'{_name(first)} has {sorted(first["data_samples"])}: give PackInputs the same '
                'keys for all samples'
            )
    return default_collate(list(batch))


def _padded(batch: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    if not all(jpeg.FILE in item['data_samples'] for item in batch):
        return batch
    padded = pad_sequence([item['inputs'] for item in batch], batch_first=True)
    return [{**item, 'inputs': file} for item, file in zip(batch, padded, strict=True)]


def _name(item: Mapping[str, Any]) -> str:
    return f'sample {item["data_samples"].get("index", "without index")}'


def _check_same_shapes(item: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    views, expected = _views(item), _views(first)
    if len(views) != len(expected):
        raise ValueError(
            f'{_name(item)} has {len(views)} views, but {_name(first)} has {len(expected)}: '
            "MultiCrop.views' num must be the same for all samples"
        )
    for position, (view, wanted) in enumerate(zip(views, expected, strict=True)):
        if view.shape == wanted.shape:
            continue
        which = f'view {position} of ' if len(views) > 1 else ''
        if view.ndim != 3:
            remedy = 'have the data set cut or fill up all samples to one shape, or give '
            remedy += 'collate_fn a function of your own'
        elif view.shape[0] != wanted.shape[0]:
            remedy = 'bring all images to the same number of channels with torchvision/Grayscale '
            remedy += 'or torchvision/RGB'
        else:
            remedy = 'give the pipeline a crop or resize of fixed size, such as '
            remedy += 'torchvision/RandomResizedCrop(size=...) or torchvision/Resize(size=[H, W])'
        raise ValueError(
            f'{which}{_name(item)} has the shape {list(view.shape)}, but {_name(first)} has '
            f'{list(wanted.shape)}, so they make no batch: {remedy}'
        )


def _views(item: Mapping[str, Any]) -> Sequence[torch.Tensor]:
    inputs = item['inputs']
    return inputs if isinstance(inputs, (list, tuple)) else [inputs]
