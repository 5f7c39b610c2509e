"""A pipeline that is carried out on whole batches of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2

from memengine.datasets.batched import colour, geometry
from memengine.datasets.batched.draws import Draws
from memengine.datasets.build import one_line
from memengine.datasets.transforms.multi_crop import MultiCrop
from memengine.datasets.transforms.pack import PackInputs
from memengine.datasets.transforms.pipeline import Pipeline
from memengine.datasets.transforms.torchvision_v2 import TorchvisionTransform

Batched = Callable[[Any, Tensor, Draws], Tensor]

# Images are floats of 0 to 1 from the start, so that these have nothing to do.
_CONVERSIONS = (v2.ToImage, v2.PILToTensor, v2.ToDtype)

# Torchvision's own take a batch as they take an image, where nothing is drawn.
_WITHOUT_DRAWS = (v2.Resize, v2.CenterCrop, v2.Grayscale, v2.RGB, v2.Normalize, v2.Identity)

_AFTER_NORMALIZE = (
    *(v2.RandomErasing, v2.RandomHorizontalFlip, v2.RandomVerticalFlip),
    *_CONVERSIONS,
)


def _unchanged(transform: Any, images: Tensor, draws: Draws) -> Tensor:
    return images


def _as_it_is(transform: Any, images: Tensor, draws: Draws) -> Tensor:
    out = transform(images)
    return out if type(transform) is v2.Normalize else out.clamp(0, 1)  # bicubic goes beyond


def _random_apply(transform: v2.RandomApply, images: Tensor, draws: Draws) -> Tensor:
    rows = (draws.uniform() < transform.p).nonzero()[:, 0]
    if not len(rows):
        return images
    changed = augment(list(transform.transforms), images[rows], draws.split().of(rows))
    return images.index_copy(0, rows, changed)


_BATCHED: dict[type, Batched] = {
    **dict.fromkeys(_CONVERSIONS, _unchanged),
    **dict.fromkeys(_WITHOUT_DRAWS, _as_it_is),
    v2.Pad: geometry.pad,
    v2.RandomApply: _random_apply,
    v2.RandomResizedCrop: geometry.random_resized_crop,
    v2.RandomCrop: geometry.random_crop,
    v2.RandomHorizontalFlip: geometry.flip,
    v2.RandomVerticalFlip: geometry.flip,
    v2.RandomAffine: geometry.random_affine,
    v2.ColorJitter: colour.color_jitter,
    v2.RandomGrayscale: colour.random_grayscale,
    v2.RandomSolarize: colour.random_solarize,
    v2.GaussianBlur: colour.gaussian_blur,
    v2.GaussianNoise: colour.gaussian_noise,
    v2.RandomErasing: colour.random_erasing,
}


def augment(transforms: Sequence[Any], images: Tensor, draws: Draws) -> Tensor:
    """Apply torchvision's transforms in order, each with draws of its own.

    Args:
        transforms: Of the types that have a batched form.
        images: Float [B, C, H, W], 0 to 1.
        draws: Those of the B images.

    Returns:
        Float [B, C, h, w].
    """
    for transform in transforms:
        images = _BATCHED[type(transform)](transform, images, draws.split())
    return images


def _problem(transform: Any) -> str | None:
    """Why a transform of torchvision's has no batched form."""
    if type(transform) not in _BATCHED:
        known = ', '.join(sorted(kind.__name__ for kind in _BATCHED))
        return f'has no batched form (there are {known})'
    if isinstance(transform, v2.RandomApply):
        nested = [(type(inner).__name__, _problem(inner)) for inner in transform.transforms]
        return next((f'holds {name}, which {why}' for name, why in nested if why), None)
    settings: dict[type, tuple[tuple[str, tuple[Any, ...]], ...]] = {
        v2.RandomResizedCrop: (('antialias', (True,)), ('interpolation', ('bilinear', 'bicubic'))),
        v2.RandomCrop: (
            ('fill', (0,)),
            ('padding_mode', ('constant',)),
            ('pad_if_needed', (False,)),
        ),
        v2.RandomAffine: (('fill', (0,)), ('center', (None,))),
        v2.ToDtype: (('dtype', (torch.float32,)), ('scale', (True,))),
    }
    for name, batched in settings.get(type(transform), ()):
        value = getattr(transform, name)
        value = value.value if isinstance(value, v2.InterpolationMode) else value
        if value not in batched:
            return f'has no batched form with {name}={value!r}'
    return None


class BatchedPipeline(Pipeline):
    """A pipeline whose transforms work on a whole batch, each image with draws of its own.

    What a transform costs by call, which is most of what it costs on a small image, is paid once a
    batch. Pixels are floats of 0 to 1 all along, and are not rounded to eight bits in between, as
    they are in a PIL image.

    Args:
        transforms: Configs of TRANSFORMS: those of torchvision that have a batched form,
            ``MultiCrop``, and last ``PackInputs``.
        setting: What the user calls this list, for errors.

    Raises:
        ValueError: When a transform has no batched form.
    """

    def __init__(self, transforms: Sequence[Any], setting: str = 'pipeline') -> None:
        super().__init__(transforms, setting)
        _check(self.steps)

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        """Refused: a batch needs the samples' seeds."""
        raise TypeError('a batched pipeline is carried out by BatchedPipeline.on_batch')

    def views(self, images: Tensor, draws: Draws) -> Tensor | list[Tensor]:
        """The views of images [B, C, H, W], 0 to 1: [B, C, h, w], or a list with ``MultiCrop``."""
        return _carry_out(self.steps[:-1], images, draws)

    def on_batch(
        self, images: Tensor, samples: Sequence[dict[str, Any]], draws: Draws
    ) -> list[dict[str, Any]]:
        """Make the items of a batch.

        Args:
            images: Float [B, C, H, W], 0 to 1.
            samples: What is known of each, beside its image.
            draws: Those of the B samples.
        """
        views, packed = self.views(images, draws), self.steps[-1][1]
        if isinstance(views, Tensor):
            return [
                packed({**sample, 'img': image})
                for sample, image in zip(samples, views, strict=True)
            ]
        rows = zip(*(view.unbind() for view in views), strict=True)
        return [
            packed({**sample, 'img': list(row)}) for sample, row in zip(samples, rows, strict=True)
        ]


def _carry_out(
    steps: Sequence[tuple[str, Any]], images: Tensor, draws: Draws
) -> Tensor | list[Tensor]:
    for where, step in steps:
        if isinstance(step, MultiCrop):
            return _views(step, images, draws)
        try:
            images = augment([step.transform], images, draws)
        except (ValueError, RuntimeError, TypeError) as error:
            raise ValueError(
                f'{where} failed on images {list(images.shape)}: {one_line(error)}'
            ) from error
    return images


def _views(crops: MultiCrop, images: Tensor, draws: Draws) -> list[Tensor]:
    """All views, [B, C, h, w] each; those of a group are made together."""
    views: list[Tensor] = []
    for num, pipeline in crops.groups:
        if num:
            repeated = images.repeat(num, 1, 1, 1)
            made = _carry_out(pipeline.steps, repeated, draws.split(num))
            views += torch.as_tensor(made).chunk(num)
    return views


def _check(steps: Sequence[tuple[str, Any]], packs: bool = True, normalised: bool = False) -> None:
    for position, (where, step) in enumerate(steps):
        last = position == len(steps) - 1
        instead = f"{where} {{}}; take it out, or use type='ImageDataset'"
        if isinstance(step, PackInputs) and last and packs:
            continue
        if isinstance(step, MultiCrop) and packs and position == len(steps) - 2:
            for _, pipeline in step.groups:
                _check(pipeline.steps, packs=False, normalised=normalised)
            continue
        if not isinstance(step, TorchvisionTransform):
            raise ValueError(instead.format('has no batched form'))
        if problem := _problem(step.transform):
            raise ValueError(instead.format(problem))
        if normalised and type(step.transform) not in _AFTER_NORMALIZE:
            raise ValueError(
                f'{where} must come before torchvision/Normalize in a batched pipeline'
            )
        normalised = normalised or type(step.transform) is v2.Normalize
    if packs and not (steps and isinstance(steps[-1][1], PackInputs)):
        raise ValueError('a batched pipeline must end with PackInputs')
