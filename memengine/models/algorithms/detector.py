"""Object detection and instance segmentation with torchvision's models.

Shapes: N objects of an image, K classes with the background, which is class 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.ops import FrozenBatchNorm2d

from memengine.engine.checkpoint.weights import read_weights
from memengine.models.algorithms.by_sample import LossBySample
from memengine.models.batch_checks import check_labels
from memengine.registry import MODELS, PreprocessorConfig
from memengine.techniques.slices.slicing import Slice, cut_evenly, take

__all__ = ['TorchvisionDetector']

DETECTORS = ('FasterRCNN', 'MaskRCNN')


@MODELS.register_module()
class TorchvisionDetector(LossBySample):
    """Faster or Mask R-CNN on a ResNet with feature pyramid, as torchvision has them.

    A batch holds images of any size, ``inputs`` [C, H, W] each with values of 0 to 1, and for each
    a dict in ``data_samples``: ``boxes`` [N, 4] (x1, y1, x2, y2 in pixels), ``labels`` Long[N], and
    for Mask R-CNN ``masks`` [N, H, W]; see ``CocoDetection`` and ``list_samples``. torchvision
    resizes and normalises the images within the model.

    Args:
        detector: ``'FasterRCNN'`` or ``'MaskRCNN'``.
        num_classes: Number of classes K, with the background.
        backbone: A ResNet of torchvision, e.g. ``'resnet50'``.
        backbone_checkpoint: File with the weights of that ResNet as torchvision offers it for
            download. Its BatchNorm is then fixed.
        trainable_layers: How many of the ResNet's five parts are trained, from the last; by default
            3 with a checkpoint and all without.
        data_preprocessor: Config of MMEngine's data preprocessor; by default data are moved to
            the model's device.
        init_cfg: MMEngine's initialisation config.
        **kwargs: Passed on to torchvision's detector: ``min_size``, ``max_size``, ...

    Raises:
        ValueError: For a name or an argument that torchvision does not know, a checkpoint that is
            missing or of another network; in a step, for images without the data above.

    Images go through the network one by one, so that the loss of an image is its own and does not
    depend on the size to which others of its batch would be padded: the batch's is the mean, and
    a step in slices draws the same anchors and proposals. torchvision's own mean is over all
    proposals of the batch, which is the same wherever images have equally many. Without checkpoint
    BatchNorm is trained, and normalises each image by itself.
    """

    def __init__(
        self,
        detector: Literal['FasterRCNN', 'MaskRCNN'] = 'FasterRCNN',
        num_classes: int = 91,
        backbone: str = 'resnet50',
        backbone_checkpoint: str | None = None,
        trainable_layers: int | None = None,
        data_preprocessor: PreprocessorConfig | nn.Module | None = None,
        init_cfg: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(data_preprocessor, init_cfg)
        if detector not in DETECTORS:
            raise ValueError(
                f'TorchvisionDetector: detector must be one of {", ".join(DETECTORS)}, got '
                f'{detector!r}'
            )
        kind = getattr(detection, detector)
        known = inspect.signature(kind).parameters  # torchvision takes any others and does nothing
        if unknown := [name for name in kwargs if name not in known]:
            raise ValueError(f'TorchvisionDetector: {detector} has no setting {unknown[0]!r}')
        fixed = backbone_checkpoint is not None
        try:
            features = resnet_fpn_backbone(
                backbone_name=backbone,
                weights=None,
                norm_layer=FrozenBatchNorm2d if fixed else nn.BatchNorm2d,
                trainable_layers=(3 if fixed else 5)
                if trainable_layers is None
                else trainable_layers,
            )
            self.detector = kind(features, num_classes, **kwargs)
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(f'TorchvisionDetector: {detector} on {backbone!r}: {error}') from error
        self.num_classes = num_classes
        self.with_masks = detector == 'MaskRCNN'
        if backbone_checkpoint is not None:
            _load_resnet(features.body, backbone_checkpoint)

    def targets(self, inputs: Any, data_samples: Any = None, size: Any = None) -> None:
        """None; the batch is checked here, once."""
        if not isinstance(inputs, (list, tuple)) or not isinstance(data_samples, (list, tuple)):
            raise ValueError(
                'TorchvisionDetector: a batch must be lists of images and of data samples; set '
                "collate_fn=dict(type='list_samples') in the data loader"
            )
        wanted = ('boxes', 'labels', 'masks') if self.with_masks else ('boxes', 'labels')
        for sample in data_samples:
            missing = [name for name in wanted if name not in sample]
            if missing:
                remedy = '; set masks=True in the dataset' if missing == ['masks'] else ''
                raise ValueError(
                    f'TorchvisionDetector: an image has no {" and no ".join(missing)}{remedy}'
                )
        self.check_batch(data_samples)

    def check_batch(self, data_samples: Any) -> None:
        """Labels must be of classes that there are."""
        classes = range(1, self.num_classes)
        setting = f'model.num_classes={self.num_classes}, 0 is the background'
        for sample in data_samples if isinstance(data_samples, (list, tuple)) else ():
            if 'labels' in sample:
                check_labels(sample['labels'], classes, 'TorchvisionDetector', setting)

    def slices(self, inputs: Any, data_samples: Any, size: Any) -> list[Slice]:
        """Cut by image."""
        return [
            Slice(take(inputs, rows), take(data_samples, rows), rows, len(inputs))
            for rows in cut_evenly(len(inputs), size)
        ]

    def embed(
        self, inputs: Sequence[Tensor], data_samples: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Tensor]:
        """torchvision's losses of each image by name, [b] each."""
        wanted = ('boxes', 'labels', 'masks')
        every = [
            self.detector([image], [{key: sample[key] for key in wanted if key in sample}])
            for image, sample in zip(inputs, data_samples, strict=True)
        ]
        return {name: torch.stack([losses[name] for losses in every]) for name in every[0]}

    def predict(
        self, inputs: Sequence[Tensor], data_samples: Any = None
    ) -> list[dict[str, Tensor]]:
        """``boxes`` [N, 4], ``labels``, ``scores`` [N], ``masks`` [N, 1, H, W] of each image."""
        return [self.detector([image])[0] for image in inputs]


def _load_resnet(body: nn.Module, file: str) -> None:
    """Weights of torchvision's ResNet into the part of it that the detector has."""
    try:
        weights = read_weights(file)
    except FileNotFoundError as error:
        raise ValueError(
            f'TorchvisionDetector: there is no file backbone_checkpoint={file!r}; download '
            "torchvision's weights of this ResNet to it"
        ) from error
    try:
        missing, unexpected = body.load_state_dict(weights, strict=False)
    except (RuntimeError, TypeError) as error:
        missing, unexpected = [str(error).splitlines()[0]], []
    others = [name for name in unexpected if not name.startswith('fc.')]
    if missing or others:
        raise ValueError(
            f'TorchvisionDetector: backbone_checkpoint={file!r} does not hold the weights of this '
            f'ResNet: missing {missing[:3]}, unknown {others[:3]}'
        )
