"""What one reader of a stream reads: its part, in an order that follows from the seed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, count
from typing import NamedTuple, Protocol


class StreamedSample(NamedTuple):
    """A sample as a stream holds it: ``image`` is a file's content, or its path."""

    name: str
    image: bytes | str
    label: int
    captions: list[str]


class Stream(Protocol):
    """What :class:`memengine.datasets.StreamedImageDataset` reads."""

    classes: list[str]

    def samples(self, order: random.Random, reader: int, readers: int) -> Iterator[StreamedSample]:
        """A pass over the part of one reader; ``order`` draws the same for all of them."""


def share_of(reader: int, readers: int, parts: int) -> tuple[range, int, int]:
    """Which of the parts (shards, files) of a stream a reader reads.

    Where there are fewer parts than readers, several read the same one, and each takes other
    samples of it.

    Returns:
        The parts, and from which sample on, and every how many samples, it takes of each.
    """
    if parts >= readers:
        return range(reader, parts, readers), 0, 1
    part = reader % parts
    return range(part, part + 1), reader // parts, len(range(part, readers, parts))


class Reader:
    """Samples of one reader by their places in an epoch, of which it goes forward only.

    Pass follows pass, each in an order of its own, so that a reader has samples as long as it is
    asked. What it gives at a place follows from the arguments alone.

    Args:
        stream: What is read.
        seed: Of the run.
        epoch: Which epoch this is.
        reader: Which of the readers.
        readers: How many share the stream.
        shuffle_buffer: How many samples are held to draw the next one from; 0 for none.
    """

    def __init__(
        self, stream: Stream, seed: int, epoch: int, reader: int, readers: int, shuffle_buffer: int
    ) -> None:
        place = f'{seed} {epoch}'
        draws = random.Random(f'{place} {reader} buffer')
        passes = _passes(stream, place, reader, readers)
        self._samples = chain.from_iterable(
            _shuffled(samples, shuffle_buffer, draws) if shuffle_buffer else samples
            for samples in passes
        )
        self._held: deque[StreamedSample] = deque()
        self.first = 0

    def at(self, place: int, ahead: int = 0) -> StreamedSample:
        """The sample at ``place``, or so many after it; those before ``place`` are let go."""
        while self.first < place:
            if self._held:
                self._held.popleft()
            else:
                next(self._samples)
            self.first += 1
        while len(self._held) <= ahead:
            self._held.append(next(self._samples))
        return self._held[ahead]


def _passes(
    stream: Stream, place: str, reader: int, readers: int
) -> Iterator[Iterator[StreamedSample]]:
    for number in count():
        samples = stream.samples(random.Random(f'{place} {number}'), reader, readers)
        first = next(samples, None)
        if first is None:
            raise ValueError(
                f'the stream has no sample for reader {reader} of {readers} (ranks × workers): '
                'lower num_workers, or give it more samples'
            )
        yield chain([first], samples)


def _shuffled(
    samples: Iterable[StreamedSample], size: int, draws: random.Random
) -> Iterator[StreamedSample]:
    """A pass, each sample drawn from the next ``size``; none is left to the pass that follows."""
    held: list[StreamedSample] = []
    for sample in samples:
        if len(held) < size:
            held.append(sample)
            continue
        drawn = draws.randrange(size)
        yield held[drawn]
        held[drawn] = sample
    draws.shuffle(held)
    yield from held
