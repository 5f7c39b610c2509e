"""``memengine export``: the backbone of a run for other libraries and runtimes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from memengine.evaluation.after_training.backbones import Backbone, find_backbone, images_of
from memengine.evaluation.after_training.exporters import EXPORTERS
from memengine.evaluation.after_training.model_card import (
    normalisation_of,
    resizing_of,
    write_model_card,
)
from memengine.evaluation.after_training.predictions import one_process
from memengine.evaluation.after_training.results import table, write_results
from memengine.registry import LOOPS

_COMPARED = 2  # images


@LOOPS.register_module()
class ExportLoop:
    """Writes a backbone in the forms that others load by themselves, and a model card.

    What is written is read back and compared with the model; another output is an error.

    Args:
        runner: With the model.
        part: Name of the module, e.g. ``'teacher.backbone'``; by default the only backbone, the
            teacher's where there is a teacher.
        to: ``'weights'`` by the names of the network's own library (timm, torchvision,
            transformers; else those of the module itself), ``'onnx'`` (needs onnx, onnxscript and
            onnxruntime), ``'torch_export'``; or ``'open_clip'`` alone: a CLIP of open_clip's towers
            as one model.
        input_size: Channels, height and width of an image; by default those of the validation
            data.
        tolerance: Largest difference of an output, as a share of the largest output.

    Raises:
        ImportError: When a package for ONNX is missing.
        ValueError: For an unknown form or part, or where outputs differ.

    Cost: the network twice in host memory, and some forward passes of two or three images.
    """

    def __init__(
        self,
        runner: Any,
        part: str = '',
        to: Sequence[Literal['weights', 'onnx', 'torch_export', 'open_clip']] = ('weights',),
        input_size: Sequence[int] | None = None,
        tolerance: float = 1e-4,
    ) -> None:
        unknown = [form for form in to if form not in EXPORTERS]
        if isinstance(to, str) or not to or unknown:
            raise ValueError(f'export.to must be a list of {", ".join(EXPORTERS)}, got {to!r}')
        if 'open_clip' in to and (part or len(to) > 1):
            raise ValueError(
                "export.to=['open_clip'] is of the whole model: no other form, no part"
            )
        if input_size is not None and len(input_size) != 3:
            raise ValueError(f'export.input_size must be [C, H, W], got {input_size!r}')
        self.runner, self.part, self.to = runner, part, list(to)
        self.input_size, self.tolerance = input_size, tolerance

    def run(self) -> str:
        """Write all forms, ``export.json`` and the card; returns what was written, and where."""
        one_process(self.runner, 'export')
        folder = Path(self.runner.work_dir)
        if self.to == ['open_clip']:
            backbone = Backbone('model', self.runner.model).on_cpu()
        else:
            backbone = find_backbone(self.runner.model, self.part, 'export.part').on_cpu()
        codes: dict[str, str] = {}
        errors: dict[str, float] = {}
        images = self._images()
        backbone = dataclasses.replace(backbone, preprocessing=self._preprocessing(images))
        for form in self.to:
            codes[form], errors[form] = self._export(form, backbone, images, folder)
        write_model_card(self.runner, backbone, codes, folder)
        results = dict(part=backbone.name, library=backbone.library, relative_error=errors)
        rows = [(form, f'{error:.1e}') for form, error in errors.items()]
        head = (f'{backbone.name}, read back', 'relative error')
        return write_results(folder, 'export', results, table(head, rows))

    def _images(self) -> Tensor:
        """What outputs are compared on, [N, C, H, W]."""
        if self.input_size is None:
            return images_of(self.runner, list(range(_COMPARED))).cpu()
        generator = torch.Generator().manual_seed(0)
        return torch.randn(_COMPARED, *self.input_size, generator=generator)

    @torch.no_grad()
    def _export(
        self, form: str, backbone: Backbone, images: Tensor, folder: Path
    ) -> tuple[str, float]:
        code, error = EXPORTERS[form](backbone, images, folder)
        if not error <= self.tolerance:
            raise ValueError(
                f'export: {form} of {backbone.name} gives other outputs: they differ by '
                f'{error:.1e} of the largest, and export.tolerance={self.tolerance}'
            )
        return code, error

    def _preprocessing(self, images: Tensor) -> dict[str, Any]:
        channels, height, width = images.shape[1:]
        normalised = normalisation_of(self.runner.cfg)
        if not normalised and images.min() >= 0 and images.max() <= 1:  # by nothing
            normalised = dict(mean=[0.0] * channels, std=[1.0] * channels)
        if normalised and len(normalised['mean']) != channels:
            normalised = {}
        is_resized = height == width and self.input_size is None
        return {**normalised, **(resizing_of(self.runner.cfg, height) if is_resized else {})}
