"""What algorithms ask of a batch before they use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


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


def check_has_labels(data_samples: Any, name: str) -> None:
    """Raise ValueError where a sample of a batch has no label, which is a label of -1.

    As equal labels all of these would be one class. Looked at on the CPU only, as above.
    """
    labels = labels_of(data_samples, name)
    if labels.device.type == 'cpu' and bool((labels < 0).any()):
        raise ValueError(
            f'{name}: {int((labels < 0).sum())} of the {len(labels)} images of a batch have no '
            'label (-1); set use_labels=False, or give the data labels'
        )


def check_one_view(inputs: Any, name: str) -> None:
    """Raise ValueError for a batch of several views, or of samples that nothing has stacked."""
    if isinstance(inputs, Tensor):
        return
    if all(isinstance(image, Tensor) and image.ndim == 3 for image in inputs):  # [C, H, W] each
        raise ValueError(
            f'{name}: a batch came as a list of its {len(inputs)} images; set '
            "collate_fn=dict(type='stack_views') in the data loader"
        )
    raise ValueError(
        f'{name}: a batch must hold one view of each image, got {len(inputs)} views; leave '
        'MultiCrop out of the pipeline'
    )
