"""What algorithms share: parts built from configs, and what they ask of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from memengine import losses
from memengine.losses.batch_loss import at_least_fp32
from memengine.registry import MODELS

__all__ = [
    'build_head',
    'build_loss',
    'check_labels',
    'check_one_view',
    'l2_normalize',
    'labels_of',
]

# The losses are plain torch; here they get names in configs.
for _name in ('ClipLoss', 'ConLoss', 'KoLeoLoss', 'NTXentLoss', 'SigLipLoss', 'SupConLoss'):
    MODELS.register_module(name=_name, module=getattr(losses, _name))


def build_loss(loss: Mapping[str, Any] | str | nn.Module) -> nn.Module:
    """A loss from its config, from the name of its class, or as it is."""
    if isinstance(loss, nn.Module):
        return loss
    return MODELS.build({'type': loss} if isinstance(loss, str) else dict(loss))


def build_head(head: Mapping[str, Any], in_dim: int) -> nn.Module:
    """A head from its config, on features of width ``in_dim``."""
    return MODELS.build({'in_dim': in_dim, **head})


def l2_normalize(embeddings: Tensor) -> Tensor:
    """Rows of length 1, [..., D], in fp32 or wider."""
    return F.normalize(at_least_fp32(embeddings)[0], dim=-1)


def labels_of(data_samples: Any, name: str) -> Tensor:
    """Labels [B] of a batch."""
    if not isinstance(data_samples, Mapping) or 'label' not in data_samples:
        raise ValueError(f"{name} needs data_samples['label']; let PackInputs.keys hold 'label'")
    return data_samples['label']


def check_labels(labels: Tensor, classes: range, name: str, setting: str) -> None:
    """Raise ValueError for labels of no class, naming the setting that says how many there are.

    Of those on an accelerator nothing is asked, which would wait for it: a model looks at a batch
    before it moves there (see ``Algorithm.check_batch``).
    """
    if labels.device.type != 'cpu':
        return
    if bool(((labels < classes.start) | (labels >= classes.stop)).any()):
        raise ValueError(
            f'{name}: labels must lie in {classes.start}..{classes.stop - 1} ({setting}), got '
            f'{int(labels.min())}..{int(labels.max())}'
        )


def check_one_view(inputs: Any, name: str) -> None:
    """Raise ValueError for a batch of several views."""
    if not isinstance(inputs, Tensor):
        raise ValueError(
            f'{name}: a batch must hold one view of each image, got {len(inputs)} views; leave '
            'MultiCrop out of the pipeline'
        )
