"""Pictures of features: nearest neighbours, a map in the plane, patches in colour.

Shapes: N features of width D, B images, K neighbours of each, h x w patches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

from memengine.visualization.attention import in_eval_mode
from memengine.visualization.figures import figure_of, for_imshow, save_figure

_LEGEND = 20  # classes that fit beside a map
_OUTSIDE = 0.01  # share of the patches beyond either end of the colours


def principal_components(features: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Coordinates along the directions in which features [N, D] vary most.

    The sign of a direction is such that its largest entry is positive.

    Returns:
        Coordinates [N, count], and the share of the variance that each holds [count]; both zero
        beyond the rank.

    Cost: D x D in float64.
    """
    centred = features.double() - features.double().mean(0)
    variance, directions = torch.linalg.eigh(centred.T @ centred)  # ascending
    variance, directions = variance.flip(0)[:count].clamp_min(0), directions.flip(1)[:, :count]
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))  # [1, count]
    coordinates = centred @ (directions * largest.sign())
    return coordinates, variance / centred.square().sum().clamp_min(1e-30)


def dense_features(network: nn.Module, images: Tensor) -> Tensor | None:
    """Features of each patch [B, D, h, w] from a network of timm; None from another."""
    if not hasattr(network, 'forward_intermediates'):
        return None
    with in_eval_mode(network):
        maps = network.forward_intermediates(  # type: ignore[operator]
            images, indices=1, intermediates_only=True, output_fmt='NCHW', norm=True
        )
    return maps[-1].float()


def patch_colours(features: Tensor) -> Tensor:
    """The first three principal components of all patches [B, D, h, w] as colours [B, h, w, 3]."""
    batch, _, height, width = features.shape
    rows = features.permute(0, 2, 3, 1).flatten(0, 2)  # [B * h * w, D]
    coordinates = principal_components(rows, 3)[0]
    ends = torch.tensor([_OUTSIDE, 1 - _OUTSIDE], dtype=coordinates.dtype)
    low, high = coordinates.quantile(ends.to(coordinates.device), dim=0)
    colours = ((coordinates - low) / (high - low).clamp_min(1e-12)).clamp(0, 1)
    return colours.float().unflatten(0, (batch, height, width))


def save_patches(images: Tensor, colours: Tensor, path: str | Path) -> None:
    """Draw images [B, C, H, W] above their patches' colours [B, h, w, 3]."""
    count = len(images)
    figure, (above, below) = figure_of(2, count, width=1.3 * count, height=2.6)
    for image, colour, top, bottom in zip(images, colours.cpu(), above, below, strict=True):
        top.imshow(for_imshow(image), cmap='gray', vmin=0, vmax=1)
        bottom.imshow(colour.numpy())
    for axis in figure.axes:
        axis.set_axis_off()
    save_figure(figure, path)


def nearest_rows(features: Tensor, rows: Tensor, count: int, among: Tensor | None = None) -> Tensor:
    """The nearest of some of the samples, without themselves, nearest first: Long[B, K].

    Args:
        features: Of length 1, [N, D].
        rows: Whose neighbours are wanted, Long[B].
        count: K, less where there are not as many.
        among: Which samples may be neighbours, Bool[N]; by default all.
    """
    among = torch.ones(len(features), dtype=torch.bool) if among is None else among
    similarity = features[rows] @ features.T  # [B, N]
    similarity[:, ~among] = -torch.inf
    similarity[torch.arange(len(rows)), rows] = -torch.inf
    return similarity.topk(min(count, int(among.sum()) - int(among[rows].any())), dim=1).indices


def class_words(labels: Tensor, classes: Sequence[str]) -> list[str]:
    """What the class of each label [N] is called: its number without a name, '' where unknown."""
    return [
        '' if label < 0 else classes[label] if label < len(classes) else str(label)
        for label in labels.tolist()
    ]


def save_nearest(
    features: Tensor,
    rows: Tensor,
    count: int,
    images_of: Callable[[Tensor], Tensor],
    path: str | Path,
    names: Sequence[str] = (),
    among: Tensor | None = None,
) -> None:
    """Draw images and what is nearest to them by their features.

    Args:
        features: Of length 1, [N, D].
        rows: Which are shown, Long[B].
        count: Neighbours of each.
        images_of: Gives the images [M, C, H, W] of rows Long[M].
        path: Where the PNG goes.
        names: Class of each sample.
        among: Which samples may be neighbours, Bool[N]; by default all.
    """
    nearest = nearest_rows(features, rows, count, among)  # [B, K]
    images = images_of(torch.cat([rows, nearest.flatten()])).cpu()
    save_neighbours(
        images[: len(rows)],
        images[len(rows) :].unflatten(0, nearest.shape),
        path,
        [names[row] for row in rows if names],
        [[names[row] for row in others if names] for others in nearest],
    )


def save_neighbours(
    images: Tensor,
    neighbours: Tensor,
    path: str | Path,
    names: Sequence[str],
    neighbours_names: Sequence[Sequence[str]],
) -> None:
    """Draw images [B, C, H, W], right of each its nearest [B, K, C, H, W]; other names are red."""
    columns = 1 + len(neighbours[0])
    figure, axes = figure_of(len(images), columns, width=1.2 * columns, height=1.35 * len(images))
    for row, (image, others) in enumerate(zip(images, neighbours, strict=True)):
        for axis, one in zip(axes[row], [image, *others], strict=True):
            axis.imshow(for_imshow(one), cmap='gray', vmin=0, vmax=1)
            axis.set_axis_off()
        if names:
            for axis, name in zip(axes[row], [names[row], *neighbours_names[row]], strict=True):
                axis.set_title(name[:16], fontsize=7, color='k' if name == names[row] else 'r')
    save_figure(figure, path)


def save_map(
    points: Tensor,
    path: str | Path,
    labels: Tensor | None = None,
    names: Sequence[str] = (),
    title: str = '',
) -> None:
    """Draw points [N, 2], coloured by their labels Long[N], with a legend of a few classes."""
    figure, ((axis,),) = figure_of(1, 1, width=7, height=5.5)
    scatter(axis, points, labels, names)
    axis.set_title(title, fontsize=10)
    save_figure(figure, path)


def scatter(
    axis: Axes,
    points: Tensor,
    labels: Tensor | None = None,
    names: Sequence[str] = (),
    legend: bool = True,
) -> None:
    """Points [N, 2], coloured by their labels Long[N], with a legend of a few classes."""
    across, up = points.cpu().double().numpy().T
    if labels is None:
        axis.scatter(across, up, s=6, linewidths=0)
    else:
        classes = labels.unique().tolist()
        for place, label in enumerate(classes):
            of_it = (labels == label).cpu().numpy()
            name = names[label] if label < len(names) else str(label)
            colour = f'C{place}' if len(classes) <= 10 else None
            axis.scatter(across[of_it], up[of_it], s=6, linewidths=0, color=colour, label=name)
        if legend and len(classes) <= _LEGEND:
            axis.legend(
                fontsize=7, frameon=False, markerscale=2, loc='center left', bbox_to_anchor=(1, 0.5)
            )
    axis.set_xticks([])
    axis.set_yticks([])
