"""Operations whose results can be computed again from what they save for backward anyway.

None is a product of matrices or a convolution: GELU and its kin from their input, norms from
theirs, factors and dropout from both sides. A chain of them (BatchNorm, ReLU) is computed from its
start; a ReLU after a residual sum from the last such ReLU, if that is kept. They run as they ran,
on the same input, so the result is the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from memengine._torch_private.autograd import asking_for, result_metadata_of
from memengine._torch_private.modules import BatchNorm, own_parameters
from memengine._torch_private.ops import fused_rms_norm
from memengine.techniques.compression.backward_needs import operation_name, producer_of
from memengine.techniques.compression.recomputation.recomputation import (
    Ask,
    Compute,
    Derivation,
    FindSource,
    Recomputation,
    Source,
    Whole,
)
from memengine.techniques.modules.saved_tensors import KeptAsIs, is_plain
from memengine.techniques.modules.wrapped_forward import innermost_forward

_LONGEST_CHAIN = 4  # operations in a chain
_LIBRARIES = ('torch', 'timm', 'torchvision')  # whose norms use their own weights and epsilon


def is_recomputable(node: Any, saved_as: str) -> bool:
    """Whether what a node has saved in a field is the result of one of these operations."""
    producer = producer_of(node, saved_as)
    return producer is not None and operation_name(producer) in _RECOMPUTABLE


def recomputation_of(
    node: Any, saved_as: str, whole: Whole, number: int, find_source: FindSource
) -> Recomputation | None:
    """How to compute what a node has saved again, if its operation is one of these.

    Args:
        node: Of autograd's graph, which has saved the tensor.
        saved_as: In which field.
        whole: The saved tensor, or what it is a view of, where that is known.
        number: Of the tensor, among those that its module saves.
        find_source: Knows what is held of other nodes. Only that is kept, no node.
    """
    producer = producer_of(node, saved_as)
    if producer is None or operation_name(producer) not in _RECOMPUTABLE:
        return None
    result = _Result(producer, 0, find_source, [], Derivation(), _LONGEST_CHAIN)
    metadata = result_metadata_of(producer)
    if prod(metadata.shape) * metadata.dtype.itemsize != whole.nbytes:
        return None  # part of something larger, or a copy
    name = result.ask(operation_name)  # first: others lack the fields that are asked for then
    compute = result.recompute()
    if compute is None:
        return None
    stride = None
    if not result.derivation.keeps_layout:
        if whole.shape != (*metadata.shape,):  # which is a list
            return None  # a view of the result, which may lie in memory in another way
        stride = whole.stride
    made = name, compute, result.sources, result.derivation, number
    return Recomputation(*made, stride=stride)


@dataclass
class _Result:
    """An operation's result, and its node's place among those that are asked."""

    node: Any
    place: int
    find_source: FindSource
    sources: list[Source]
    derivation: Derivation
    steps: int

    def recompute(self) -> Compute | None:
        build = _RECOMPUTABLE.get(operation_name(self.node))
        return build(self) if build is not None and self.steps else None

    def ask(self, ask: Ask) -> Any:
        """What the answer is, which has to be the same in every forward."""
        answer = ask(self.node)
        self.derivation.asked.append((self.place, ask, answer))
        return answer

    def use(self, source: Source, place: int | Callable[[], Source]) -> Callable[..., Tensor]:
        """What gives that source's tensor, of all sources."""
        index = len(self.sources)
        self.sources.append(source)
        self.derivation.places.append(place)
        return lambda tensors: tensors[index].prefetch()

    def source(self, field: str) -> Source | None:
        """What is held in a field; a parameter that is sharded again is not there to be used."""
        source = self.find_source(self.node, field)
        if source is None or isinstance(source, KeptAsIs) and not _has_memory(source.content):
            return None
        return source

    def read(self, field: str) -> Compute | None:
        source = self.source(field)
        return self.use(source, self.place) if source is not None else None

    def operand(self, field: str, index: int) -> Compute | None:
        """An input: as it is saved, or computed again."""
        return self.read(field) or self.input(index)

    def input(self, index: int = 0, steps: int = _LONGEST_CHAIN) -> Compute | None:
        """The result of the operation before: as that saves it, or computed again in few steps."""
        if index >= len(self.node.next_functions):
            return None  # a number, of an operation of another form
        node, output = self.node.next_functions[index]
        if node is None or output:
            return None
        name, place = operation_name(node), self.derivation.nodes
        self.derivation.asked.append((self.place, index, name))
        self.derivation.nodes += 1
        left = min(self.steps - 1, steps)
        result = _Result(node, place, self.find_source, self.sources, self.derivation, left)
        if name in _KEEP_RESULT:
            return result.read('result')
        if name == 'Relu' and (source := self.find_source(node, 'result')) and source.is_whole:
            return result.use(source, place)
        return result.recompute()

    def setting(self, name: str) -> Any:
        return self.ask(asking_for(name))


def _has_memory(tensor: Tensor) -> bool:
    is_strided = type(tensor) is nn.Parameter or is_plain(tensor)  # or no norm has it
    return is_strided and tensor.untyped_storage().nbytes() > 0


def _pointwise(function: Callable[..., Tensor], *settings: str) -> Callable[[_Result], Any]:
    def build(result: _Result) -> Compute | None:
        x = result.read('self')
        given = {name: result.setting(name) for name in settings}
        return (lambda tensors: function(x(tensors), **given)) if x is not None else None

    return build


def _relu(result: _Result) -> Compute | None:
    x = result.input()
    return (lambda tensors: torch.relu(x(tensors))) if x is not None else None


def _residual_sum(result: _Result) -> Compute | None:
    """Of branches that end in BatchNorm; one step each, so that sums do not add up."""
    a = result.input(0, steps=1)
    b = result.input(1, steps=1) if a is not None else None
    if a is None or b is None or result.setting('alpha') != 1:
        return None
    return lambda tensors: a(tensors) + b(tensors)


def _cast(result: _Result) -> Compute | None:
    result.derivation.keeps_layout = False  # if it was asked for another one
    x, (device, dtype) = result.input(), result.ask(_device_and_dtype)
    return (lambda tensors: x(tensors).to(device, dtype)) if x is not None else None


def _device_and_dtype(node: Any) -> tuple[torch.device, torch.dtype]:
    metadata = result_metadata_of(node)
    return metadata.device, metadata.dtype


def _product(result: _Result) -> Compute | None:
    a, b = result.operand('self', 0), result.operand('other', 1)
    return (lambda tensors: a(tensors) * b(tensors)) if a is not None and b is not None else None


def _dropout(result: _Result) -> Compute | None:
    x, mask, p = result.input(), result.read('result1'), result.setting('p')
    if x is None or mask is None:
        return None
    scale = 1 / (1 - p) if p < 1 else 0.0
    again = torch.ops.aten.native_dropout_backward  # the same product
    return lambda tensors: again(x(tensors), mask(tensors), scale)


def _norm(function: Callable[..., Any], *kinds: type[nn.Module]) -> Callable[[_Result], Any]:
    """Norms of modules, which have what autograd's nodes lack: epsilon, and some the bias.

    That a module's norm uses what the module says of itself is known of those of libraries alone.
    """

    def build(result: _Result) -> Compute | None:
        source = result.source('input')
        module = source.module if source is not None else None
        if source is None or not isinstance(module, kinds):
            return None
        x = result.use(source, result.place)
        stated = result.ask(partial(_stated_by, module))
        if stated is None:
            return None
        *has, eps, forward = stated
        result.derivation.is_certain &= forward.__module__.partition('.')[0] in _LIBRARIES
        affine: list[Callable[..., Any]] = []
        for name, is_there in zip(('weight', 'bias'), has, strict=True):
            get = partial(_kept_parameter_of, module, name)
            affine.append(result.use(get(), get) if is_there else _nothing)
        weight, bias = affine
        rest = function(result, eps)
        if rest is None:
            return None
        return lambda tensors: rest(x(tensors), weight(tensors), bias(tensors), tensors)

    return build


def _nothing(tensors: Sequence[Source]) -> None:
    return None


def _parameter_of(module: nn.Module, name: str) -> Tensor | None:
    own = own_parameters(module)  # to ask the module may compute them
    return own[name] if name in own else vars(module).get(name)


def _kept_parameter_of(module: nn.Module, name: str) -> Source:
    parameter = _parameter_of(module, name)
    assert parameter is not None
    return KeptAsIs(parameter)


def _stated_by(module: Any, node: Any) -> tuple[Any, ...] | None:
    """What a module says of its norm; None where that has used other parameters."""
    weight, bias = _parameter_of(module, 'weight'), _parameter_of(module, 'bias')
    inputs = node.next_functions
    if not (_is_input(inputs, 1, weight) and _is_input(inputs, 2, bias)):
        return None
    return weight is not None, bias is not None, module.eps, innermost_forward(module)


def _is_input(inputs: Sequence[Any], index: int, parameter: Tensor | None) -> bool:
    """Whether a node's input is that very parameter; a frozen one leaves no trace to compare."""
    producer = inputs[index][0] if index < len(inputs) else None
    if parameter is None:
        return producer is None
    if not _has_memory(parameter):
        return False
    if not parameter.requires_grad:
        return producer is None
    return getattr(producer, 'variable', None) is parameter


def _layer_norm(result: _Result, eps: float) -> Callable[..., Tensor]:
    shape = result.setting('normalized_shape')
    return lambda x, w, b, _: torch.native_layer_norm(x, shape, w, b, eps)[0]


def _group_norm(result: _Result, eps: float) -> Callable[..., Tensor]:
    n, c, hw, group = (result.setting(name) for name in ('N', 'C', 'HxW', 'group'))
    return lambda x, w, b, _: torch.native_group_norm(x, w, b, n, c, hw, group, eps)[0]


def _rms_norm(result: _Result, eps: float) -> Callable[..., Tensor]:
    shape = result.setting('normalized_shape')
    return lambda x, w, b, _: fused_rms_norm(x, shape, w, eps)


def _batch_norm(result: _Result, eps: float) -> Callable[..., Tensor] | None:
    training, cudnn = result.setting('training'), result.ask(_uses_cudnn)
    mean, var = (None if training else result.read(f'running_{name}') for name in ('mean', 'var'))
    if not training and (mean is None or var is None):
        return None

    def compute(x: Tensor, w: Tensor | None, b: Tensor | None, tensors: Sequence[Source]) -> Tensor:
        m, v = (None, None) if mean is None or var is None else (mean(tensors), var(tensors))
        return torch.batch_norm(x, w, b, m, v, training, 0.0, eps, cudnn)

    return compute


def _uses_cudnn(_: Any) -> bool:
    return torch.backends.cudnn.enabled


_KEEP_RESULT = frozenset(('Softmax', 'Sigmoid', 'Tanh'))
_BATCH_NORM = _norm(_batch_norm, BatchNorm)
_RECOMPUTABLE: dict[str, Callable[[_Result], Compute | None]] = {
    'Gelu': _pointwise(nn.functional.gelu, 'approximate'),
    'Silu': _pointwise(nn.functional.silu),
    'Mish': _pointwise(nn.functional.mish),
    'Hardswish': _pointwise(nn.functional.hardswish),
    'Softplus': _pointwise(nn.functional.softplus, 'beta', 'threshold'),
    'Relu': _relu,
    'ToCopy': _cast,
    'Mul': _product,
    'Add': _residual_sum,
    'NativeDropout': _dropout,
    'NativeLayerNorm': _norm(_layer_norm, nn.LayerNorm),
    'NativeGroupNorm': _norm(_group_norm, nn.GroupNorm),
    'FusedRmsNorm': _norm(_rms_norm, nn.RMSNorm),  # of GPUs; elsewhere it is products
    'NativeBatchNorm': _BATCH_NORM,
    'CudnnBatchNorm': _BATCH_NORM,
    'MiopenBatchNorm': _BATCH_NORM,
}
