"""How many slices of a gradient cache keep their graph from the first pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from mmengine.logging import MMLogger
from torch import nn

from memengine.engine.distributed.processes import cpu_group
from memengine.memory import SavedBytes, room_bytes
from memengine.techniques.modules.forward_state import computing_device

_MIB = 2**20


class KeptGraphs:
    """A number that is set, or that is measured in the first iterations.

    Args:
        setting: Slices, or ``'auto'``: none until the optimiser has its state; from then on as
            many as there is memory for, by the bytes that a step without any has saved.

    Attributes:
        number: Slices whose graph is kept now.
        decided: Whether the number is final: set, or measured.
    """

    def __init__(self, setting: int | str) -> None:
        is_number = isinstance(setting, int) and not isinstance(setting, bool) and setting >= 0
        if setting != 'auto' and not is_number:
            raise ValueError(f"keep_graph must be a number of slices or 'auto', got {setting!r}")
        self.number = setting if isinstance(setting, int) else 0
        self._auto = setting == 'auto'
        self._slice_bytes: int | None = None  # once measured
        self.decided = not self._auto

    @contextmanager
    def measured(self, model: nn.Module, updated: bool) -> Iterator[None]:
        """Around each step, before which the number is decided when the time has come."""
        if not self.decided and self._slice_bytes is not None and updated:
            self.number = _graphs_that_fit(self._slice_bytes, model)
            self.decided = True
            MMLogger.get_current_instance().info(
                f"keep_graph='auto': memory has room for the graphs of {self.number} slices of "
                f'{self._slice_bytes / _MIB:.1f} MiB'
            )
        if self.decided:
            yield
            return
        with SavedBytes(model) as saved:
            yield
        self._slice_bytes = saved.peak_bytes

    def halve(self, slices: int) -> bool:
        """Keep half as many of the last step's ``slices``; False when that would free nothing.

        A single kept graph takes no more than a slice that is repeated, but what is left over when
        the number was measured.
        """
        kept = min(self.number, slices)
        if kept <= (0 if self._auto else 1):
            return False
        MMLogger.get_current_instance().warning(
            f'Out of memory: keep_graph goes from {kept} to {kept // 2} slices. The step is '
            'repeated, and the run goes on so.'
        )
        self.number = kept // 2
        return True


def _graphs_that_fit(slice_bytes: int, model: nn.Module) -> int:
    """Graphs of ``slice_bytes`` that fit on every rank, besides the gradients to come."""
    trained = [p for p in model.parameters() if p.requires_grad]
    device = computing_device(trained[0])
    to_come = [p for p in trained if p.grad is None and p.device == device]
    gradients = sum(p.numel() * p.element_size() for p in to_come)
    room = room_bytes(device) - gradients
    number = torch.tensor(max(int(room // max(slice_bytes, 1)), 0), device='cpu')
    group = cpu_group('running out of memory')
    if group is not None:
        dist.all_reduce(number, dist.ReduceOp.MIN, group)
    return int(number)
