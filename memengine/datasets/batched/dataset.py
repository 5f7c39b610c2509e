"""A dataset whose samples are augmented by whole batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from memengine.datasets.batched.draws import Draws
from memengine.datasets.batched.pipeline import BatchedPipeline
from memengine.datasets.build import one_line
from memengine.datasets.image_dataset import ImageDataset
from memengine.registry import DATASETS


@DATASETS.register_module()
class BatchedImageDataset(ImageDataset):
    """An ``ImageDataset`` whose pipeline works on whole batches: for small images of one size.

    Each transform is called once a batch, with parameters that each image draws from its own seed:
    a sample looks the same in any batch, with any number of workers, and after resuming. Images of
    several sizes are augmented size by size; each size costs the calls anew.

    Arguments are those of ``ImageDataset``. The pipeline consists of torchvision's transforms that
    have a batched form (an error lists them), ``MultiCrop``, and ``PackInputs``.

    Raises:
        ValueError: As ``ImageDataset``, and when a transform has no batched form.
    """

    pipeline_type = BatchedPipeline
    pipeline: BatchedPipeline

    def seeded_items(self, indices: Iterable[int], seeds: Sequence[int]) -> list[dict[str, Any]]:
        """The items at ``indices``, the random numbers of each being a function of its seed."""
        samples = [self._read(index) for index in indices]
        by_size: dict[tuple[int, ...], list[int]] = {}
        pixels = [pixels_of(sample.pop('img')) for sample in samples]
        for row, array in enumerate(pixels):
            by_size.setdefault(array.shape, []).append(row)
        items: dict[int, dict[str, Any]] = {}
        for rows in by_size.values():
            images = _stacked([pixels[row] for row in rows])
            draws = Draws.from_seeds([seeds[row] for row in rows])
            try:
                made = self.pipeline.on_batch(images, [samples[row] for row in rows], draws)
            except ValueError as error:
                names = self.sample_name(samples[rows[0]]['index'])
                raise ValueError(
                    f'{names} and {len(rows) - 1} more of its size: {one_line(error)}'
                ) from error
            items.update(zip(rows, made, strict=True))
        return [items[row] for row in range(len(samples))]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The item at ``index``, of a seed that torch's global generator draws."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The items at ``indices``, of seeds that torch's global generator draws."""
        seeds = torch.randint(2**62, (len(indices),)).tolist()
        return self.seeded_items(indices, seeds)


def pixels_of(image: Image.Image | list[Image.Image]) -> np.ndarray:
    """[H, W] or [H, W, 3], uint8."""
    if isinstance(image, list):
        raise ValueError("frames of a video become views by type='ImageDataset' only")
    return np.asarray(image if image.mode in ('L', 'RGB') else image.convert('RGB'))


def _stacked(pixels: Sequence[np.ndarray]) -> Tensor:
    """Float [B, C, H, W], 0 to 1."""
    images = torch.from_numpy(np.stack(pixels))
    images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2)
    return images.to(torch.float32, memory_format=torch.contiguous_format) / 255
