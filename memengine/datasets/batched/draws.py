"""Random numbers of a whole batch, of which each sample's follow from its own seed alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def _shifted(values: Tensor, bits: int) -> Tensor:
    """To the right, zeros coming in; torch's own shift repeats the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


class Draws:
    """Random numbers for B samples: number n of a sample is a function of its seed and n.

    There is no state to seed or to keep, so that a sample draws the same numbers in any batch, at
    any place in it, in any worker, and on any device. The function is SplitMix64, carried out for
    all samples at once.

    Args:
        seeds: Long[B].

    Source: G. Steele et al., Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
    """

    def __init__(self, seeds: Tensor) -> None:
        self.seeds = seeds
        self._drawn = 0

    @classmethod
    def from_seeds(cls, seeds: Sequence[int]) -> Draws:
        """From whole numbers of 64 bits, with a sign or without."""
        return cls(torch.tensor([(seed + 2**63) % 2**64 - 2**63 for seed in seeds]))

    def __len__(self) -> int:
        return len(self.seeds)

    def _bits(self, count: int) -> Tensor:
        """The next numbers of 64 random bits, Long[B, count]."""
        places = torch.arange(self._drawn + 1, self._drawn + count + 1, device=self.seeds.device)
        self._drawn += count
        values = self.seeds[:, None] + places * -0x61C8864680B583EB
        values = (values ^ _shifted(values, 30)) * -0x40A7B892E31B1A47
        values = (values ^ _shifted(values, 27)) * -0x6B2FB644ECCEEE15
        return values ^ _shifted(values, 31)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Numbers between ``low`` and ``high``, both excluded: [B, *shape]."""
        bits = _shifted(self._bits(math.prod(shape)), 41)  # 23, as many as float32 has
        values = (bits.float() + 0.5) * (2.0**-23 * (high - low)) + low
        return values.view(len(self), *shape)

    def normal(self, *shape: int) -> Tensor:
        """Numbers of mean 0 and variance 1: [B, *shape]."""
        count = math.prod(shape)
        first, second = self.uniform(2, (count + 1) // 2).unbind(1)
        radius, angle = (-2 * first.log()).sqrt(), 2 * math.pi * second
        both = torch.cat([radius * angle.cos(), radius * angle.sin()], 1)
        return both[:, :count].view(len(self), *shape)

    def split(self, num: int = 1) -> Draws:
        """New draws that do not depend on how many are taken here: num * B, sample after sample.

        Of ``num`` the first of all samples come first, then the second of all.
        """
        return Draws(self._bits(num).t().flatten())

    def of(self, rows: Tensor) -> Draws:
        """New draws of some samples, Long[n]; take :meth:`split` first."""
        return Draws(self.seeds[rows])
