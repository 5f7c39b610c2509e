"""Codecs for what is saved for one fact only: where it is positive, which shape it has."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch import Tensor

from memengine._torch_private.autograd import input_metadata_of, saved_by
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
from memengine.techniques.compression.backward_needs import Need, operation_name

_LEAST_FACTOR = 128  # elements; to look at a drop path's takes longer than its bytes are worth


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
    if need is Need.PRODUCT:
        return _known(two_valued(tensor)) if tensor.numel() >= _LEAST_FACTOR else None
    if need is Need.INDICES:
        return _known(narrow_ints(tensor, _bound_of_indices(node)))
    return _BY_NEED.get(need)


def _known(code: Code | None) -> Codec | None:
    """A codec for the tensor that has been looked at to see whether there is a code."""
    return None if code is None else lambda _: code


def _bound_of_indices(node: Any) -> int:
    """What indices are below: rows of an embedding's table, elements of a plane that is pooled."""
    if operation_name(node) == 'Embedding':
        return int(saved_by(node, 'weight_sym_argsize_0'))
    spatial = 3 if '3D' in operation_name(node) else 2
    return math.prod(input_metadata_of(node).shape[-spatial:])


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
