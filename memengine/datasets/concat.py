"""Data sets behind each other, whose samples keep numbers of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmengine.dataset import ConcatDataset as MMEngineConcatDataset

from memengine.datasets.sources.classes import NamedClasses
from memengine.registry import DATASETS


def name_of(dataset: Any, index: int) -> str:
    """What a sample of a data set is called in messages."""
    if hasattr(dataset, 'sample_name'):
        return dataset.sample_name(index)
    return f'sample {index} of {type(dataset).__name__}'


@DATASETS.register_module()
class ConcatDataset(NamedClasses, MMEngineConcatDataset):
    """MMEngine's, with a ``data_samples['index']`` that counts on from one data set to the next.

    Metrics tell samples apart by it: with numbers that begin anew, k-NN would take the second data
    set for repetitions of the first, and retrieval a picture of the one for that of the other.
    Settings are MMEngine's: ``datasets``, ``lazy_init``, ``ignore_keys``.
    """

    _metainfo: dict[str, Any]

    def __getitem__(self, index: int) -> Any:
        item = super().__getitem__(index)
        samples = item.get('data_samples') if isinstance(item, Mapping) else None
        part, _ = self._get_ori_dataset_idx(index)
        if not part or not isinstance(samples, Mapping) or 'index' not in samples:
            return item
        own = samples['index'] + self.cumulative_sizes[part - 1]
        return {**item, 'data_samples': {**samples, 'index': own}}

    def sample_name(self, index: int) -> str:
        """What the sample is called in messages."""
        part, row = self._get_ori_dataset_idx(index)
        return name_of(self.datasets[part], row)

    @property
    def skipped(self) -> int:
        """How many different samples of all could not be read so far."""
        return sum(getattr(dataset, 'skipped', 0) for dataset in self.datasets)

    def follow_classes(self, classes: Sequence[str], of: str = 'training') -> None:
        """Number labels as other data do; see :class:`NamedClasses`."""
        for dataset in self.datasets:
            if not isinstance(dataset, NamedClasses):
                raise ValueError(
                    f'{type(dataset).__name__} has other classes than {of}, or in another order'
                )
            dataset.follow_classes(classes, of)
        self._metainfo = {**self._metainfo, 'classes': list(classes)}
