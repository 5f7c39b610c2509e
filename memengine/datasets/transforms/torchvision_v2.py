"""All of torchvision's v2 transforms, registered as ``torchvision/<Name>``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torchvision.transforms import v2

from memengine.datasets.build import build, one_line
from memengine.datasets.transforms.images import to_torchvision
from memengine.registry import TRANSFORMS

_PREFIX = 'torchvision/'

# Arguments that are a (smallest, largest) pair where they have two values.
_RANGES = {
    *('scale', 'ratio', 'scale_range', 'side_range', 'sigma', 'degrees', 'shear'),
    *('brightness', 'contrast', 'saturation', 'hue'),
}

# Transforms that do nothing to the image of one sample, or fail on it, and what they work on.
_NOT_FOR_IMAGES = {
    'CutMix': 'a batch',
    'MixUp': 'a batch',
    'ClampBoundingBoxes': 'bounding boxes',
    'ClampKeyPoints': 'key points',
    'ConvertBoundingBoxFormat': 'bounding boxes',
    'RandomIoUCrop': 'bounding boxes',
    'SanitizeBoundingBoxes': 'bounding boxes',
    'SanitizeKeyPoints': 'key points',
    'SetClampingMode': 'bounding boxes',
    'UniformTemporalSubsample': 'a video',
}


class TorchvisionTransform:
    """A torchvision v2 transform on ``results['img']``; subclasses name the class.

    Arguments are those of the torchvision class. Enumerations and types are given as strings
    (``interpolation='bilinear'``, ``dtype='float32'``, ``policy='imagenet'``), and transforms
    inside transforms (``RandomApply``, ``RandomChoice``, ...) as configs. After MultiCrop it acts
    on every view by itself.

    Raises:
        ValueError: When an argument is unknown or out of range.
    """

    transform_class: ClassVar[type[torch.nn.Module]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        cls = self.transform_class
        if (works_on := _NOT_FOR_IMAGES.get(cls.__name__)) is not None:
            raise ValueError(
                f"{cls.__name__} works on {works_on}, not on a sample's image; remove it from the "
                'pipeline'
            )
        bound = inspect.signature(cls).bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            bound.arguments[name] = _parse_argument(name, value)
            _check(cls.__name__, name, bound.arguments[name])
        mean, std = bound.arguments.get('mean'), bound.arguments.get('std')
        if isinstance(mean, Sequence) and isinstance(std, Sequence) and len(mean) != len(std):
            raise ValueError(f'mean and std must be as many numbers, got {mean} and {std}')
        self.transform = cls(*bound.args, **bound.kwargs)

    @classmethod
    def config_problem(cls, config: Mapping[str, Any]) -> tuple[str, str] | None:
        """A setting, and what is wrong with it, that no type says: nothing is lost by trying."""
        try:
            cls(**config)
        except (TypeError, ValueError) as error:
            named = [name for name in config if name in str(error)]
            return (named or [*config, 'type'])[0], one_line(error)
        return None

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        """Transform ``results['img']`` in place."""
        image = results['img']
        if isinstance(image, list):
            results['img'] = [self.transform(view) for view in image]
            return results
        if isinstance(image, np.ndarray):
            image = to_torchvision(image, results.get('channel_order', 'bgr'))
            results['channel_order'] = 'rgb'
        results['img'] = self.transform(image)
        return results

    def __repr__(self) -> str:
        return repr(self.transform)


def _parse_argument(name: str, value: Any) -> Any:
    """``value`` as torchvision takes it."""
    if isinstance(value, str):
        if name == 'interpolation':
            return _enum_member(v2.InterpolationMode, name, value.replace('_', '-'))
        if name == 'policy':
            return _enum_member(v2.AutoAugmentPolicy, name, value)
        if name == 'dtype':
            dtype = getattr(torch, value, None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name} must name a torch dtype such as 'float32', got {value!r}")
            return dtype
    if name == 'transforms' and isinstance(value, Sequence):
        return [_build_nested(entry, f'{name}[{position}]') for position, entry in enumerate(value)]
    return value


def _enum_member(enum: Any, name: str, value: str) -> Any:
    values = [member.value for member in enum]
    if value not in values:
        raise ValueError(f'{name} must be one of {", ".join(map(repr, values))}, got {value!r}')
    return enum(value)


def _build_nested(cfg: Any, setting: str) -> Any:
    """A transform inside a torchvision transform, which calls it with the image alone."""
    built = build(TRANSFORMS, cfg, setting)
    if isinstance(built, TorchvisionTransform):
        return built.transform
    if isinstance(built, torch.nn.Module):
        return built
    raise ValueError(f'{setting} must be one of {_PREFIX}<Name>, got {cfg!r}')


def _check(cls_name: str, name: str, value: Any) -> None:
    """Refuse what torchvision would only warn of, or fail on at the first image."""
    values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    if name in _RANGES and len(values) == len(numbers) == 2 and not numbers[0] <= numbers[1]:
        raise ValueError(f'{name} must be (smallest, largest), got {tuple(numbers)}')
    if name == 'scale' and cls_name == 'RandomResizedCrop':
        in_range = all(0 < number <= 1 for number in numbers)
        if len(values) != 2 or len(numbers) != 2 or not in_range:
            raise ValueError(
                "scale must be two shares of the image's area above 0 and up to 1, as "
                f'(smallest, largest), got {value!r}'
            )
    if name == 'size' and value is not None:
        whole = all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in values)
        if not whole or len(values) not in (1, 2):
            raise ValueError(f'size must be one or two positive integers, got {value!r}')


def _signature(cls: type[torch.nn.Module]) -> inspect.Signature:
    """The class's, with all that it takes."""
    signature = inspect.signature(cls, eval_str=True)
    if cls is not v2.RandomErasing:
        return signature
    value = signature.parameters['value'].replace(annotation=str | float | Sequence[float] | None)
    return signature.replace(parameters=[*({**signature.parameters, 'value': value}.values())])


def _register_all() -> None:
    for name, cls in vars(v2).items():
        is_transform = inspect.isclass(cls) and issubclass(cls, torch.nn.Module)
        if not is_transform or name.startswith('_') or cls is v2.Transform:
            continue
        wrapper = type(
            name,
            (TorchvisionTransform,),
            {
                'transform_class': cls,
                '__signature__': _signature(cls),
                '__doc__': cls.__doc__,
                '__module__': __name__,
            },
        )
        TRANSFORMS.register_module(name=_PREFIX + name, module=wrapper)
        globals()[name] = wrapper  # where pickle looks for it


_register_all()
