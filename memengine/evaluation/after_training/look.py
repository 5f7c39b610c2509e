"""``memengine look``: pictures of what features hold.

Shapes: N images, D width of the features.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from memengine.evaluation.after_training.backbones import find_backbone, images_of
from memengine.evaluation.after_training.predictions import collect, dataset_of, one_process
from memengine.evaluation.knn import unit_rows
from memengine.registry import LOOPS
from memengine.visualization.attention import (
    NoAttentionError,
    attention_maps,
    save_attention_figure,
)
from memengine.visualization.features import (
    class_words,
    dense_features,
    patch_colours,
    principal_components,
    save_map,
    save_nearest,
    save_patches,
)
from memengine.visualization.figures import evenly_chosen


@LOOPS.register_module()
class LookLoop:
    """Draws what the features of the validation images hold, each picture a PNG.

    ``neighbours``: images, and those whose features are nearest; of a bank and queries the queries'
    in the bank. ``map``: all features in the plane, coloured by label. ``attention``: where the
    last block of a Vision Transformer looks. ``patches``: the first three principal components of
    the patches' features, over all images that are shown, as colours (networks of timm). What a
    model does not have is left out, and said.

    Args:
        runner: With the model, and ``val_dataloader``.
        pictures: Which are drawn.
        images: How many images are shown, spread evenly over the data.
        neighbours: How many neighbours of each.
        map: ``'pca'``, or ``'umap'``, which needs umap-learn.
        part: Name of the backbone, for attention and patches; by default the only one, the
            teacher's where there is a teacher.

    Raises:
        ImportError: When umap-learn is missing.
        ValueError: For a setting out of range, or data of several views.

    Cost: the forward passes of all images; N x D in fp32 and, for PCA, D x D in float64.
    """

    def __init__(
        self,
        runner: Any,
        pictures: Sequence[Literal['neighbours', 'map', 'attention', 'patches']] = (
            'neighbours',
            'map',
            'attention',
            'patches',
        ),
        images: int = 8,
        neighbours: int = 8,
        map: Literal['pca', 'umap'] = 'pca',
        part: str = '',
    ) -> None:
        of_features = {'neighbours': self._draw_neighbours, 'map': self._draw_map}
        of_images = {'attention': self._draw_attention, 'patches': self._draw_patches}
        self._of_features: Mapping[str, Callable] = of_features
        self._of_images: Mapping[str, Callable] = of_images
        known = {**of_features, **of_images}
        if isinstance(pictures, str) or not pictures or not {*pictures} <= {*known}:
            raise ValueError(f'look.pictures must be a list of {[*known]}, got {pictures!r}')
        if images < 1 or neighbours < 1:
            raise ValueError(
                f'look: images and neighbours must be at least 1, got {images} and {neighbours}'
            )
        if map not in _MAPS:
            raise ValueError(f'look.map must be one of {[*_MAPS]}, got {map!r}')
        if map == 'umap' and importlib.util.find_spec('umap') is None:
            raise ImportError("look.map='umap' needs umap-learn: pip install umap-learn")
        self.runner, self.pictures, self.map, self.part = runner, list(pictures), map, part
        self.images, self.neighbours = images, neighbours

    def run(self) -> str:
        """Draw; returns what was drawn, or why not."""
        one_process(self.runner, 'look')
        folder = Path(self.runner.work_dir)
        lines = []
        if features := [name for name in self.pictures if name in self._of_features]:
            found = collect(self.runner)
            for name in features:
                self._of_features[name](found, folder / f'{name}.png')
                lines.append(f'{folder / name}.png')
        if others := [name for name in self.pictures if name in self._of_images]:
            size = len(dataset_of(self.runner))
            images = images_of(self.runner, evenly_chosen(size, self.images).tolist())
            for name in others:
                why = self._of_images[name](images, folder / f'{name}.png')
                lines.append(f'no {name}: {why}' if why else f'{folder / name}.png')
        return '\n'.join(lines)

    def _draw_neighbours(self, found: dict[str, Tensor], path: Path) -> None:
        features = unit_rows(found['feature'])
        places = torch.arange(len(features))
        in_bank = found.get('bank', torch.ones(len(features))).bool()
        places = places if in_bank.all() else places[~in_bank]
        save_nearest(
            features,
            places[evenly_chosen(len(places), self.images)],
            self.neighbours,
            lambda rows: images_of(self.runner, rows.tolist()),
            path,
            class_words(found['label'], self._classes()) if 'label' in found else (),
            in_bank,
        )

    def _classes(self) -> list[str]:
        metainfo = getattr(dataset_of(self.runner), 'metainfo', {})
        return [str(name) for name in metainfo.get('classes', ())]

    def _draw_map(self, found: dict[str, Tensor], path: Path) -> None:
        points, title = _MAPS[self.map](found['feature'])
        save_map(points, path, found.get('label'), self._classes(), title)

    def _draw_attention(self, images: Tensor, path: Path) -> str | None:
        try:
            maps = attention_maps(self._network(), images)
        except NoAttentionError as error:
            return str(error)
        save_attention_figure(images, maps, path)
        return None

    def _draw_patches(self, images: Tensor, path: Path) -> str | None:
        network = self._network()
        features = dense_features(network, images)
        if features is None:
            return f'{type(network).__name__} is no network of timm'
        save_patches(images.cpu(), patch_colours(features), path)
        return None

    def _network(self) -> Any:
        return find_backbone(self.runner.model, self.part, 'look.part').network


def _pca(features: Tensor) -> tuple[Tensor, str]:
    points, shares = principal_components(features, 2)
    return points, f'PCA: {100 * shares[0]:.0f} % and {100 * shares[1]:.0f} % of the variance'


def _umap(features: Tensor) -> tuple[Tensor, str]:
    import umap

    points = umap.UMAP(metric='cosine', random_state=0).fit_transform(features.numpy())
    return torch.as_tensor(points), 'UMAP'


_MAPS: Mapping[str, Callable[[Tensor], tuple[Tensor, str]]] = {'pca': _pca, 'umap': _umap}
