"""What torch keeps private of its allocator of a GPU: the record of what was allocated where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def allocations_recorded(path: Path) -> Iterator[None]:
    """Write, at the end, what was allocated and freed within, for https://pytorch.org/memory_viz.

    With Python's frames, the model's lines among them; torch's own page reads the file.
    """
    torch.cuda.memory._record_memory_history(stacks='python')
    try:
        yield
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
