"""What hooks can tell of a batch, whatever its layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def count_images(data_batch: Any, loader: Any) -> int:
    """Images in a batch of this rank; views of one image count as one.

    Args:
        data_batch: A dict with ``inputs``, a tuple that begins with them, or the inputs: a tensor
            [B, ...], a list of views [B, C, H, W] or a list of images [C, H, W].
        loader: Where the batch comes from; its ``batch_size`` is taken for other batches.
    """
    if isinstance(data_batch, Mapping):
        inputs = data_batch.get('inputs')
    else:
        inputs = data_batch[0] if isinstance(data_batch, (list, tuple)) else data_batch
    if isinstance(inputs, (list, tuple)) and inputs and isinstance(inputs[0], Tensor):
        return len(inputs[0]) if inputs[0].ndim > 3 else len(inputs)
    if isinstance(inputs, Tensor):
        return len(inputs)
    return int(loader.batch_size or 0)
