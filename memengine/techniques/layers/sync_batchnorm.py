"""BatchNorm over all ranks' samples, on any backend.

``torch.nn.SyncBatchNorm`` runs on accelerators only. This one uses two differentiable
all-reduces, so that training on CPU ranks follows the run of one process.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from memengine._torch_private.modules import BatchNorm, own_buffers

__all__ = ['SyncBatchNorm', 'convert_sync_batchnorm']


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
        local = x.new_tensor([x.numel() / x.shape[1]])
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


def convert_sync_batchnorm(model: nn.Module) -> int:
    """Turn every BatchNorm below ``model`` into one over all ranks, in place.

    On a GPU it is torch's own SyncBatchNorm, elsewhere :class:`SyncBatchNorm`. Parameters and
    buffers are kept, so names and state do not change.

    Returns:
        How many layers were converted.
    """
    converted = 0
    for name, child in model.named_children():
        if isinstance(child, BatchNorm) and type(child) in _PLAIN:
            kind = nn.SyncBatchNorm if torch.cuda.is_available() else SyncBatchNorm
            layer = kind(
                child.num_features,
                child.eps,
                child.momentum,
                child.affine,
                child.track_running_stats,
            )
            layer.weight, layer.bias = child.weight, child.bias
            own_buffers(layer).update(own_buffers(child))
            layer.train(child.training)
            setattr(model, name, layer)
            converted += 1
        else:
            converted += convert_sync_batchnorm(child)
    return converted
