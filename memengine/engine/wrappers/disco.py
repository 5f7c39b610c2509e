"""DistributedDataParallel whose contrastive losses see the batch of all ranks."""

from __future__ import annotations

import copyreg
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from mmengine.logging import print_log
from torch import nn

from memengine.engine.wrappers.ddp import MMDistributedDataParallel
from memengine.registry import MODEL_WRAPPERS

# Hooks copy the model (EMA does): a copy shares the group, which cannot be copied.
copyreg.pickle(dist.ProcessGroup, lambda group: 'the process group')


@runtime_checkable
class LossOverRanks(Protocol):
    """A loss that is that of a group's samples, or of each rank's own while the group is None."""

    process_group: Any


def losses_with_a_group(model: nn.Module) -> dict[str, Any]:
    """The modules that can compute their loss over a group of ranks, by name.

    What such a module is made of is its own affair.
    """
    others = nn.SyncBatchNorm, nn.parallel.DistributedDataParallel
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        inside = name.startswith(tuple(f'{outer}.' for outer in found))
        is_loss = isinstance(module, LossOverRanks) and not isinstance(module, others)
        if is_loss and not inside:
            found[name] = module
    return found


@MODEL_WRAPPERS.register_module()
class DisCoDistributedDataParallel(MMDistributedDataParallel):
    """DDP for contrastive learning: N ranks of b samples train what one process of N * b does.

    Under plain DDP every rank contrasts its own b samples with each other, which is another
    objective. Here each loss of the model that has an attribute ``process_group`` (memengine's
    ClipLoss, SigLipLoss, NTXentLoss, SupConLoss and ConLoss, or one's own) is given the group of
    ranks and becomes the loss of all samples, of which a rank computes its rows.

    **The contract**, in one place: on every rank such a loss has the value of the whole batch L,
    and its backward hands the rank's embeddings N dL / d embeddings, and a learned scale or bias
    a gradient whose mean over ranks is dL. DDP's mean over ranks then is dL for every parameter.
    Other losses that the model adds are means over the rank's samples, whose mean over ranks is
    the mean over all. So there is no factor to set anywhere. What is logged beside such a loss
    (``feature_std``, ``feature_rank``, other losses) is of the rank's own samples.

    Args:
        module: The model, which must hold such a loss.
        broadcast_buffers: Whether rank 0's buffers (BatchNorm's running statistics) overwrite
            those of the others before each forward; as in the Runner's own DDP not.
        **kwargs: As of MMDistributedDataParallel; ``process_group`` is also the losses'.

    Raises:
        ValueError: When the model holds no such loss.

    Cost: that of the losses, see there: embeddings on the wire, never activations.

    Composes with the gradient cache, with precision and loss scaling, with accumulation over
    iterations (a batch is that of all ranks in one iteration) and with unequal batches where the
    loss takes them. BatchNorm normalises by each rank's samples; ``sync_bn='torch'`` makes it see
    the whole batch, without which ranks do not follow one process. In one process it does
    nothing: the Runner says so and leaves the model as it is.

    Source: Chen et al., DisCo-CLIP: A Distributed Contrastive Loss for Memory Efficient CLIP
    Training (2023), for the decomposition over ranks.
    """

    def __init__(self, module: nn.Module, broadcast_buffers: bool = False, **kwargs: Any) -> None:
        found = self.find_losses(module)
        super().__init__(module, broadcast_buffers=broadcast_buffers, **kwargs)
        for loss in found.values():
            loss.process_group = self.process_group
        names = ', '.join(f'{name} ({type(loss).__name__})' for name, loss in found.items())
        ranks = dist.get_world_size(self.process_group)
        print_log(
            f'DisCoDistributedDataParallel: {names} of {type(module).__name__} contrasts the '
            f'samples of all {ranks} rank(s)',
            logger='current',
        )

    @staticmethod
    def find_losses(module: nn.Module) -> dict[str, Any]:
        """The losses of a model that become global, by name."""
        found = losses_with_a_group(module)
        if not found:
            raise ValueError(
                f'DisCoDistributedDataParallel: {type(module).__name__} has no contrastive loss '
                'that could see the samples of all ranks (a module with an attribute '
                'process_group, such as ClipLoss, SigLipLoss, NTXentLoss, SupConLoss or ConLoss); '
                "use model_wrapper_cfg.type='MMDistributedDataParallel', which is exact for "
                'losses that are means over samples'
            )
        return found
