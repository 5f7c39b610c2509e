"""Orders in which the samples of a dataset are drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from mmengine.dist import get_dist_info, sync_random_seed
from torch.utils.data import Sampler

from memengine.registry import DATA_SAMPLERS


class _RepeatedIndex(int):
    """A sample's index that remembers how often it came before in this pass.

    Augmentations are seeded by it, beside the epoch and the index.
    """

    repetition: int


@DATA_SAMPLERS.register_module()
class RepeatedAugmentation(Sampler[int]):
    """Each sample several times in a step, with other augmentations: DeiT's order.

    A pass is as long as one that gives each sample once: with N samples and R repeats it gives the
    first N / R of a shuffled order, each R times, one after the other. Ranks take turns, so that a
    step of all ranks holds a sample's repeats together, wherever batches are of a multiple of R.
    Where the ranks do not divide N, the last few draws are left out, fewer than there are ranks.

    Args:
        dataset: The dataset, of N samples. The Runner gives it.
        num_repeats: R, how often each sample comes; 1 is a shuffled order without repeats.
        shuffle: Whether samples are shuffled, anew in each pass; if not, all passes have the same.
        seed: Seed of the order; drawn, and equal on all ranks, if None. The Runner gives the run's.

    Raises:
        ValueError: When `num_repeats` is no whole number of at least 1, or ranks outnumber samples.

    The order follows from seed and epoch only, and the augmentations from these, the sample's
    index and the number of the repetition, so a run may be resumed within a pass, also on another
    number of ranks. DeiT's own sampler also cuts N down to a multiple of 256.

    Source: M. Berman et al., MultiGrain: a unified image embedding for classes and instances, 2019;
    H. Touvron et al., Training data-efficient image transformers, ICML 2021.
    """

    def __init__(
        self, dataset: Sized, num_repeats: int = 3, shuffle: bool = True, seed: int | None = None
    ) -> None:
        if not isinstance(num_repeats, int) or isinstance(num_repeats, bool) or num_repeats < 1:
            raise ValueError(
                'RepeatedAugmentation: num_repeats must be a whole number of at least 1, got '
                f'{num_repeats!r}'
            )
        self.rank, self.world_size = get_dist_info()
        self.size = len(dataset)
        if self.size < self.world_size:
            raise ValueError(
                f'RepeatedAugmentation: {self.world_size} ranks share {self.size} sample(s), and '
                'each needs one; start fewer'
            )
        self.num_repeats = num_repeats
        self.shuffle = shuffle
        self.seed = sync_random_seed() if seed is None else seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the pass."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.size, generator=generator).tolist()
        else:
            order = list(range(self.size))
        for draw in range(self.rank, len(self) * self.world_size, self.world_size):
            position, repetition = divmod(draw, self.num_repeats)
            index = _RepeatedIndex(order[position])
            index.repetition = repetition
            yield index

    def __len__(self) -> int:
        return self.size // self.world_size
