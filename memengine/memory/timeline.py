"""The memory of a training step from beginning to end, and what its peak is made of."""

from __future__ import annotations

import linecache
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from memengine.memory.cpu_workspaces import library_bytes
from memengine.memory.live_memory import Allocation, Origin
from memengine.memory.prediction import (
    ALLOCATOR,
    Prediction,
    allocations_at,
    carried_out,
    prediction_of,
    taken_bytes,
)
from memengine.memory.training_step import TrainingStep


@dataclass(frozen=True)
class LiveTensor:
    """Memory that is there at the peak.

    Attributes:
        nbytes: Its size.
        category: What it is for, as in :class:`Prediction`.
        shape: Of the tensor that it was made for; empty of workspaces.
        op: The operator that made it; empty of what was there before the step.
        module: In whose forward, or in the backward of it; empty outside.
        line: The line of the model that did so, ``'timm/layers/mlp.py:47'``.
        code: What stands there.
        in_backward: Whether it was made in the backward of that line.
    """

    nbytes: int
    category: str
    shape: tuple[int, ...]
    op: str
    module: str
    line: str
    code: str
    in_backward: bool

    @classmethod
    def of(cls, allocation: Allocation, nbytes: int) -> LiveTensor:
        """What is said of an allocation of memory."""
        origin = allocation.origin
        code = linecache.getline(origin.file, origin.line).strip()
        return cls(
            nbytes,
            allocation.category,
            allocation.shape,
            allocation.op,
            origin.module,
            _file_and_line(origin),
            code,
            origin.in_backward,
        )


@dataclass(frozen=True)
class Timeline:
    """A step as its operators make and free memory, one after another.

    Attributes:
        predicted: The peak.
        live: Bytes by category: before the step, and after each time that something was made or
            freed. Together they are what it takes, ``predicted.peak_bytes`` at the peak.
        peak: The index of the peak.
        last: What was made last before it.
        tensors: What is there at the peak, the largest first.
    """

    predicted: Prediction
    live: dict[str, list[int]] = field(repr=False)
    peak: int
    last: LiveTensor
    tensors: list[LiveTensor] = field(repr=False)


def timeline(build: Callable[[], TrainingStep]) -> Timeline:
    """What a training step takes over its course, and what its peak is made of.

    Args:
        build: As of :func:`memengine.memory.predict`, which says what is predicted, and how.

    Raises:
        UnpredictableError: As :func:`memengine.memory.predict`.

    Cost: that of a prediction, and a number for each category and event.
    """
    memory = carried_out(build)
    taken = taken_bytes(memory)
    live: dict[str, list[int]] = {
        name: [] for name in dict.fromkeys(allocation.category for _, allocation in memory.events)
    }
    live[ALLOCATOR] = []
    now: Counter[str] = Counter()
    for (nbytes, allocation), whole in zip(memory.events, taken, strict=True):
        now[allocation.category] += nbytes
        now[ALLOCATOR] = whole + library_bytes(whole) - (now.total() - now[ALLOCATOR])
        for name, values in live.items():
            values.append(now[name])
    peak, start = max(range(len(taken)), key=taken.__getitem__), max(memory.begin - 1, 0)
    there = allocations_at(memory, peak)
    return Timeline(
        prediction_of(memory),
        {name: values[start:] for name, values in live.items()},
        peak - start,
        LiveTensor.of(memory.events[peak][1], memory.events[peak][0]),
        sorted(
            (LiveTensor.of(allocation, nbytes) for allocation, nbytes in there.items()),
            key=lambda one: one.nbytes,
            reverse=True,
        ),
    )


def _file_and_line(origin: Origin) -> str:
    """A line as ``'package/file.py:12'``: without the folder in which packages are looked for."""
    folders = [os.path.join(folder, '') for folder in (os.getcwd(), *sys.path) if folder]
    inside = [folder for folder in folders if origin.file.startswith(folder)]
    file = origin.file.removeprefix(max(inside, key=len, default=''))
    return f'{file}:{origin.line}' if file else ''
