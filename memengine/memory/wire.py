"""Bytes that a rank receives in collectives, counted and not sampled."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = ['ReceivedBytes']


def _size(tensors: Tensor | list[Tensor]) -> int:
    return sum(t.nbytes for t in ([tensors] if isinstance(tensors, Tensor) else tensors))


class ReceivedBytes:
    """Counts what this rank receives from others while it is entered.

    It is what the algorithms that need the fewest bytes move, whatever the backend does: a gather
    receives what the rank has not, an all-reduce twice (N - 1) / N of its tensor (once to add up,
    once to hand out), an exchange between all what the others send.

    Attributes:
        nbytes: Bytes so far, tensors of embeddings and their gradients among them.
        calls: Number of collectives so far, by name.
    """

    _NAMES = (
        'all_gather',
        'all_gather_into_tensor',
        'all_reduce',
        'all_to_all_single',
        'irecv',
        'recv',
        'reduce_scatter_tensor',
        'scatter',
    )

    def __init__(self) -> None:
        self.nbytes = 0.0
        self.calls: dict[str, int] = {}
        self._originals: dict[str, Any] = {}

    def __enter__(self) -> ReceivedBytes:
        for name in self._NAMES:
            self._originals[name] = getattr(dist, name)
            setattr(dist, name, self._counting(name, self._originals[name]))
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)

    def _counting(self, name: str, original: Any) -> Any:
        def counted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            self.nbytes += self._received(name, tensor, args, kwargs)
            return original(tensor, *args, **kwargs)

        return counted

    def _received(self, name: str, tensor: Any, args: Any, kwargs: Any) -> float:
        ranks = dist.get_world_size(kwargs.get('group'))
        if name in ('recv', 'irecv'):
            return _size(tensor)
        if name == 'scatter':
            source = args[1] if len(args) > 1 else kwargs.get('src', 0)
            return _size(tensor) if source != dist.get_rank() else 0.0
        if name == 'all_reduce':
            return 2 * _size(tensor) * (ranks - 1) / ranks
        if name == 'reduce_scatter_tensor':
            return _size(tensor) * (ranks - 1)
        if name == 'all_to_all_single' and len(args) > 1:  # from each rank its own number of rows
            rows, mine = args[1], args[1][dist.get_rank(kwargs.get('group'))]
            return _size(tensor) * (1 - mine / sum(rows)) if sum(rows) else 0.0
        return _size(tensor) * (ranks - 1) / ranks
