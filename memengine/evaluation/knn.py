"""Weighted k-nearest-neighbour classification, in bounded memory.

Shapes: Q queries, N samples in the bank, D width of the features, k neighbours, C classes.

A candidate is an int64 key: its similarity in the upper half, its place in the bank in the lower.
The largest keys are the nearest samples, equals are decided by their place, and so neither the
size of a block nor the shard that a sample lies on has a say in the result.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from memengine.evaluation.checks import check_finite

_SIMILARITY_STEPS = 2**24  # similarities are told apart to 1/2**24, which is what float32 has at 1
_MAX_INDEX = 2**32
_TILE = 16384  # samples of the bank that are compared at a time


def unit_rows(features: Tensor) -> Tensor:
    """Rows [N, D] scaled to length 1, in float32 at least; a zero row stays zero.

    By a power of two first, which rounds nothing: squares of 1e25 or 1e-25 are beyond float32.
    """
    features = features.to(torch.promote_types(features.dtype, torch.float32))
    largest = features.abs().amax(dim=1, keepdim=True)  # [N, 1]
    power = torch.ones_like(largest).ldexp(-largest.frexp().exponent.clamp(-126, 126))
    return F.normalize(features * power, dim=1)


def merge(keys: Tensor, labels: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k nearest of candidates from several places.

    Args:
        keys: [Q, M], M >= k.
        labels: Their labels, [Q, M].
        k: How many to keep.

    Returns:
        Keys and labels, both [Q, k], nearest first.
    """
    keys, order = keys.topk(k, dim=1)
    return keys, labels.gather(1, order)


def nearest(
    query: Tensor, bank: Tensor, labels: Tensor, tie_breaks: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """The k nearest samples of the bank, or all of a smaller one.

    Args:
        query: Unit rows, [Q, D].
        bank: Unit rows, [N, D]; moved to the queries' device piece by piece.
        labels: Long[N].
        tie_breaks: Long[N], what decides between equals: unique, in [0, 2**32).
        k: Number of neighbours.

    Returns:
        Keys and labels, both [Q, min(k, N)], nearest first.

    Cost: 12 bytes for Q x 16384 similarities at a time.
    """
    keys = torch.empty(len(query), 0, dtype=torch.long, device=query.device)
    found = keys
    for start in range(0, len(bank), _TILE):
        tile = slice(start, start + _TILE)
        similarity = query @ bank[tile].to(query.device).T  # [Q, tile]
        tie = (_MAX_INDEX - 1 - tie_breaks[tile]).to(query.device)
        new = (similarity.mul_(_SIMILARITY_STEPS).round_().long() << 32).add_(tie)
        new, order = new.topk(min(k, new.shape[1]), dim=1)
        keys, found = merge(
            torch.cat([keys, new], dim=1),
            torch.cat([found, labels[tile].to(query.device)[order]], dim=1),
            min(k, keys.shape[1] + new.shape[1]),
        )
    return keys, found


def vote(keys: Tensor, labels: Tensor, temperature: float, num_classes: int) -> Tensor:
    """Votes of the neighbours, each with the weight exp(similarity / temperature).

    Args:
        keys: [Q, k], nearest first.
        labels: Long[Q, k].
        temperature: Smaller gives the nearest more say.
        num_classes: C.

    Returns:
        Votes [Q, C] in float64, relative to the weight of the nearest neighbour.
    """
    similarity = (keys >> 32).double() / _SIMILARITY_STEPS
    weights = ((similarity - similarity[:, :1]) / temperature).exp()
    votes = weights.new_zeros(len(keys), num_classes)
    return votes.scatter_add_(1, labels, weights)


def weighted_knn(
    query: Tensor,
    bank: Tensor,
    bank_labels: Tensor,
    k: int = 20,
    temperature: float = 0.07,
    num_classes: int | None = None,
    chunk_size: int = 256,
) -> Tensor:
    """Classify queries by their nearest neighbours in a bank of labelled features.

    The k samples of the largest cosine similarity s vote with weight exp(s / temperature).

    Args:
        query: Features, [Q, D].
        bank: Features, [N, D].
        bank_labels: Long[N], in [0, C).
        k: Number of neighbours.
        temperature: Smaller gives the nearest more say.
        num_classes: C; by default one more than the largest label.
        chunk_size: Queries that are compared at a time.

    Returns:
        The predicted class of each query, Long[Q].

    Raises:
        ValueError: When k is larger than the bank, a setting is not positive, shapes disagree, or
            features are NaN or infinite.

    Cost: 12 bytes for chunk_size x 16384 similarities, beside the normalised features.

    Source: Wu et al., Unsupervised Feature Learning via Non-Parametric Instance Discrimination
    (2018); used so by DINO (Caron et al., 2021).
    """
    check_settings(k, temperature, chunk_size)
    if query.ndim != 2 or bank.ndim != 2 or query.shape[1] != bank.shape[1]:
        raise ValueError(
            'weighted_knn: query must be [Q, D] and bank [N, D], '
            f'got {list(query.shape)} and {list(bank.shape)}'
        )
    if bank_labels.shape != bank.shape[:1]:
        raise ValueError(
            f'weighted_knn: bank_labels must be [{len(bank)}], one per sample of the bank, '
            f'got {list(bank_labels.shape)}'
        )
    check_k(k, len(bank))
    for features in (query, bank):
        check_finite(features, 'weighted_knn')
    if num_classes is None:
        num_classes = int(bank_labels.max()) + 1
    bank, tie_breaks = unit_rows(bank), torch.arange(len(bank), device=bank.device)
    predictions = [
        vote(
            *nearest(unit_rows(chunk), bank, bank_labels, tie_breaks, k), temperature, num_classes
        ).argmax(dim=1)
        for chunk in query.split(chunk_size)
    ]
    return torch.cat(predictions)


def check_settings(k: int, temperature: float, chunk_size: int) -> None:
    """Raise ValueError for a setting that makes no sense."""
    for name, value in (('k', k), ('temperature', temperature), ('chunk_size', chunk_size)):
        if not value > 0:
            raise ValueError(f'k-NN: {name} must be positive, got {value}')


def check_k(k: int, bank_size: int) -> None:
    """Raise ValueError when there are fewer than k samples in the bank."""
    if k > bank_size:
        raise ValueError(
            f'k-NN: k={k} neighbours are asked for, but the bank has {bank_size} samples; '
            f'set k to at most {bank_size}'
        )
