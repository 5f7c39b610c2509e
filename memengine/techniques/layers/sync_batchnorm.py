"""BatchNorm over all ranks' samples, on any backend.

``torch.nn.SyncBatchNorm`` runs on accelerators only. This one uses two differentiable
all-reduces, so that training on CPU ranks follows the run of one process.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from memengine._torch_private.modules import BatchNorm, own_buffers, own_modules, own_parameters
from memengine.technique import Handle, Settings, Technique, setting

__all__ = ['SyncBNSettings', 'SyncBatchNorm', 'SyncedBatchNorm', 'convert_sync_batchnorm']


_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_FORWARD_OF_TORCH = BatchNorm.forward


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
        # In evaluation ranks need not have as many batches: whoever has more would wait for ever.
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
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


class _ThenActivates:
    """What timm's BatchNormAct2d does after it has normalised."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        normalised = super().forward(input)  # type: ignore[misc]
        activated: Tensor = self.act(self.drop(normalised))
        return activated


@cache
def _then_activates(layer_class: type[nn.Module]) -> type[nn.Module]:
    return type(f'{layer_class.__name__}Act', (_ThenActivates, layer_class), {})


def _activates(layer: nn.Module) -> bool:
    """Whether it is timm's BatchNormAct2d, which many of its networks consist of."""
    return type(layer).__name__ == 'BatchNormAct2d' and type(layer).__module__.startswith('timm.')


def _normalises_as_torch(name: str, layer: nn.Module) -> bool:
    """Whether a layer is to be replaced: BatchNorm, not over ranks yet.

    Raises:
        ValueError: For one in training mode that does something else, too: it would stay each
            rank's own.
    """
    # By name, as other libraries (apex, detectron2) have some of their own.
    over_ranks = any('SyncBatchNorm' in kind.__name__ for kind in type(layer).__mro__)
    if not isinstance(layer, BatchNorm) or over_ranks:
        return False
    is_lazy = isinstance(layer, nn.modules.lazy.LazyModuleMixin)
    if type(layer) in _PLAIN or _activates(layer):
        return True
    if type(layer).forward is _FORWARD_OF_TORCH and not is_lazy:
        return True
    if layer.training:
        why = 'has no number of channels yet' if is_lazy else 'has a forward of its own'
        raise ValueError(
            f'sync_bn: {name} is a {type(layer).__name__}, which {why}, so that it cannot be '
            "replaced by one over all ranks; use torch's BatchNorm there, a norm without batch "
            'statistics, or leave sync_bn out, by which each rank normalises by its own samples'
        )
    return False


def convert_sync_batchnorm(model: nn.Module) -> int:
    """Turn every BatchNorm below ``model`` into one over all ranks, in place.

    Of a model on a GPU it is torch's own SyncBatchNorm, which runs only there, of one on a CPU
    :class:`SyncBatchNorm`. Parameters and buffers are kept, so names and state do not change.

    Returns:
        The number of places that are taken by others now.

    Raises:
        ValueError: For a BatchNorm in training mode with a forward of its own, but for timm's
            BatchNormAct2d.
    """
    return len(SyncedBatchNorm(model).replaced)


class SyncedBatchNorm(Handle):
    """A model whose BatchNorm layers are over all ranks.

    Raises:
        ImportError: For ``'mmcv'`` where it is not installed.
        ValueError: As :func:`convert_sync_batchnorm`.

    Attributes:
        replaced: For each place of a layer what it is in, its name there, and the plain one.
    """

    def __init__(self, model: nn.Module, kind: Literal['torch', 'mmcv'] = 'torch') -> None:
        self.replaced: list[tuple[nn.Module, str, Any]] = [
            (parent, name, child)
            for path, parent in model.named_modules()
            for name, child in own_modules(parent).items()  # one layer may have several names
            if child is not None and _normalises_as_torch(f'{path}.{name}'.lstrip('.'), child)
        ]
        on_gpu = any(parameter.is_cuda for parameter in model.parameters())
        layer_class: Any = nn.SyncBatchNorm if on_gpu else SyncBatchNorm
        if kind == 'mmcv':
            layer_class = importlib.import_module('mmcv.ops').SyncBatchNorm
        layers = {plain: _over_ranks(plain, layer_class) for _, _, plain in self.replaced}
        for parent, name, plain in self.replaced:
            setattr(parent, name, layers[plain])

    def undo(self) -> None:
        """Put the plain layers back, with the statistics as they are now."""
        for parent, name, plain in self.replaced:
            setattr(parent, name, _with_state_of(getattr(parent, name), plain))


def _over_ranks(plain: Any, layer_class: Any) -> nn.Module:
    """A layer that takes the place of a plain one."""
    kind = _then_activates(layer_class) if _activates(plain) else layer_class
    layer = kind(
        plain.num_features, plain.eps, plain.momentum, plain.affine, plain.track_running_stats
    )
    if _activates(plain):
        layer.drop, layer.act = plain.drop, plain.act
    return _with_state_of(plain, layer)


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
