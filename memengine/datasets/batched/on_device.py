"""Views that are made where the model is, instead of in the processes that load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from mmengine.model import BaseDataPreprocessor
from torch import Tensor

from memengine.datasets.batched.dataset import pixels_of
from memengine.datasets.batched.draws import Draws
from memengine.datasets.batched.pipeline import BatchedPipeline
from memengine.datasets.image_dataset import ImageDataset, OnError
from memengine.registry import DATASETS, MODELS, DatasetConfig, TransformConfig

__all__ = ['BatchedViews', 'PlainImageDataset']

SEED = 'view_seed'
"""The entry of ``data_samples`` that a sample's views are drawn from."""


@DATASETS.register_module()
class PlainImageDataset(ImageDataset):
    """An ``ImageDataset`` that hands over whole images, with the seeds that views are drawn from.

    The views are made by the model's ``data_preprocessor``, ``BatchedViews``. Images travel as
    bytes, a quarter of what a view takes by the pixel, and must be of one size.

    Args:
        source: As for ``ImageDataset``.
        size: [height, width] that images are resized to; None where they are of one size.
        keys: What goes into ``data_samples``, beside the seed.
        indices: As for ``ImageDataset``.
        on_error: As for ``ImageDataset``.
        max_skipped: As for ``ImageDataset``.
    """

    def __init__(
        self,
        source: DatasetConfig,
        size: Sequence[int] | None = None,
        keys: Sequence[str] = ('label', 'index'),
        indices: int | Sequence[int] | None = None,
        on_error: OnError = 'stop',
        max_skipped: float = 0.1,
    ) -> None:
        resize = [] if size is None else [dict(type='torchvision/Resize', size=list(size))]
        super().__init__(source, resize, indices, on_error, max_skipped)
        self.keys = tuple(keys)

    def seeded_items(self, indices: Iterable[int], seeds: Sequence[int]) -> list[dict[str, Any]]:
        """The images [C, H, W], uint8, at ``indices``, with the seeds of their views."""
        return [self._plain(index, seed) for index, seed in zip(indices, seeds, strict=True)]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The item at ``index``, of a seed that torch's global generator draws."""
        return self._plain(index, int(torch.randint(2**62, ())))

    def _plain(self, index: int, seed: int) -> dict[str, Any]:
        results = self.pipeline(self._read(index))
        pixels = torch.from_numpy(pixels_of(results['img']).copy())
        kept = {key: results[key] for key in self.keys}
        return {
            'inputs': pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous(),
            'data_samples': {**kept, SEED: Draws.from_seeds([seed]).seeds[0]},
        }


@MODELS.register_module()
class BatchedViews(BaseDataPreprocessor):
    """A data preprocessor that makes the views of a training batch, on the model's device.

    Images are copied there as bytes, without waiting where the loader pins them, and augmented as
    whole batches. A sample's views follow from its own seed: they are those that
    ``BatchedImageDataset`` makes of it in a worker, up to the rounding of the device. Batches that
    are not trained on, and those of other data sets, pass as they are.

    Args:
        pipeline: As for ``BatchedImageDataset``, without ``PackInputs``.
        non_blocking: Whether the copy is not waited for.

    Raises:
        ValueError: When a transform has no batched form.
    """

    def __init__(self, pipeline: Sequence[TransformConfig], non_blocking: bool = True) -> None:
        super().__init__(non_blocking)
        self.pipeline = BatchedPipeline([*pipeline, dict(type='PackInputs')])

    def forward(self, data: Any, training: bool = False) -> Any:
        """Move a batch of :func:`stack_views`, and make its views if it is trained on."""
        data = super().forward(data, training)
        if not training:
            return data
        samples = data['data_samples']
        if SEED not in samples:
            raise ValueError(
                "data_preprocessor (BatchedViews) makes views of whole images: set the dataset's "
                "type='PlainImageDataset', and collate_fn=dict(type='stack_views')"
            )
        images: Tensor = data['inputs']
        with torch.no_grad():
            views = self.pipeline.views(images.float() / 255, Draws(samples[SEED]))
        return {
            'inputs': views,
            'data_samples': {key: value for key, value in samples.items() if key != SEED},
        }
