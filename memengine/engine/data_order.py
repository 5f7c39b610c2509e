"""Data order and augmentations as functions of (seed, epoch, index), never of history.

A run that is interrupted and resumed, at any iteration and with any number of workers or
ranks, then sees the same batches and the same augmentations as one that was not. Samplers
and data sets of any origin are wrapped; they need not know.
"""

from __future__ import annotations

import copy
import hashlib
import random
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from mmengine.dataset import DefaultSampler, InfiniteSampler
from mmengine.dist import get_rank, get_world_size
from mmengine.registry import DATA_SAMPLERS, DATASETS
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from memengine.engine.faults.workers import SamplesInHand


def derive_seed(*parts: int) -> int:
    """One 64-bit seed from several integers; close inputs give unrelated seeds."""
    digest = hashlib.blake2b(struct.pack(f'<{len(parts)}q', *parts), digest_size=8).digest()
    return int.from_bytes(digest, 'little')


def seed_generators(seed: int) -> None:
    """Seed the global generators of ``random``, NumPy and torch, on CPU and a device in use."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # For a device that is not in use, as in workers, torch.manual_seed formats a stack trace, which
    # can take longer than to make the sample.
    seed_torch = torch.manual_seed if _device_in_use() else torch.default_generator.manual_seed
    seed_torch(seed % 2**63)


def _device_in_use() -> bool:
    if not torch.accelerator.is_available():
        return False
    is_initialized = getattr(torch.get_device_module(), 'is_initialized', None)
    return is_initialized is None or bool(is_initialized())


class DrawnIndex(int):
    """A sample's index that remembers when it was drawn.

    Attributes:
        epoch: The pass over the data.
        repetition: A number for each time that the sample is drawn in this pass.
    """

    epoch: int
    repetition: int

    def __new__(cls, index: int, epoch: int, repetition: int = 0) -> DrawnIndex:  # noqa: D102
        draw = super().__new__(cls, index)
        draw.epoch, draw.repetition = epoch, repetition
        return draw

    def __getnewargs__(self) -> tuple[int, int, int]:  # type: ignore[override]
        return int(self), self.epoch, self.repetition


# They give each sample to one rank, once a pass.
_DRAWS_ONCE = (DefaultSampler, InfiniteSampler, DistributedSampler)


class ResumableSampler(Sampler[int]):
    """Any sampler, with a place to start from.

    Indices may be marked by the sampler with the number of the ``repetition``, an attribute. Of
    other samplers than MMEngine's and torch's for several ranks nobody knows whether they draw a
    sample twice in a pass, on a rank or on several: each time is then given a number of its own, by
    place and rank. They may draw a pass's order from the global generators when it begins, which
    are seeded for it, on each rank otherwise.

    Attributes:
        limit: Draws of a pass, at most; None for all that the sampler gives.

    Cost: where draws are numbered so, a count for each sample of a pass, and to start within one a
    fraction of a microsecond for each draw before.
    """

    def __init__(self, sampler: Sampler[int], dataset_size: int, seed: int = 0) -> None:
        self.sampler = sampler
        self.dataset_size = dataset_size
        self.seed = seed
        self.epoch = 0
        self.start = 0
        self.limit: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the pass; the next iteration starts at its beginning."""
        self.epoch = epoch
        self.start = 0
        if hasattr(self.sampler, 'set_epoch'):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        start, self.start = self.start, 0
        world_size, rank = get_world_size(), get_rank()
        counts = not isinstance(self.sampler, _DRAWS_ONCE)
        if counts:
            seed_generators(derive_seed(self.seed, self.epoch, -1 - rank))  # below 0: no sample's
        first = 0 if counts else start
        times: Counter[int] = Counter()  # of this epoch, as a sampler may have no end
        last = self.epoch
        per_draw, ahead, length = self._pace(world_size, rank)
        for position, index in enumerate(islice(iter(self.sampler), first, self.limit), first):
            epoch = self.epoch + (position * per_draw + ahead) // length
            repetition = getattr(index, 'repetition', None)
            if counts and repetition is None:
                if epoch != last:
                    times, last = Counter(), epoch
                repetition = times[int(index)] * world_size + rank
                times[int(index)] += 1
            if position >= start:
                yield DrawnIndex(int(index), epoch, repetition or 0)

    def _pace(self, world_size: int, rank: int) -> tuple[int, int, int]:
        """How far a draw comes, how far this rank is ahead of the first one, how long a pass is."""
        if isinstance(self.sampler, Sized) and not isinstance(self.sampler, InfiniteSampler):
            return 1, 0, max(len(self.sampler), 1)  # it may give more, or each rank all samples
        return world_size, rank, self.dataset_size

    def __len__(self) -> int:
        length = len(cast(Sized, self.sampler))
        return length if self.limit is None else min(length, self.limit)

    def __deepcopy__(self, memo: dict[int, Any]) -> ResumableSampler:
        return self  # MMEngine copies the data loader's config, which holds the sampler by now


@runtime_checkable
class NamesSamples(Protocol):
    """A data set that can say which sample is which."""

    def sample_name(self, index: int) -> str:
        """What the sample is called in messages."""


@runtime_checkable
class TakesSeeds(Protocol):
    """A data set that makes the samples of a batch together, each from a seed of its own."""

    def seeded_items(self, indices: Iterable[int], seeds: Sequence[int]) -> list[Any]:
        """The items at ``indices``, which are read one after the other."""


@runtime_checkable
class ReadsStreams(Protocol):
    """A data set that is read forward only, in parts: by each worker of each rank its own."""

    def read_by(self, seed: int, ranks: int, workers: int, batch_size: int) -> None:
        """Say who will read: batch after batch goes to the next worker of its rank."""

    def read(self, index: int, epoch: int) -> Any:
        """The item at a place of an epoch."""


def refuse_unsized(dataset: Any, setting: str) -> None:
    """Raise ValueError for data without a length, by which epochs, samplers and metrics go."""
    if not isinstance(dataset, Sized):
        raise ValueError(
            f'{setting}: {type(dataset).__name__} has no length (__len__), by which epochs, '
            'samplers and metrics go. To train on a stream use StreamedImageDataset, which reads '
            'so many samples in an epoch; evaluate on data that can be counted'
        )


class SeededDataset(Dataset[Any]):
    """Any data set, with the random generators seeded for each sample.

    A data set that makes a batch together gets the samples' seeds, if it :class:`TakesSeeds`. One
    that has only torch's ``__getitems__`` is asked sample by sample: nothing says that it draws for
    a sample what it would draw for this one alone.

    Args:
        dataset: The data set to wrap; other attributes are reached through.
        seed: The run's seed.
        size: Use the first so many samples only; by default all.
        workers: How many processes load samples.

    Attributes:
        in_hand: Which sample each of these is loading.
    """

    def __init__(self, dataset: Any, seed: int, size: int | None = None, workers: int = 0) -> None:
        refuse_unsized(dataset, 'dataset')
        self.dataset = dataset
        self._stream = dataset if isinstance(dataset, ReadsStreams) else None
        self.seed = seed
        self.in_hand = SamplesInHand(workers)
        self.size = len(dataset) if size is None else min(size, len(dataset))

    def __getitem__(self, index: int) -> Any:
        seed_generators(self._seed_of(index))
        self.in_hand.note(int(index))
        if self._stream is None:
            item = self.dataset[int(index)]
        else:
            item = self._stream.read(int(index), getattr(index, 'epoch', 0))
        self.in_hand.note(-1)
        return item

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        if not isinstance(self.dataset, TakesSeeds):
            return [self[index] for index in indices]
        seeds = [self._seed_of(index) for index in indices]
        items = self.dataset.seeded_items(self._noted(indices), seeds)
        self.in_hand.note(-1)
        return items

    def _seed_of(self, index: int) -> int:
        seed_parts = [getattr(index, 'epoch', 0), int(index)]
        if repetition := getattr(index, 'repetition', 0):
            seed_parts.append(repetition)
        return derive_seed(self.seed, *seed_parts)

    def _noted(self, indices: Sequence[int]) -> Iterator[int]:
        for index in indices:
            seed_generators(self._seed_of(index))  # the source may draw, too
            self.in_hand.note(int(index))
            yield int(index)

    def __len__(self) -> int:
        return self.size

    def sample_name(self, index: int) -> str:
        """What the sample is called in messages."""
        if isinstance(self.dataset, NamesSamples):
            return self.dataset.sample_name(index)
        return f'sample {index} of {type(self.dataset).__name__}'

    def __getattr__(self, name: str) -> Any:
        if name == 'dataset':  # not there yet, while being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> SeededDataset:
        return self  # MMEngine copies the data loader's config, which holds the data set by now


def reproducible(dataloader: dict[str, Any], seed: int, diff_rank_seed: bool) -> dict[str, Any]:
    """A data loader's config with its data set and sampler built, wrapped and in place."""
    config = copy.deepcopy(dataloader)
    dataset = config['dataset']
    if isinstance(dataset, dict):
        dataset = DATASETS.build(dataset)
        if hasattr(dataset, 'full_init'):
            dataset.full_init()
    batches, size = config.pop('num_batch_per_epoch', None), None
    if batches is not None:
        size = batches * config['batch_size'] * get_world_size()
    seeded = SeededDataset(dataset, seed, size, config.get('num_workers', 0))
    size = len(seeded)
    if not isinstance(config.get('batch_size', 1), int) or config.get('batch_size', 1) < 1:
        raise ValueError(f'batch_size must be a positive integer, got {config["batch_size"]!r}')
    per_step = config.get('batch_size', 1) * get_world_size()
    if config.get('drop_last') and size < per_step:
        raise ValueError(
            f'batch_size={config["batch_size"]} on {get_world_size()} rank(s) needs {per_step} '
            f'samples, but the data set has {size}, and drop_last=True would leave no batch; '
            'lower batch_size, or set drop_last=False'
        )
    sampler = config['sampler']
    if isinstance(sampler, dict):
        sampler_seed = None if diff_rank_seed else seed
        sampler = DATA_SAMPLERS.build(sampler, default_args=dict(dataset=seeded, seed=sampler_seed))
    if isinstance(dataset, ReadsStreams):
        if not isinstance(sampler, (DefaultSampler, InfiniteSampler)) or sampler.shuffle:
            raise ValueError(
                'sampler: a stream is read in its own order, and shuffled as it is read; set '
                "sampler=dict(type='DefaultSampler', shuffle=False)"
            )
        seed = seed - get_rank() if diff_rank_seed else seed  # MMEngine adds the rank
        workers = max(config.get('num_workers', 0), 1)
        dataset.read_by(seed, get_world_size(), workers, config['batch_size'])
    return {**config, 'dataset': seeded, 'sampler': ResumableSampler(sampler, max(size, 1), seed)}


def train_loader(runner: Any, dataloader: DataLoader | dict[str, Any]) -> DataLoader:
    """The loader to train with: no rank gets a sample that another one, or itself, has had.

    Where the ranks do not divide the data, MMEngine's and torch's samplers give some samples
    twice in a pass, so that all ranks have equally many. Here the last few are left out instead:
    fewer than there are ranks, and others in each pass if it is shuffled.

    Raises:
        ValueError: When there are fewer samples than ranks.
    """
    if isinstance(dataloader, dict):
        differs = runner._randomness_cfg.get('diff_rank_seed', False)
        dataloader = runner.build_dataloader(dataloader, runner.seed, differs)
    loader = cast(DataLoader, dataloader)
    counts_itself = type(loader).__len__ is not DataLoader.__len__
    refuse_unsized(loader if counts_itself else loader.dataset, 'train_dataloader')
    sampler, ranks = loader.sampler, get_world_size()
    splits_samples = isinstance(sampler, ResumableSampler) and isinstance(
        sampler.sampler, (DefaultSampler, DistributedSampler)
    )
    if splits_samples:
        sampler = cast(ResumableSampler, sampler)
        sampler.limit = sampler.dataset_size // ranks
        if not sampler.limit:
            raise ValueError(
                f'train_dataloader: {ranks} ranks share {sampler.dataset_size} sample(s), and each '
                'needs one; start fewer'
            )
    return loader


def batches_from(dataloader: DataLoader, start: int) -> Iterator[Any]:
    """The batches of this pass from number ``start`` on, without loading those before it.

    A loader with a batch sampler of its own, or a foreign sampler, loads and drops them.
    """
    sampler = dataloader.sampler
    plain = type(dataloader.batch_sampler) is torch.utils.data.BatchSampler
    if start and plain and isinstance(sampler, ResumableSampler):
        sampler.start = start * cast(int, dataloader.batch_size)
        return iter(dataloader)
    return islice(iter(dataloader), start, None)
