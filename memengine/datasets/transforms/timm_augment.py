"""timm's augmentation policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from PIL import Image

from memengine.datasets.transforms.images import describe
from memengine.registry import TRANSFORMS


def _at_least_one_bit(bits: Callable[..., tuple[int]], *settings: Any) -> tuple[int]:
    # At full magnitude timm keeps no bit, which newer versions of Pillow refuse.
    return (max(1, bits(*settings)[0]),)


@TRANSFORMS.register_module()
class TimmRandAugment:
    """RandAugment as timm has it, with a magnitude that varies, on a PIL image.

    Args:
        policy: timm's short form: ``'rand-m9-mstd0.5-inc1'`` is magnitude 9 with a standard
            deviation of 0.5, and operations that all grow stronger with it.
        image_size: Side of the image in pixels; translations go up to 0.45 of it.
        fill: RGB of what comes in from outside the image.
        interpolation: Of what turns, shears or moves an image: ``'bilinear'``, ``'bicubic'`` (as in
            DeiT), or ``'random'``, one of both each time.

    Raises:
        ValueError: For a policy that timm cannot read, or another interpolation; on an image that
            is no PIL image.

    Randomness comes from the global generators of ``random`` and NumPy.

    Source: Cubuk et al., RandAugment (2020).
    """

    def __init__(
        self,
        policy: str,
        image_size: int,
        fill: Sequence[int] = (124, 116, 104),
        interpolation: Literal['random', 'bilinear', 'bicubic'] = 'random',
    ) -> None:
        from timm.data.auto_augment import rand_augment_transform  # not light to import

        if interpolation not in ('random', 'bilinear', 'bicubic'):
            raise ValueError(
                "TimmRandAugment: interpolation must be 'random', 'bilinear' or 'bicubic', got "
                f'{interpolation!r}'
            )
        settings: dict[str, Any] = {
            'translate_const': int(0.45 * image_size),
            'img_mean': tuple(fill),
        }
        if interpolation != 'random':
            settings['interpolation'] = Image.Resampling[interpolation.upper()]
        try:
            self.augment = rand_augment_transform(policy, settings)
        except (AssertionError, ValueError, KeyError) as error:
            raise ValueError(f'TimmRandAugment: timm cannot read policy={policy!r}') from error
        for operation in self.augment.ops:
            if operation.name.startswith('Posterize'):
                operation.level_fn = partial(_at_least_one_bit, operation.level_fn)

    @staticmethod
    def config_problem(config: Mapping[str, Any]) -> tuple[str, str] | None:
        """A setting, and what is wrong with it, that no type says: nothing is lost by trying."""
        try:
            TimmRandAugment(**config)
        except ValueError as error:
            return 'interpolation' if 'interpolation' in str(error) else 'policy', str(error)
        return None

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        """Augment ``results['img']``."""
        if not isinstance(results['img'], Image.Image):
            raise ValueError(
                f'TimmRandAugment needs a PIL image, got {describe(results["img"])}; put it before '
                'torchvision/ToImage'
            )
        results['img'] = self.augment(results['img'])
        return results
