"""The dataset of k-NN validation: the bank that is searched, then the queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset

from memengine.datasets.build import build
from memengine.datasets.concat import name_of
from memengine.datasets.sources.classes import NamedClasses
from memengine.registry import DATASETS, DatasetConfig


@DATASETS.register_module()
class BankAndQueries(Dataset):
    """Two datasets behind each other, told apart by ``data_samples['bank']``.

    ``data_samples['index']`` counts on from the bank to the queries, so that it is unique and a
    distributed sampler's padding can be recognised.

    Args:
        bank: Dataset (or its config) with ``metainfo['classes']``, whose labels are known to the
            classifier: the training set, with the plain pipeline.
        queries: Dataset (or its config) that is classified: the held-out set.

    Raises:
        ValueError: When the queries have a class that the bank lacks.

    Labels of both are numbered as the bank's classes are.
    """

    def __init__(self, bank: DatasetConfig, queries: DatasetConfig) -> None:
        self.bank = build(DATASETS, bank, 'bank')
        self.queries = build(DATASETS, queries, 'queries')
        self.metainfo: dict[str, Any] = dict(self.bank.metainfo)
        mine, other = self.metainfo['classes'], self.queries.metainfo['classes']
        if mine != other and isinstance(self.queries, NamedClasses):
            try:
                self.queries.follow_classes(mine, of='the bank')
            except ValueError as error:
                raise ValueError(f'queries: {error}') from error
        elif mine != other:
            raise ValueError(
                f'bank and queries must have the same classes in the same order, got {len(mine)} '
                f'({", ".join(mine[:3])}, ...) and {len(other)} ({", ".join(other[:3])}, ...)'
            )

    def follow_classes(self, classes: Sequence[str], of: str = 'training') -> None:
        """Number the labels of both parts as training does.

        Raises:
            ValueError: For a class that training lacks.
        """
        parts = (self.bank, self.queries)
        for part in parts if all(isinstance(part, NamedClasses) for part in parts) else ():
            part.follow_classes(classes, of)
        self.metainfo = dict(self.bank.metainfo)

    def __len__(self) -> int:
        return len(self.bank) + len(self.queries)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f'index {index} is outside the dataset of {len(self)} samples')
        in_bank = index < len(self.bank)
        item = self.bank[index] if in_bank else self.queries[index - len(self.bank)]
        first = 0 if in_bank else len(self.bank)
        samples = item['data_samples']
        # An item that replaces an unreadable one keeps its own index. It is not written to, as
        # data that are held in memory would be changed.
        more = dict(bank=in_bank, index=first + samples['index'])
        return {**item, 'data_samples': {**samples, **more}}

    def sample_name(self, index: int) -> str:
        """The sample at ``index`` in words."""
        behind = index - len(self.bank)
        return name_of(self.bank, index) if behind < 0 else name_of(self.queries, behind)

    @property
    def skipped(self) -> int:
        """How many different samples of both could not be read so far."""
        return sum(getattr(part, 'skipped', 0) for part in (self.bank, self.queries))
