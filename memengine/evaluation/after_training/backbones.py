"""The network that makes a model's features, and images as it takes them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from memengine.evaluation.after_training.predictions import batches, dataset_of


@dataclass(frozen=True)
class Backbone:
    """A part of a model.

    Attributes:
        name: Of the module in the model, e.g. ``'teacher.backbone'``.
        module: What takes images [B, C, H, W] and gives features [B, D].
        preprocessing: How the run makes these, by the names in timm's ``pretrained_cfg``; what is
            not known is not there.
    """

    name: str
    module: nn.Module
    preprocessing: Mapping[str, Any] = field(default_factory=dict)

    @property
    def network(self) -> nn.Module:
        """The library's own module, which ``TimmBackbone`` and its like hold as ``model``."""
        return dict(self.module.named_children()).get('model', self.module)

    @property
    def library(self) -> str:
        """The package that the network is of, e.g. ``'timm'``."""
        return type(self.network).__module__.partition('.')[0]

    def on_cpu(self) -> Backbone:
        """A copy on the CPU, in eval mode and without gradients."""
        module = copy.deepcopy(self.module).cpu().eval().requires_grad_(False)
        return replace(self, module=module)


def find_backbone(model: nn.Module, part: str = '', setting: str = 'part') -> Backbone:
    """The module that is asked for, or the only one that is called ``backbone``.

    Where there is a teacher, its backbone is the one whose features are evaluated.

    Raises:
        ValueError: When there is no such module, or none or several to be found.
    """
    modules = dict(model.named_modules())
    if part:
        if part not in modules:
            raise ValueError(
                f'{setting}: the model has no module {part!r}; its backbones are '
                f'{_listed(_backbones(modules)) or "none"}'
            )
        return Backbone(part, modules[part])
    found = _backbones(modules)
    found = [name for name in found if name.startswith('teacher.')] or found
    if len(found) != 1:
        problem = f'several backbones, {_listed(found)}' if found else 'no module called backbone'
        raise ValueError(f'{setting}: the model has {problem}; name the module that is meant')
    return Backbone(found[0], modules[found[0]])


def _backbones(modules: dict[str, nn.Module]) -> list[str]:
    """Those that are in no other: timm's hybrids and ``PooledBackbone`` have one inside."""
    named = [name for name in modules if name.rpartition('.')[2] == 'backbone']
    return [name for name in named if not any(name.startswith(f'{outer}.') for outer in named)]


def _listed(names: list[str]) -> str:
    return ' and '.join(names)


def images_of(runner: Any, rows: list[int]) -> Tensor:
    """Images of the validation data as the model takes them, [N, C, H, W] on its device.

    Raises:
        ValueError: When the data hold several views of an image.
    """
    alone = dict(batch_size=len(rows), num_workers=0, prefetch_factor=None, timeout=0)
    (batch,) = batches(runner, dataset_of(runner), rows, **alone)
    images = runner.model.data_preprocessor(batch, False)['inputs']
    if not isinstance(images, Tensor):
        raise ValueError('val_dataloader holds several views of an image; one is wanted')
    return images
