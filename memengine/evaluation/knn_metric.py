"""k-NN accuracy as a metric of validation, sharded over ranks.

Shapes: n samples on this rank, D width of the features, k neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mmengine import dist
from mmengine.evaluator import BaseMetric
from mmengine.logging import MessageHub, print_log
from torch import Tensor
from torch.nn import functional as F

from memengine.evaluation.knn import (
    check_k,
    check_settings,
    merge,
    nearest,
    refuse_unlabelled,
    unit_rows,
    vote,
)
from memengine.registry import METRICS

_PIXEL_LIMIT_BYTES = 2 * 2**30
_LOWEST_KEY = torch.iinfo(torch.long).min


@dataclass
class _Samples:
    """What this rank has seen (or the part of it that counts)."""

    features: Tensor  # [n, D]
    labels: Tensor  # Long[n]
    index: Tensor  # Long[n]
    bank: Tensor  # Bool[n]
    pixels: Tensor | None  # [n, C * H * W]

    def select(self, keep: Tensor) -> _Samples:
        kept: dict[str, Any] = {k: None if v is None else v[keep] for k, v in vars(self).items()}
        return _Samples(**kept)


@METRICS.register_module()
class KNNMetric(BaseMetric):
    """Weighted k-NN accuracy of frozen features, with what it has to be compared with.

    Validation runs over one data set that holds the bank and the queries, told apart by
    ``data_samples['bank']`` (see ``BankAndQueries``); for each sample the model returns
    ``{'feature': [D]}``. Each rank keeps the features of its own samples and never those of
    others; samples that a sampler repeats (same ``index``) count once. The result is the same on
    any number of ranks.

    Reported, in percent, and in one line of the log:

    * ``knn_top1``: now;
    * ``knn_top1_untrained``: of the evaluation before training (see ``EvaluateFirstHook``),
      left out where there was none;
    * ``knn_top1_raw_pixels``: of the images themselves as the network gets them.

    The last two are computed once and kept in the message hub, hence in checkpoints.

    Args:
        k: Number of neighbours.
        temperature: A neighbour of similarity s votes with weight exp(s / temperature).
        chunk_size: Queries, of all ranks together, that are compared at a time.
        raw_pixels: Whether to report k-NN on pixels; an integer s compares images averaged down
            to s x s, for large images.
        prefix: Put before the names, for several such metrics.

    Raises:
        ValueError: For a setting that makes no sense, k larger than the bank, features that are
            NaN or infinite, samples without the keys named above or without a label.

    Cost: per rank 4 * D bytes per own sample, and 12 bytes for chunk_size x 16384 similarities;
    on the wire the queries' features and 16 * k bytes per query and rank.
    """

    default_prefix = ''

    def __init__(
        self,
        k: int = 20,
        temperature: float = 0.07,
        chunk_size: int = 256,
        raw_pixels: bool | int = True,
        prefix: str | None = None,
    ) -> None:
        super().__init__(prefix=prefix)
        check_settings(k, temperature, chunk_size)
        if raw_pixels < 0:
            raise ValueError(
                f'KNNMetric: raw_pixels must be True, False or a size, got {raw_pixels}'
            )
        self.k = k
        self.temperature = temperature
        self.chunk_size = chunk_size
        self.raw_pixels = raw_pixels
        self._device = torch.device('cpu')

    # -------------------------------------------------------------- gathering the samples

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Keep what one batch gives."""
        given = data_batch['data_samples']
        missing = [name for name in ('label', 'index', 'bank') if name not in given]
        if missing:
            raise ValueError(
                f'KNNMetric: data_samples lacks {", ".join(missing)}; validate on '
                "dict(type='BankAndQueries', bank=..., queries=...)"
            )
        refuse_unlabelled(given['label'], 'KNNMetric')
        features = torch.stack([sample['feature'].flatten() for sample in data_samples])
        self._device = features.device
        wanted = self.raw_pixels and self._cached('knn_top1_raw_pixels') is None
        self.results.append(
            _Samples(
                features.float().cpu(),
                given['label'].cpu(),
                given['index'].cpu(),
                given['bank'].cpu().bool(),
                self._pixels(data_batch['inputs']) if wanted else None,
            )
        )

    def _pixels(self, images: Any) -> Tensor:
        if not isinstance(images, Tensor):
            raise ValueError(
                'KNNMetric: raw_pixels needs one image per sample, but the validation pipeline '
                'gives several views; set raw_pixels=False'
            )
        images = images.float()
        if self.raw_pixels is not True:
            images = F.adaptive_avg_pool2d(images, int(self.raw_pixels))
        pixels = images.flatten(1).cpu()
        kept = sum(batch.pixels.nbytes for batch in self.results if batch.pixels is not None)
        if kept + pixels.nbytes > _PIXEL_LIMIT_BYTES:
            raise ValueError(
                f'KNNMetric: raw_pixels={self.raw_pixels} would keep more than '
                f'{_PIXEL_LIMIT_BYTES / 2**30:g} GiB of pixels; set raw_pixels=32 to compare '
                'thumbnails of 32 x 32, or raw_pixels=False'
            )
        return pixels

    def evaluate(self, size: int) -> dict[str, float]:
        """Compute the metrics together with all ranks, and forget the samples."""
        try:
            metrics = self.compute_metrics(self.results)
        finally:
            self.results.clear()
        return {f'{self.prefix}/{name}' if self.prefix else name: v for name, v in metrics.items()}

    def compute_metrics(self, results: list[_Samples]) -> dict[str, float]:
        """Metrics from what each rank has kept; a collective call."""
        own = self._unique_samples(results)
        current = self._accuracy(own.features, own)
        if self._hub_entry('before_training', False):
            self._cache('knn_top1_untrained', current)
        pixels = self._cached('knn_top1_raw_pixels')
        if pixels is None and self.raw_pixels:
            assert own.pixels is not None
            pixels = self._accuracy(own.pixels, own)
            self._cache('knn_top1_raw_pixels', pixels)
        untrained = self._cached('knn_top1_untrained')
        shown = {'raw pixels': pixels, 'untrained': untrained, 'now': current}
        text = ' | '.join(f'{name} {v:.1f} %' for name, v in shown.items() if v is not None)
        print_log(f'{self.k}-NN top-1: {text}', logger='current')
        metrics = {
            'knn_top1': current,
            'knn_top1_untrained': untrained,
            'knn_top1_raw_pixels': pixels,
        }
        return {name: value for name, value in metrics.items() if value is not None}

    # -------------------------------------------------------------- what is remembered

    def _hub_entry(self, name: str, default: Any = None) -> Any:
        """An entry of the message hub; the default outside of a runner, where it is nobody's."""
        hub = MessageHub.get_current_instance()
        return default if hub.get_info('loop_stage') is None else hub.get_info(name, default)

    def _cache_key(self, name: str) -> str:
        stage = MessageHub.get_current_instance().get_info('loop_stage')
        settings = f'k={self.k},temperature={self.temperature},raw_pixels={self.raw_pixels}'
        return f'evaluation/{stage}/{self.prefix}/{name}({settings})'

    def _cached(self, name: str) -> float | None:
        return self._hub_entry(self._cache_key(name))

    def _cache(self, name: str, value: float) -> None:
        hub = MessageHub.get_current_instance()
        if hub.get_info('loop_stage') is not None:
            hub.update_info(self._cache_key(name), value)

    # -------------------------------------------------------------- across ranks

    def _unique_samples(self, results: list[_Samples]) -> _Samples:
        """This rank's samples without those that it, or a lower rank, has already."""
        parts = [_no_samples(results), *results]
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        joined: Any = (None if column[0] is None else torch.cat(column) for column in columns)
        own = _Samples(*joined)
        index, bank = _gather_rows(own.index), _gather_rows(own.bank.long())
        ordered, order = torch.cat(index).sort(stable=True)  # lower ranks first among equals
        repeated = torch.zeros_like(ordered, dtype=torch.bool)
        repeated[1:] = ordered[1:] == ordered[:-1]
        in_bank = torch.cat(bank)[order]
        clash = repeated[1:] & (in_bank[1:] != in_bank[:-1])
        if clash.any():
            raise ValueError(
                f'KNNMetric: index {int(ordered[1:][clash][0])} is in the bank and among the '
                'queries; the index must be unique over both (BankAndQueries sees to it)'
            )
        first = torch.empty_like(repeated)
        first[order] = ~repeated
        return own.select(first.split([len(i) for i in index])[dist.get_rank()])

    def _accuracy(self, features: Tensor, samples: _Samples) -> float:
        """Percent of all ranks' queries that all ranks' bank classifies rightly."""
        self._check_finite(features, samples.index)
        features, is_bank = unit_rows(features), samples.bank
        bank, bank_labels = features[is_bank], samples.labels[is_bank]
        tie_breaks = samples.index[is_bank]
        query, labels = features[~is_bank], samples.labels[~is_bank]
        totals = torch.tensor([len(bank), len(query)])
        dist.all_reduce(totals)
        bank_size, query_count = totals.tolist()
        check_k(self.k, bank_size)
        if not query_count:
            raise ValueError('KNNMetric: there are no queries (data_samples with bank=False)')
        limits = torch.tensor(
            [int(samples.labels.max()) + 1 if len(samples.labels) else 0, len(query)]
        )
        dist.all_reduce(limits, 'max')
        num_classes, longest = limits.tolist()
        step = max(1, self.chunk_size // dist.get_world_size())
        right = torch.zeros(1, dtype=torch.long)
        for start in range(0, longest, step):
            chunks = _gather_rows(query[start : start + step])
            candidates = nearest(
                torch.cat(chunks).to(self._device), bank, bank_labels, tie_breaks, self.k
            )
            sizes = [len(chunk) for chunk in chunks]
            keys, found = self._merged(candidates, sizes)
            predicted = vote(keys, found, self.temperature, num_classes).argmax(dim=1)
            right += (predicted == labels[start : start + step]).sum()
        dist.all_reduce(right)
        return 100.0 * int(right) / query_count

    def _merged(self, candidates: tuple[Tensor, Tensor], sizes: list[int]) -> tuple[Tensor, Tensor]:
        """The nearest of this rank's own queries, from all ranks' candidates for all queries."""
        missing = (0, self.k - candidates[0].shape[1])
        keys = dist.all_gather(F.pad(candidates[0].cpu(), missing, value=_LOWEST_KEY))
        labels = dist.all_gather(F.pad(candidates[1].cpu(), missing))
        rank = dist.get_rank()
        own = [
            torch.cat([part.split(sizes)[rank] for part in parts], dim=1)
            for parts in (keys, labels)
        ]
        return merge(own[0], own[1], self.k)

    @staticmethod
    def _check_finite(features: Tensor, index: Tensor) -> None:
        bad = ~features.isfinite().all(dim=1)
        first = int(index[bad].min()) if bad.any() else torch.iinfo(torch.long).max
        count, lowest = bad.sum().reshape(1), torch.tensor([first])
        dist.all_reduce(count)
        dist.all_reduce(lowest, 'min')
        if count:
            raise ValueError(
                f'KNNMetric: the features of {int(count)} samples are NaN or infinite, the first '
                f'at index {int(lowest)}; the model has diverged (lower the learning rate, clip '
                'gradients) or its precision is too narrow'
            )


def _no_samples(results: list[_Samples]) -> _Samples:
    """None at all, as wide as those of any rank."""
    widths = torch.tensor([-1, -1])
    for part in results[:1]:
        pixels = -1 if part.pixels is None else part.pixels.shape[1]
        widths = torch.tensor([part.features.shape[1], pixels])
    dist.all_reduce(widths, 'max')
    features, pixels = widths.tolist()
    if features < 0:
        raise ValueError('KNNMetric: there are no samples to evaluate')
    none = torch.empty(0)
    wide = torch.empty(0, pixels) if pixels >= 0 else None
    return _Samples(torch.empty(0, features), none.long(), none.long(), none.bool(), wide)


def _gather_rows(rows: Tensor) -> list[Tensor]:
    """The rows [n, ...] of every rank, in rank order; n may differ."""
    sizes = [int(size) for size in dist.all_gather(torch.tensor([len(rows)]))]
    padded = torch.cat([rows, rows.new_zeros(max(sizes) - len(rows), *rows.shape[1:])])
    return [part[:size] for part, size in zip(dist.all_gather(padded), sizes, strict=True)]
