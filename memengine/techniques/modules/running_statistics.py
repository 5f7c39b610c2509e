"""Forward passes that are run again without counting twice in BatchNorm's statistics."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn

from memengine._torch_private.autograd import version_of
from memengine._torch_private.modules import (
    BatchNorm,
    BatchOrInstanceNorm,
    InstanceNorm,
    own_buffers,
)


def layers_with_batch_statistics(module: nn.Module) -> list[str]:
    """Names of the BatchNorm layers whose output depends on the other samples of the batch."""
    return [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, BatchNorm) and (layer.training or layer.running_mean is None)
    ]


class StatisticsOfRank0:
    """Give all ranks the statistics that norm layers of rank 0 have gathered, as checkpoints do.

    Ranks gather each their own, and would evaluate models that differ in them. All ranks make one.
    """

    def __init__(self, module: nn.Module) -> None:
        self._own: list[tuple[Tensor, Tensor]] = []
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        for layer in module.modules():
            if isinstance(layer, BatchOrInstanceNorm):
                for buffer in layer.buffers(recurse=False):
                    self._own.append((buffer, buffer.clone()))
                    dist.broadcast(buffer, 0)

    def give_back(self) -> None:
        """Go on with a rank's own: a loss may read them, which must not hang on evaluations."""
        for buffer, own in self._own:
            buffer.copy_(own)
        self._own = []


@contextmanager
def copied_statistics(norms: Collection[BatchOrInstanceNorm]) -> Iterator[None]:
    """Run a forward in which norm layers count into copies of their statistics."""
    buffers = [(own_buffers(layer), dict(own_buffers(layer))) for layer in norms]
    for layer in norms:
        if layer.training and layer.track_running_stats:
            present = {key: b for key, b in own_buffers(layer).items() if b is not None}
            own_buffers(layer).update({key: b.clone() for key, b in present.items()})
    try:
        yield
    finally:
        for table, own in buffers:
            table.update(own)


@contextmanager
def frozen_statistics(module: nn.Module) -> Iterator[None]:
    """Run forward passes of slices whose statistics are counted already.

    Normalisation layers in training mode use the batch's statistics as always and leave
    ``running_mean``, ``running_var`` and ``num_batches_tracked`` alone; those with a forward of
    their own, which may give them to ``F.batch_norm`` all the same, count into copies. Other
    buffers that a forward replaces by new ones are put back.

    Raises:
        RuntimeError: When another buffer is written to, as the pass that did so before cannot be
            repeated.
    """
    norms = (layer for layer in module.modules() if isinstance(layer, BatchNorm))
    own = [x for x in norms if not type(x).forward.__module__.startswith('torch.nn.')]
    with copied_statistics(own), _untracked_statistics(module):
        yield


@contextmanager
def _untracked_statistics(module: nn.Module) -> Iterator[None]:
    training = [layer for layer in module.modules() if layer.training]
    layers = [x for x in training if isinstance(x, BatchNorm) and x.track_running_stats]
    before = [
        (own_buffers(layer), name, buffer, version_of(buffer), f'{path}.{name}'.lstrip('.'))
        for path, layer in module.named_modules()
        for name, buffer in layer.named_buffers(recurse=False)
    ]
    hidden = [  # InstanceNorm updates whatever statistics it has
        (layer, name, own_buffers(layer)[name])
        for layer in training
        if isinstance(layer, InstanceNorm)
        for name in ('running_mean', 'running_var')
    ]
    for layer in layers:
        layer.track_running_stats = False
    for instance_norm, name, _ in hidden:
        own_buffers(instance_norm)[name] = None
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True
        for instance_norm, name, buffer in hidden:
            own_buffers(instance_norm)[name] = buffer
    for table, name, buffer, version, path in before:
        table[name] = buffer
        if version_of(buffer) != version:
            raise unrepeatable(module, path)


def unrepeatable(module: nn.Module, name: str) -> RuntimeError:
    """The error of a forward pass that writes into what ``module`` keeps under this name."""
    return RuntimeError(
        f'{name} of {type(module).__name__} changes in every forward pass, so the pass cannot be '
        'repeated for its graph; keep the graph of all slices (keep_graph) or put the layer into '
        'eval mode'
    )
