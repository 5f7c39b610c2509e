"""BatchNorm over all ranks' samples, on any backend.

``torch.nn.SyncBatchNorm`` runs on accelerators only. This one uses two differentiable
all-reduces, so that training on CPU ranks follows the run of one process.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from memengine._torch_private.modules import BatchNorm, own_buffers, own_parameters
from memengine.technique import Handle, Settings, Technique, setting

__all__ = ['SyncBNSettings', 'SyncBatchNorm', 'SyncedBatchNorm']


_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class SyncBatchNorm(BatchNorm):
    """BatchNorm whose batch statistics are those of all ranks together.

    Takes the arguments of :class:`torch.nn.BatchNorm1d`; input [N, C] or [N, C, ...] with
    any N per rank. In evaluation mode, or in one process, it is plain BatchNorm.

    Cost: two all-reduces of C + 1 and C numbers in forward, and two in backward.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f'SyncBatchNorm expects [N, C, ...], got {tuple(input.shape)}')

    def forward(self, input: Tensor) -> Tensor:
        """[N, C, ...] to the same shape."""
        self._check_input_dim(input)
        uses_batch = self.training or self.running_mean is None
        if not uses_batch or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(input)
        axes = [axis for axis in range(input.dim()) if axis != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        local = x.new_full((1,), x.numel() / x.shape[1])
        total = all_reduce(torch.cat([x.sum(axes), local]))  # [C + 1]
        count = total[-1].detach()
        mean = total[:-1] / count  # [C]
        centred = x - mean.view(shape)
        var = all_reduce(centred.square().sum(axes)) / count  # [C], biased
        self._update_running(mean.detach(), var.detach() * count / (count - 1).clamp_min(1))
        out = centred * torch.rsqrt(var + self.eps).view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(input.dtype)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, var: Tensor) -> None:
        if not (self.training and self.track_running_stats):
            return
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(var.to(self.running_var.dtype), momentum)


class SyncedBatchNorm(Handle):
    """A model whose BatchNorm layers are over all ranks, replaced in place.

    On a GPU they are torch's own SyncBatchNorm, which runs only there, on a CPU
    :class:`SyncBatchNorm`. Parameters and buffers are kept, so names and state do not change.

    Raises:
        ImportError: For ``'mmcv'`` where it is not installed.

    Attributes:
        replaced: For each layer what it is in, its name there, and the plain one.
    """

    def __init__(self, model: nn.Module, kind: Literal['torch', 'mmcv'] = 'torch') -> None:
        self.replaced: list[tuple[nn.Module, str, BatchNorm]] = [
            (parent, name, child)
            for parent in model.modules()
            for name, child in parent.named_children()
            if isinstance(child, BatchNorm) and type(child) in _PLAIN
        ]
        on_gpu = any(parameter.is_cuda for parameter in model.parameters())
        layer_class: Any = nn.SyncBatchNorm if on_gpu else SyncBatchNorm
        if kind == 'mmcv':
            layer_class = importlib.import_module('mmcv.ops').SyncBatchNorm
        for parent, name, plain in self.replaced:
            layer = layer_class(
                plain.num_features,
                plain.eps,
                plain.momentum,
                plain.affine,
                plain.track_running_stats,
            )
            setattr(parent, name, _with_state_of(plain, layer))

    def undo(self) -> None:
        """Put the plain layers back, with the statistics as they are now."""
        for parent, name, plain in self.replaced:
            setattr(parent, name, _with_state_of(getattr(parent, name), plain))


def _with_state_of(layer: nn.Module, other: nn.Module) -> nn.Module:
    own_parameters(other).update(own_parameters(layer))
    own_buffers(other).update(own_buffers(layer))
    return other.train(layer.training)


@dataclass(frozen=True)
class SyncBNSettings(Settings):
    """Settings of ``sync_bn``."""

    kind: Literal['torch', 'mmcv'] = setting(
        help="'torch': on any backend; 'mmcv': that package's, which has to be installed"
    )


def _apply(model: nn.Module, settings: SyncBNSettings) -> Handle:
    return SyncedBatchNorm(model if dist.is_initialized() else nn.Module(), settings.kind)


TECHNIQUE = Technique(
    key='sync_bn',
    title='BatchNorm over all ranks',
    settings=SyncBNSettings,
    apply=_apply,
    switch='sync_bn=torch',
    shorthand='kind',
    stage='before_wrap',
    needs_ranks=True,
    use_when='a batch is spread over ranks and BatchNorm is to see all of it',
    saves='nothing: it makes spreading exact',
    price='two small all-reduces per layer and pass',
    page='disco.md',
)
