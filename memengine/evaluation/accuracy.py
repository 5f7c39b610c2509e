"""Accuracy of a classifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mmengine.evaluator import BaseMetric

from memengine.evaluation.checks import check_labelled, check_numbers, each_once
from memengine.registry import METRICS


@METRICS.register_module()
class AccuracyMetric(BaseMetric):
    """Percentage of images whose class is among the model's first guesses.

    For each sample the model returns ``{'logits': [K]}``, as ``Classifier`` does. Reported:
    ``top1`` (and ``top<k>``), in percent. Samples of a bank (``data_samples['bank']``, see
    ``BankAndQueries``) do not count, so that it can be validated together with ``KNNMetric``; those
    of one ``data_samples['index']``, where there is such, count once.

    Args:
        topk: Numbers of guesses.
        prefix: Put before the names, for several such metrics.

    Raises:
        ValueError: For a number below 1 or above the number of classes, a model without
            ``logits``, logits that are NaN, or samples without labels.

    Cost: a few bytes per sample, gathered from all ranks.
    """

    default_prefix = ''
    needs_trained_classes = True  # the Runner numbers labels as training does

    def __init__(self, topk: Sequence[int] = (1,), prefix: str | None = None) -> None:
        super().__init__(prefix=prefix)
        if not topk or min(topk) < 1:
            raise ValueError(f'AccuracyMetric: topk must be numbers of at least 1, got {topk}')
        self.topk = list(topk)

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Keep at which guess each sample of a batch is right."""
        if any('logits' not in sample for sample in data_samples):
            raise ValueError("AccuracyMetric: the model returns no 'logits'; it needs a Classifier")
        logits = torch.stack([sample['logits'] for sample in data_samples]).cpu()
        check_numbers(logits, 'AccuracyMetric')
        given = data_batch['data_samples']
        classes = logits.shape[1]
        if max(self.topk) > classes:
            raise ValueError(f'AccuracyMetric: topk={self.topk} exceeds the {classes} classes')
        guesses = logits.topk(max(self.topk)).indices  # [n, k]
        right = guesses == given['label'].cpu()[:, None]
        counts = ~given['bank'].cpu().bool() if 'bank' in given else torch.ones(len(right)).bool()
        check_labelled(given['label'].cpu()[counts], 'AccuracyMetric')
        # One entry a sample, so that what a sampler repeats is cut off; MMEngine drops None.
        indices = map(int, given['index']) if 'index' in given else [None] * len(right)
        self.results += [
            (index, bool(count), row.nonzero().flatten().tolist())
            for index, row, count in zip(indices, right, counts, strict=True)
        ]

    def compute_metrics(
        self, results: list[tuple[int | None, bool, list[int]]]
    ) -> dict[str, float]:
        """Percentages from all samples."""
        once = each_once(results, [index for index, _, _ in results])
        counted = [places for _, counts, places in once if counts]
        if not counted:
            raise ValueError('AccuracyMetric: there are no samples but those of the bank')
        return {
            f'top{k}': 100.0 * sum(bool(p) and p[0] < k for p in counted) / len(counted)
            for k in self.topk
        }
