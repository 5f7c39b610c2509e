"""Views that are made where the model is, instead of in the processes that load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from mmengine.model import BaseDataPreprocessor
from torch import Tensor

from memengine.datasets.batched import jpeg
from memengine.datasets.batched.dataset import pixels_of
from memengine.datasets.batched.draws import Draws
from memengine.datasets.batched.pipeline import BatchedPipeline
from memengine.datasets.image_dataset import ImageDataset, OnError
from memengine.datasets.sources.protocols import NO_LABEL, HasLabels
from memengine.registry import DATASETS, MODELS, DatasetConfig, TransformConfig

__all__ = ['BatchedViews', 'PlainImageDataset']

SEED = 'view_seed'
"""The entry of ``data_samples`` that a sample's views are drawn from."""


@DATASETS.register_module()
class PlainImageDataset(ImageDataset):
    """An ``ImageDataset`` that hands over whole images, with the seeds that views are drawn from.

    The views are made by the model's ``data_preprocessor``, ``BatchedViews``. Images travel as
    bytes, a quarter of what a view takes by the pixel, and must be of one size. With
    ``decode='device'`` JPEG files travel as they are, and ``BatchedViews`` decodes and resizes a
    batch of them on the model's device: workers only read.

    Args:
        source: As for ``ImageDataset``.
        size: [height, width] that images are resized to; None where they are of one size.
        keys: What goes into ``data_samples``, beside the seed.
        indices: As for ``ImageDataset``.
        on_error: As for ``ImageDataset``.
        max_skipped: As for ``ImageDataset``.
        decode: ``'worker'``, or ``'device'``, which needs ``size``, and a source of JPEG files. A
            file that is no JPEG, or cut off in its head, is acted on by ``on_error``; one that is
            broken further on stops training.

    Raises:
        ValueError: As ``ImageDataset``, and when ``decode`` lacks what it needs.
    """

    def __init__(
        self,
        source: DatasetConfig,
        size: Sequence[int] | None = None,
        keys: Sequence[str] = ('label', 'index'),
        indices: int | Sequence[int] | None = None,
        on_error: OnError = 'stop',
        max_skipped: float = 0.1,
        decode: Literal['worker', 'device'] = 'worker',
    ) -> None:
        if decode not in ('worker', 'device'):
            raise ValueError(f"decode must be 'worker' or 'device', got {decode!r}")
        self.size = None if decode == 'worker' or size is None else list(size)
        resize = [] if size is None else [dict(type='torchvision/Resize', size=list(size))]
        super().__init__(source, resize, indices, on_error, max_skipped)
        self.keys = tuple(keys)
        if decode == 'device' and (self.size is None or self._path is None):
            raise ValueError(
                "decode='device' needs size=[height, width], and a source of files, got "
                f'size={size} and {self._source_name}'
            )
        known = isinstance(self.source, HasLabels)
        self._labels = list(self.source.labels) if known else [NO_LABEL] * len(self.source)

    def _sample(self, row: int) -> tuple[Any, int]:
        if self.size is None or self._path is None:
            return super()._sample(row)
        return jpeg.read(self._path(row)), self._labels[row]

    def seeded_items(self, indices: Iterable[int], seeds: Sequence[int]) -> list[dict[str, Any]]:
        """The images [C, H, W], uint8, at ``indices``, with the seeds of their views."""
        return [self._plain(index, seed) for index, seed in zip(indices, seeds, strict=True)]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The item at ``index``, of a seed that torch's global generator draws."""
        return self._plain(index, int(torch.randint(2**62, ())))

    def _plain(self, index: int, seed: int) -> dict[str, Any]:
        results = self._read(index)
        kept = {key: results[key] for key in self.keys}
        kept[SEED] = Draws.from_seeds([seed]).seeds[0]
        if self.size is not None:
            file: Tensor = results['img']
            kept[jpeg.FILE] = torch.tensor([len(file), *self.size])
            return {'inputs': file, 'data_samples': kept}
        pixels = torch.from_numpy(pixels_of(self.pipeline(results)['img']).copy())
        image = pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()
        return {'inputs': image, 'data_samples': kept}


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
        samples = data.get('data_samples') if isinstance(data, Mapping) else None
        if isinstance(samples, Mapping) and jpeg.FILE in samples:
            data = self._decoded(data)
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
        # Half precision is for networks: it would round pixels, and the places of turned ones.
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            views = self.pipeline.views(images.float() / 255, Draws(samples[SEED]))
        return {
            'inputs': views,
            'data_samples': {key: value for key, value in samples.items() if key != SEED},
        }

    def _decoded(self, data: Mapping[str, Any]) -> dict[str, Any]:
        samples = dict(data['data_samples'])
        lengths, heights, widths = samples.pop(jpeg.FILE).cpu().unbind(1)
        size = [int(heights[0]), int(widths[0])]
        places = samples.get('index', torch.arange(len(lengths))).tolist()
        names = [f'sample {place}' for place in places]
        images = jpeg.decode(data['inputs'].cpu(), lengths, size, self.device, names)
        return {**data, 'inputs': images, 'data_samples': samples}
