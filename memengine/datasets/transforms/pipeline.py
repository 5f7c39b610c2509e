"""A list of transforms, whichever library each comes from."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memengine.datasets.build import build, one_line
from memengine.datasets.transforms.images import describe, to_bgr_array
from memengine.registry import TRANSFORMS

Results = dict[str, Any]
Transform = Callable[[Results], Results]


class Pipeline:
    """Apply transforms to one sample, in order.

    A transform takes and returns the dict of a sample: ``img`` (see
    :mod:`memengine.datasets.transforms.images`), ``label``, ``index``, and ``img_path`` where the
    image is a file. Transforms of torchvision (``torchvision/<Name>``), of mmcv (``mmcv.Resize``
    or ``Resize``) and one's own may follow each other; images are converted between them.
    Randomness comes from the global generators of torch, numpy and random.

    Args:
        transforms: Configs of TRANSFORMS, or callables.
        setting: What the user calls this list, for errors.

    Raises:
        TypeError: When ``transforms`` is no list, or an entry is neither config nor callable.
        ValueError: When a type or an argument is unknown or refused.
    """

    def __init__(self, transforms: Sequence[Any], setting: str = 'pipeline') -> None:
        if isinstance(transforms, (str, bytes)) or not isinstance(transforms, Sequence):
            raise TypeError(f'{setting} must be a list of transforms, got {transforms!r}')
        self.steps: list[tuple[str, Transform]] = []
        for position, cfg in enumerate(transforms):
            where = f'{setting}[{position}]'
            transform = build(TRANSFORMS, cfg, where, on_missing=_register_mmcv)
            if not callable(transform):
                raise TypeError(f'{where} must be a config or a callable, got {transform!r}')
            kind = cfg.get('type') if isinstance(cfg, dict) else type(transform).__name__
            step = _MmcvStep(transform) if _takes_arrays(transform) else transform
            self.steps.append((f'{where} ({getattr(kind, "__name__", kind)})', step))

    def __call__(self, results: Results) -> Results:
        """Transform one sample.

        Raises:
            ValueError: When a transform fails or returns no dict; names the transform.
        """
        return self.apply_to_all([results])[0]

    def apply_to_all(self, samples: list[Results]) -> list[Results]:
        """Transform several samples, each transform taking all of them before the next one does.

        At a few pixels a transform costs mostly the processor's cold caches, so that the views of
        a sample are a quarter cheaper in step than one after the other.
        """
        for where, step in self.steps:
            samples = [_apply(where, step, results) for results in samples]
        return samples


def _apply(where: str, step: Transform, results: Results) -> Results:
    image = results.get('img')
    try:
        results = step(results)
    except Exception as error:
        raise ValueError(f'{where} failed on {describe(image)}: {one_line(error)}') from error
    if not isinstance(results, dict):
        raise ValueError(f'{where} must return a dict, got {type(results).__name__}')
    return results


class _MmcvStep:
    """Hand an mmcv transform the BGR array that it takes, and keep track of the channel order."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform

    def __call__(self, results: Results) -> Results:
        image = to_bgr_array(results['img'], results.pop('channel_order', 'bgr'))
        results.update(img=image, img_shape=image.shape[:2])
        before = results.get('img_norm_cfg')
        results = self.transform(results)
        if not isinstance(results, dict):
            return results  # the pipeline says which transform this was
        after = results.get('img_norm_cfg')
        if after is not None and after is not before and after['to_rgb']:
            results['channel_order'] = 'rgb'
        output, order = results.get('img'), results.get('channel_order', 'bgr')
        if isinstance(output, torch.Tensor) and order == 'bgr' and output.shape[0] == 3:
            results['img'] = output.flip(0)  # from mmcv's ImageToTensor, [C, H, W]
        return results


def _takes_arrays(transform: Any) -> bool:
    """Whether this is one of mmcv's transforms, or derives from them as mmdet's do."""
    return any(base.__module__.split('.')[0] == 'mmcv' for base in type(transform).__mro__)


def _register_mmcv(kind: str) -> str:
    """Register mmcv's transforms with MMEngine, which are found there by their plain names."""
    if '/' in kind:
        return ''
    try:
        importlib.import_module('mmcv.transforms')
    except ImportError:
        return " (mmcv's transforms need the optional package: pip install mmcv-lite)"
    return ''
