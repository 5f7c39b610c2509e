"""Classifiers on features as they are: linear ones of many learning rates at once, class means.

Shapes: N samples, Q queries, D width of the features, C classes, K learning rates, E epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from memengine.evaluation.checks import check_finite
from memengine.evaluation.knn import unit_rows

_MOMENTUM = 0.9


@dataclass(frozen=True)
class LinearProbe:
    """What :func:`linear_probe` found, in percent.

    Attributes:
        held_out: Top-1 on the share of the training features that was held out, [E, K].
        queries: Top-1 on the queries, [E, K].
        best: Which learning rate did best on the held-out share at the end; the queries have no
            say in it.
    """

    held_out: Tensor
    queries: Tensor
    best: int


def linear_probe(
    features: Tensor,
    labels: Tensor,
    queries: Tensor,
    query_labels: Tensor,
    learning_rates: Sequence[float],
    epochs: int = 100,
    batch_size: int = 1024,
    weight_decay: float = 0.0,
    held_out: float = 0.2,
    seed: int = 0,
) -> LinearProbe:
    """Train a linear classifier for each learning rate, all in one pass over the features.

    Features are standardised by the training features; SGD with momentum 0.9 and a cosine
    schedule starts from zero weights.

    Args:
        features: To learn from, [N, D].
        labels: Long[N].
        queries: [Q, D].
        query_labels: Long[Q].
        learning_rates: K of them.
        epochs: Passes over the features.
        batch_size: Features in a step.
        weight_decay: Of the weights, not of the biases.
        held_out: Share of the features that chooses the learning rate.
        seed: Of the held-out share and of the order.

    Raises:
        ValueError: When too few features are there to hold some out, labels are negative,
            features are NaN or infinite, or there is no epoch or learning rate.

    Cost: K * (D + 1) * C parameters, and K * batch_size * C logits, in fp32.
    """
    if epochs < 1 or not learning_rates:
        raise ValueError(
            f'linear probe: epochs={epochs} and learning_rates={list(learning_rates)} train nothing'
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(features), generator=generator)
    count = int(len(features) * held_out)
    if not 0 < count < len(features):
        raise ValueError(
            f'linear probe: held_out={held_out} of {len(features)} features leaves none to learn '
            'from or to choose by; set it between 0 and 1, or give more images'
        )
    if int(labels.min()) < 0 or int(query_labels.min()) < 0:
        raise ValueError('linear probe: labels must not be negative')
    for each in (features, queries):
        check_finite(each, 'linear probe')
    # In float64 the mean of equal numbers is that number: what never varies becomes 0, not noise.
    wide = torch.promote_types(features.dtype, torch.float32)
    mean = features.mean(0, dtype=torch.float64).to(wide)
    features, queries = (features - mean).float(), (queries - mean).float()
    std = features.std(0).clamp_min(1e-6)
    features, queries = features / std, queries / std
    chosen, rest = order[:count], order[count:]
    classes = 1 + int(max(labels.max(), query_labels.max()))
    heads = _Heads(learning_rates, features.shape[1], classes, weight_decay)
    steps = epochs * -(-len(rest) // batch_size)
    curves: dict[str, list[Tensor]] = {'held_out': [], 'queries': []}
    done = 0
    for _ in range(epochs):
        shuffled = rest[torch.randperm(len(rest), generator=generator)]
        for rows in shuffled.split(batch_size):
            heads.step(features[rows], labels[rows], done / steps)
            done += 1
        curves['held_out'].append(heads.top1(features[chosen], labels[chosen]))
        curves['queries'].append(heads.top1(queries, query_labels))
    held, found = (torch.stack(curve) for curve in curves.values())
    return LinearProbe(held, found, int(held[-1].argmax()))


class _Heads:
    """K linear classifiers side by side, and their optimiser."""

    def __init__(self, rates: Sequence[float], width: int, classes: int, decay: float) -> None:
        self.rates = torch.tensor(list(rates))[:, None, None]  # [K, 1, 1]
        self.weight = torch.zeros(len(rates), width, classes)
        self.bias = torch.zeros(len(rates), 1, classes)
        self.speeds = [torch.zeros_like(self.weight), torch.zeros_like(self.bias)]
        self.decay = decay

    def logits(self, features: Tensor) -> Tensor:
        """[K, n, C] of features [n, D]."""
        return features @ self.weight + self.bias

    def step(self, features: Tensor, labels: Tensor, progress: float) -> None:
        """One of SGD; the gradient of the cross-entropy is the probabilities less the labels."""
        wrong = self.logits(features).softmax(-1) - F.one_hot(labels, self.bias.shape[-1])
        wrong /= len(labels)  # [K, n, C]
        gradients = [features.T @ wrong + self.decay * self.weight, wrong.sum(1, keepdim=True)]
        rate = self.rates * 0.5 * (1 + torch.tensor(progress * torch.pi).cos())
        for value, speed, gradient in zip(
            (self.weight, self.bias), self.speeds, gradients, strict=True
        ):
            speed.mul_(_MOMENTUM).add_(gradient)
            value -= rate * speed

    def top1(self, features: Tensor, labels: Tensor) -> Tensor:
        """Percent that each gets right, [K]."""
        right = self.logits(features).argmax(-1) == labels
        return 100 * right.double().mean(1)


def few_shot(
    features: Tensor,
    labels: Tensor,
    queries: Tensor,
    query_labels: Tensor,
    shots: int,
    draws: int = 5,
    seed: int = 0,
) -> Tensor:
    """Top-1 in percent by the nearest mean of a few samples of each class.

    Args:
        features: To draw the samples from, [N, D].
        labels: Long[N].
        queries: [Q, D].
        query_labels: Long[Q].
        shots: Samples of each class.
        draws: How often they are drawn.
        seed: Of the draws.

    Returns:
        Of each draw, [draws] in float64.

    Raises:
        ValueError: When a class has fewer samples, or none are asked for.

    Source: Snell et al., Prototypical Networks for Few-shot Learning (2017), with cosine
    similarity.
    """
    if shots < 1 or draws < 1:
        raise ValueError(f'few-shot: shots={shots} and draws={draws} must be at least 1')
    features, queries = unit_rows(features), unit_rows(queries)
    classes, counts = labels.unique(return_counts=True)
    if int(counts.min()) < shots:
        raise ValueError(
            f'few-shot: shots={shots}, but a class has {int(counts.min())} sample(s) only'
        )
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(draws):
        means = []
        for label in classes:
            rows = (labels == label).nonzero().flatten()
            drawn = rows[torch.randperm(len(rows), generator=generator)[:shots]]
            means.append(features[drawn].mean(0))
        nearest = (queries @ unit_rows(torch.stack(means)).T).argmax(1)
        found.append(100 * (classes[nearest] == query_labels).double().mean())
    return torch.stack(found)
