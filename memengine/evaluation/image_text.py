"""How well images and texts find each other.

Shapes: N samples, D width of the embeddings, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from mmengine.evaluator import BaseMetric
from torch import Tensor

from memengine.evaluation.checks import check_labelled, check_numbers, each_once
from memengine.evaluation.knn import unit_rows
from memengine.registry import METRICS

_CHUNK = 1024


def zero_shot_accuracy(images: Tensor, texts: Tensor, labels: Tensor) -> float:
    """Percentage of images whose class is the one with the nearest prompts.

    A class is the mean of its normalised text embeddings (prompt ensembling).

    Args:
        images: [N, D].
        texts: [N, D]; text i is a caption of label i.
        labels: Long[N].
    """
    classes, class_index = labels.unique(return_inverse=True)
    sums = torch.zeros(len(classes), texts.shape[1])
    sums.index_add_(0, class_index, unit_rows(texts.float()))
    prototypes = unit_rows(sums)  # [K, D]
    nearest = (unit_rows(images.float()) @ prototypes.T).argmax(dim=1)
    return 100.0 * (nearest == class_index).float().mean().item()


def recall_at(
    queries: Tensor,
    candidates: Tensor,
    match: Tensor,
    k: int,
    candidate_match: Tensor | None = None,
) -> float:
    """Percentage of queries that have a match among their k nearest candidates.

    Args:
        queries: [N, D].
        candidates: [M, D].
        match: Long[N]; candidate j matches query i where ``match[i] == candidate_match[j]``.
        k: Number of candidates that are looked at.
        candidate_match: Long[M]; by default ``match``.
    """
    theirs = match if candidate_match is None else candidate_match
    queries, candidates = unit_rows(queries.float()), unit_rows(candidates.float())
    right = 0
    for chunk, wanted in zip(queries.split(_CHUNK), match.split(_CHUNK), strict=True):
        found = theirs[(chunk @ candidates.T).topk(k, dim=1).indices]  # [n, k]
        right += int((found == wanted[:, None]).any(dim=1).sum())
    return 100.0 * right / len(queries)


class _PairMetric(BaseMetric):
    """Keeps image and text embeddings of all samples; those of one index count once."""

    default_prefix = ''

    def _embeddings(self, results: list[tuple[Tensor, Tensor, int, int]]) -> list[Tensor]:
        """Those of images [N, D] and of texts [N, D]."""
        both = [torch.stack(part) for part in list(zip(*results, strict=True))[:2]]
        check_numbers(torch.cat(both, dim=1), type(self).__name__)
        return both

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Keep what one batch gives."""
        given = data_batch['data_samples']
        for sample, label, index in zip(data_samples, given['label'], given['index'], strict=True):
            if 'text_feature' not in sample:
                raise ValueError(
                    f"{type(self).__name__}: the model returns no 'text_feature'; it needs CLIP or "
                    'SigLIP, and captions in the validation pipeline (Tokenize)'
                )
            self.results.append(
                (sample['feature'].cpu(), sample['text_feature'].cpu(), int(label), int(index))
            )


@METRICS.register_module()
class ZeroShotMetric(_PairMetric):
    """Classification of images by the captions of the classes, without a classifier.

    An image's class is the one whose captions (the mean of their embeddings) are nearest. The
    captions are those of the validation set, made from the labels (``LabelCaption``). Reported:
    ``zero_shot_top1``, in percent; guessing gives 100 / number of classes.

    Args:
        prefix: Put before the name, for several such metrics.

    Raises:
        ValueError: When the model returns no text features, or samples have no labels.

    Cost: 8 * D bytes per sample, gathered from all ranks.
    """

    def compute_metrics(self, results: list[tuple[Tensor, Tensor, int, int]]) -> dict[str, float]:
        """The percentage, from all samples."""
        results = each_once(results, [row[3] for row in results])
        images, texts = self._embeddings(results)
        labels = torch.tensor([row[2] for row in results])
        check_labelled(labels, 'ZeroShotMetric')
        return {'zero_shot_top1': zero_shot_accuracy(images, texts, labels)}


@METRICS.register_module()
class RetrievalMetric(_PairMetric):
    """Recall at k: whether a text finds a right image among the k nearest, and vice versa.

    Reported, in percent: ``image_to_text_r<k>`` and ``text_to_image_r<k>``.

    Args:
        topk: Numbers of candidates that are looked at.
        match: ``'index'``: the sample's own caption is right; ``'label'``: that of any sample of
            its class, for captions made from labels.
        prefix: Put before the names, for several such metrics.

    Raises:
        ValueError: For a setting out of range, a model that returns no text features, or samples
            without labels where ``match='label'``.

    Cost: 8 * D bytes per sample, gathered from all ranks; 4 * N bytes for each of 1,024 queries.
    """

    def __init__(
        self,
        topk: Sequence[int] = (1, 5),
        match: Literal['index', 'label'] = 'index',
        prefix: str | None = None,
    ) -> None:
        super().__init__(prefix=prefix)
        if not topk or min(topk) < 1:
            raise ValueError(f'RetrievalMetric: topk must be numbers of at least 1, got {topk}')
        if match not in ('index', 'label'):
            raise ValueError(f"RetrievalMetric: match must be 'index' or 'label', got {match!r}")
        self.topk = list(topk)
        self.match = match

    def compute_metrics(self, results: list[tuple[Tensor, Tensor, int, int]]) -> dict[str, float]:
        """The percentages, from all samples."""
        results = each_once(results, [row[3] for row in results])
        if max(self.topk) > len(results):
            raise ValueError(f'RetrievalMetric: topk={self.topk} exceeds {len(results)} samples')
        images, texts = self._embeddings(results)
        match = torch.tensor([row[2] if self.match == 'label' else row[3] for row in results])
        if self.match == 'label':
            check_labelled(match, "RetrievalMetric(match='label')")
        metrics = {}
        for k in self.topk:
            metrics[f'image_to_text_r{k}'] = recall_at(images, texts, match, k)
            metrics[f'text_to_image_r{k}'] = recall_at(texts, images, match, k)
        return metrics
