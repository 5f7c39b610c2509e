"""What autograd's operations save, and what their derivatives need of it.

The names are those of autograd's nodes (``AddmmBackward0``) and of their fields
(``_saved_mat1``), so that any model is understood, however it is written: modules, functions, or
operators. What is not in the table is needed as it is: statistics of a norm, the log-sum-exp of
attention, denominators.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

from torch import nn


class Need(Enum):
    """What a derivative needs of a saved tensor.

    Of the first group values, which may be near enough; of the second one fact, which a smaller
    code holds exactly.
    """

    LINEAR = 'linear'  # a layer's input, for the gradient of its weight
    CONVOLUTION = 'convolution'
    ACTIVATION = 'activation'  # what GELU, SiLU, tanh ... took or gave
    NORM = 'norm'  # what is normalised, by row
    BATCH_NORM = 'norm by channel'
    SOFTMAX = 'softmax'  # probabilities
    ATTENTION = 'attention'  # queries, keys, values, and their products
    PRODUCT = 'product'  # a factor of an elementwise product, unless it is dropout's mask

    POSITIVE = 'positive'  # where it is above zero, of ReLU
    SIGN = 'sign'  # the same of leaky ReLU
    WITHIN = 'within'  # where it is between two bounds
    BOOL = 'bool'
    INDICES = 'indices'
    SHAPE = 'shape'  # nothing but its shape

    __hash__ = object.__hash__  # each is there once, and Enum hashes names in Python

    @property
    def kind(self) -> str:
        """What settings and accounts call it."""
        return Need.NORM.value if self is Need.BATCH_NORM else self.value

    @property
    def is_of_values(self) -> bool:
        """Whether values near the saved ones serve."""
        return self in _OF_VALUES


_OF_VALUES = frozenset(
    (
        Need.LINEAR,
        Need.CONVOLUTION,
        Need.ACTIVATION,
        Need.NORM,
        Need.BATCH_NORM,
        Need.SOFTMAX,
        Need.ATTENTION,
        Need.PRODUCT,
    )
)


def _for_each(operations: str, needs: dict[str, Need]) -> dict[str, dict[str, Need]]:
    return dict.fromkeys(operations.split(), needs)


_FROM_INPUT = {'self': Need.ACTIVATION}
_FROM_RESULT = {'result': Need.ACTIVATION}

# Operation, field, need. A product of matrices is a layer if one of them is made of weights.
_NEEDS: dict[str, dict[str, Need]] = {
    'Addmm': {'mat1': Need.LINEAR},
    'Mm': {'self': Need.LINEAR},
    'Linear': {'input': Need.LINEAR},
    'Convolution': {'input': Need.CONVOLUTION},
    'Bmm': {'self': Need.ATTENTION, 'mat2': Need.ATTENTION},
    'Baddbmm': {'batch1': Need.ATTENTION, 'batch2': Need.ATTENTION},
    **_for_each(
        'ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention '
        'ScaledDotProductEfficientAttention ScaledDotProductCudnnAttention',
        dict.fromkeys(('query', 'key', 'value', 'output', 'out'), Need.ATTENTION),
    ),
    **_for_each('Softmax SafeSoftmax', {'result': Need.SOFTMAX}),
    **_for_each('NativeLayerNorm NativeGroupNorm FusedRmsNorm', {'input': Need.NORM}),
    **_for_each('NativeBatchNorm CudnnBatchNorm MiopenBatchNorm', {'input': Need.BATCH_NORM}),
    **_for_each('Gelu Silu Mish Softplus Hardswish Hardsigmoid LogSigmoid', _FROM_INPUT),
    **_for_each('Elu Celu', _FROM_INPUT | _FROM_RESULT),
    **_for_each('Tanh Sigmoid', _FROM_RESULT),
    'Mul': {'self': Need.PRODUCT, 'other': Need.PRODUCT},
    'Relu': {'result': Need.POSITIVE},
    'LeakyRelu': {'self': Need.SIGN, 'result': Need.SIGN},
    'Hardtanh': {'self': Need.WITHIN},
    'NativeDropout': {'result1': Need.BOOL},
    'MaskedFill': {'mask': Need.BOOL},
    **_for_each(
        'MaxPool2DWithIndices MaxPool3DWithIndices AdaptiveMaxPool2D AdaptiveMaxPool3D',
        {'self': Need.SHAPE, 'result1': Need.INDICES},
    ),
    **_for_each('AvgPool2D AvgPool3D AdaptiveAvgPool2D AdaptiveAvgPool3D', {'self': Need.SHAPE}),
    'Embedding': {'indices': Need.INDICES},
}

# Of these there are forms that act in place, on a copy of what they save.
IN_PLACE_FORMS = frozenset(('Silu', 'Mish', 'Hardswish', 'Hardsigmoid', 'Hardtanh', 'Mul'))
_WEIGHT_INPUT = {'Addmm': 2, 'Mm': 1, 'Linear': 1, 'Convolution': 1}  # their place among the inputs
_RESULT_DEPENDS_ON_DATA = frozenset(  # where one input is no weight, their result is none either
    ('Addmm', 'Mm', 'Bmm', 'Baddbmm', 'Linear', 'Convolution', 'Embedding', 'NativeLayerNorm')
)
# Which input of its operation a field holds, but for the first; and fields that hold a result.
_INPUT_OF_FIELD = {'mat1': 1, 'mat2': 1, 'batch1': 1, 'batch2': 2, 'other': 1, 'key': 1, 'value': 2}
_RESULT_FIELDS = frozenset(('result', 'output', 'out'))
_VIEW_OPERATIONS = frozenset(
    ('View', 'UnsafeView', 'ReshapeAlias', 'Alias', 'Transpose', 'T', 'Permute', 'Expand')
    + ('Unsqueeze', 'Squeeze', 'Select', 'Slice', 'Split', 'SplitWithSizes', 'Unbind', 'Unfold')
)
_LEAF = 'torch::autograd::AccumulateGrad'
_MOST_NODES_TO_WEIGHTS = 8  # a transposition, a cast, a weight norm


def operation_name(node: Any) -> str:
    """A node's name without what autograd puts around it: ``'Addmm'``.

    That of somebody's own Function has no number at its end, and stays as it is.
    """
    known = _name_of_kind.get(type(node))  # to ask a node for its name takes five times as long
    if known is not None:
        return known
    full = node.name()
    name = re.sub(r'Backward\d+$', '', full)
    if name != full == type(node).__name__:  # a class for this operation alone, and torch's own
        _name_of_kind[type(node)] = name
    return name


_name_of_kind: dict[type, str] = {}


def needs_of(node: Any) -> dict[str, Need]:
    """What a node of the graph needs of the tensors it saved, by the field's name.

    Args:
        node: Of autograd's graph (``tensor.grad_fn``).

    Returns:
        Fields that the table knows; others are needed as they are.
    """
    name = operation_name(node)
    needs = _NEEDS.get(name, {})
    if name in _WEIGHT_INPUT and not _is_of_weights(node, _WEIGHT_INPUT[name]):
        return dict.fromkeys(needs, Need.ATTENTION)
    return needs


def producer_of(node: Any, field: str) -> Any:
    """The node of the operation that computed what a node has saved; views are looked through.

    Args:
        node: Of autograd's graph.
        field: Of those in :func:`needs_of`.

    Returns:
        None for what no operation with a gradient has computed.
    """
    if field not in _RESULT_FIELDS:
        node = node.next_functions[_INPUT_OF_FIELD.get(field, 0)][0]
    return behind_views(node)


def behind_views(node: Any) -> Any:
    """The node of the operation whose result has been viewed; None if that has no gradient."""
    while node is not None and operation_name(node) in _VIEW_OPERATIONS:
        node = node.next_functions[0][0]
    return node


def _is_of_weights(node: Any, index: int) -> bool:
    """Whether one of a node's inputs is made of parameters alone, in a few operations."""
    pending = [node.next_functions[index][0]]
    for _ in range(_MOST_NODES_TO_WEIGHTS):
        if not pending:
            return True
        producer = pending.pop()
        if producer is None:
            continue  # a constant beside them
        if producer.name() == _LEAF:
            if not isinstance(producer.variable, nn.Parameter):
                return False
            continue
        parents = [parent for parent, _ in producer.next_functions]
        if operation_name(producer) in _RESULT_DEPENDS_ON_DATA and (
            None in parents or len(parents) == 1
        ):
            return False
        pending += parents
    return not pending
