"""Codecs for what is saved for one fact only: where it is positive, which shape it has."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from memengine._torch_private.autograd import saved_by
from memengine.techniques.codecs.codec import Code, Codec
from memengine.techniques.codecs.lossless import (
    between,
    bitmask,
    narrow_ints,
    positive_mask,
    shape_only,
    sign_mask,
    two_valued,
)
from memengine.techniques.compression.backward_needs import Need

__all__ = ['lossless_codec_for']


def lossless_codec_for(need: Need, tensor: Tensor, node: Any) -> Codec | None:
    """A codec that gives back all that a derivative uses, bit for bit.

    Args:
        need: What the derivative needs.
        tensor: The saved tensor.
        node: The node that saved it; bounds are read from it. It is not kept.

    Returns:
        None where values are needed, or nothing smaller holds the fact.
    """
    if need is Need.WITHIN:
        low, high = saved_by(node, 'min_val'), saved_by(node, 'max_val')
        return partial(
            between, low=low, high=high, inside=_number_between(low, high), outside=math.inf
        )
    if need in _BY_VALUES:
        code = _BY_VALUES[need](tensor)
        return None if code is None else lambda _: code
    return _BY_NEED.get(need)


def _number_between(low: float, high: float) -> float:
    if low < 0 < high:
        return 0.0
    if math.isinf(high):
        return low + max(1.0, abs(low))
    return high - max(1.0, abs(high)) if math.isinf(low) else (low + high) / 2


_BY_NEED: dict[Need, Codec] = {
    Need.POSITIVE: positive_mask,
    Need.SIGN: sign_mask,
    Need.BOOL: bitmask,
    Need.SHAPE: shape_only,
}
# Which only the values tell: dropout's mask among the factors, indices that fewer bytes hold.
_BY_VALUES: dict[Need, Callable[[Tensor], Code | None]] = {
    Need.PRODUCT: two_valued,
    Need.INDICES: narrow_ints,
}
