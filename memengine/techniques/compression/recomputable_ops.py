"""Operations whose results can be computed again from what they save for backward anyway.

None is a product of matrices or a convolution: GELU and its kin from their input, norms from
theirs, factors and dropout from both sides. A chain of them (BatchNorm, ReLU) is computed from its
start; a ReLU after a residual sum from the last such ReLU, if that is kept. They run as they ran,
on the same input, so the result is the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from memengine._torch_private.autograd import result_metadata_of, saved_by
from memengine._torch_private.modules import BatchNorm, own_parameters
from memengine._torch_private.ops import fused_rms_norm
from memengine.techniques.compression.backward_needs import operation_name, producer_of
from memengine.techniques.modules.saved_tensors import KeptAsIs, is_plain
from memengine.techniques.modules.wrapped_forward import innermost_forward

__all__ = [
    'FindSource',
    'Recomputation',
    'RecomputedCode',
    'Source',
    'Sources',
    'is_recomputable',
    'recomputation_by',
    'recomputation_of',
]

_LONGEST_CHAIN = 4  # operations in a chain
_LIBRARIES = ('torch', 'timm', 'torchvision')  # whose norms use their own weights and epsilon

Compute = Callable[[], Tensor]


class Source(Protocol):
    """A saved tensor as hooks hold it, from which others can be computed."""

    @property
    def is_exact(self) -> bool:
        """Whether what it gives back is what was saved."""

    @property
    def is_whole(self) -> bool:
        """Whether it stays as it is."""

    @property
    def module(self) -> nn.Module | None:
        """Which saved it, if that is known."""

    def decode(self) -> Tensor:
        """The tensor, or what stands for it."""

    def prefetch(self) -> Tensor:
        """The same, before autograd itself asks for it."""


FindSource = Callable[[Any, str], Source | None]  # what hooks hold of a node's field, if ours


@dataclass
class Sources:
    """What operations are computed again from.

    Attributes:
        tensors: What is held of their own.
        are_certain: Whether all that they used is known, and not only what a module says of itself.
    """

    tensors: list[Source] = field(default_factory=list)
    are_certain: bool = True


@dataclass(frozen=True)
class Recomputation:
    """How to compute a storage's content again.

    Args:
        operation: What made it.
        compute: Runs that, into memory of its own that is laid out as the first result's.
        sources: What it starts from.
        number: Of the tensor that it is for, among those that its module saves in a forward.
        version: That the storage has if only these operations have worked in place in it; None if
            that cannot be told.
    """

    operation: str
    compute: Compute
    sources: Sources
    number: int = 0
    version: int | None = None

    @property
    def is_exact(self) -> bool:
        """Whether it gives what there was; not, when a source is in a lossy code."""
        return all(source.is_exact for source in self.sources.tensors)

    @property
    def is_from_whole(self) -> bool:
        """Whether all that it starts from stays as it is."""
        return all(source.is_whole for source in self.sources.tensors)

    def __call__(self) -> Tensor:
        """The result. (Meters do not look into what can be called: sources are counted already.)"""
        if not torch.is_grad_enabled():  # as in most backward passes, where to enter it costs
            return self.compute()
        with torch.no_grad():
            return self.compute()

    def code(self, view: Tensor) -> RecomputedCode:
        """A codec for views of the storage."""
        return RecomputedCode(self, tuple(view.shape), view.stride(), int(view.storage_offset()))


@dataclass(frozen=True)
class RecomputedCode:
    """Code of a view of a storage, of which nothing is kept.

    Args:
        recomputation: Gives the storage.
        shape: The view's.
        stride: As well, in elements.
        offset: In the storage, in elements.
    """

    recomputation: Recomputation
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def decode(self) -> Tensor:
        """The view, of the result computed again."""
        return self.recomputation().as_strided(self.shape, self.stride, self.offset)


def is_recomputable(node: Any, saved_as: str) -> bool:
    """Whether what a node has saved in a field is the result of one of these operations."""
    producer = producer_of(node, saved_as)
    return producer is not None and operation_name(producer) in _RECOMPUTABLE


def recomputation_of(
    node: Any, saved_as: str, tensor: Tensor, number: int, find_source: FindSource
) -> Recomputation | None:
    """How to compute what a node has saved again, if its operation is one of these.

    Args:
        node: Of autograd's graph, which has saved the tensor.
        saved_as: In which field.
        tensor: The saved tensor; a view of the result will do.
        number: Of the tensor, among those that its module saves.
        find_source: Knows what is held of other nodes. Only that is kept, no node.
    """
    return recomputation_by(producer_of(node, saved_as), tensor, number, find_source)


def recomputation_by(
    producer: Any, tensor: Tensor, number: int, find_source: FindSource
) -> Recomputation | None:
    """The same, by the node that has computed it; None if that has no gradient."""
    if producer is None or operation_name(producer) not in _RECOMPUTABLE:
        return None
    metadata = result_metadata_of(producer)
    if prod(metadata.shape) * metadata.dtype.itemsize != tensor.untyped_storage().nbytes():
        return None  # part of something larger, or a copy
    result = _Result(producer, find_source, Sources(), _LONGEST_CHAIN)
    compute = result.recompute()
    if compute is None:
        return None
    return Recomputation(operation_name(producer), compute, result.sources, number)


@dataclass
class _Result:
    """An operation's result."""

    node: Any
    find_source: FindSource
    sources: Sources
    steps: int

    def recompute(self) -> Compute | None:
        build = _RECOMPUTABLE.get(operation_name(self.node))
        return build(self) if build is not None and self.steps else None

    def source(self, field: str) -> Source | None:
        """What is held in a field; a parameter that is sharded again is not there to be used."""
        source = self.find_source(self.node, field)
        if source is None or isinstance(source, KeptAsIs) and not _has_memory(source.content):
            return None
        self.sources.tensors.append(source)
        return source

    def read(self, field: str) -> Compute | None:
        source = self.source(field)
        return source.prefetch if source is not None else None

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
        name = operation_name(node)
        result = _Result(node, self.find_source, self.sources, min(self.steps - 1, steps))
        if name in _KEEP_RESULT:
            return result.read('result')
        if name == 'Relu' and (source := self.find_source(node, 'result')) and source.is_whole:
            return source.prefetch
        return result.recompute()

    def setting(self, name: str) -> Any:
        return saved_by(self.node, name)


def _has_memory(tensor: Tensor) -> bool:
    return is_plain(tensor) and tensor.untyped_storage().nbytes() > 0


def _pointwise(function: Callable[..., Tensor], *settings: str) -> Callable[[_Result], Any]:
    def build(result: _Result) -> Compute | None:
        x = result.read('self')
        given = {name: result.setting(name) for name in settings}
        return (lambda: function(x(), **given)) if x is not None else None

    return build


def _relu(result: _Result) -> Compute | None:
    x = result.input()
    return (lambda: torch.relu(x())) if x is not None else None


def _residual_sum(result: _Result) -> Compute | None:
    """Of branches that end in BatchNorm; one step each, so that sums do not add up."""
    a = result.input(0, steps=1)
    b = result.input(1, steps=1) if a is not None else None
    if a is None or b is None or result.setting('alpha') != 1:
        return None
    return lambda: a() + b()


def _cast(result: _Result) -> Compute | None:
    x, metadata = result.input(), result_metadata_of(result.node)
    return (lambda: x().to(metadata.device, metadata.dtype)) if x is not None else None


def _product(result: _Result) -> Compute | None:
    a, b = result.operand('self', 0), result.operand('other', 1)
    return (lambda: a() * b()) if a is not None and b is not None else None


def _dropout(result: _Result) -> Compute | None:
    x, mask, p = result.input(), result.read('result1'), result.setting('p')
    if x is None or mask is None:
        return None
    scale = 1 / (1 - p) if p < 1 else 0.0
    return lambda: torch.ops.aten.native_dropout_backward(x(), mask(), scale)  # the same product


def _norm(function: Callable[..., Any], *kinds: type[nn.Module]) -> Callable[[_Result], Any]:
    """Norms of modules, which have what autograd's nodes lack: epsilon, and some the bias.

    That a module's norm uses what the module says of itself is known of those of libraries alone.
    """

    def build(result: _Result) -> Compute | None:
        x = result.source('input')
        module = x.module if x is not None else None
        if x is None or not isinstance(module, kinds):
            return None
        own, held = own_parameters(module), vars(module)  # to ask the module may compute them
        w, b = (own[name] if name in own else held.get(name) for name in ('weight', 'bias'))
        if not (_is_input(result.node, 1, w) and _is_input(result.node, 2, b)):
            return None
        home = innermost_forward(module).__module__.partition('.')[0]
        result.sources.are_certain &= home in _LIBRARIES
        weight, bias = (None if p is None else KeptAsIs(p) for p in (w, b))
        rest = function(result, module)
        if rest is None:
            return None

        def compute() -> Tensor:
            affine = (None if p is None else p.tensor() for p in (weight, bias))
            return rest(x.prefetch(), *affine)

        return compute

    return build


def _is_input(node: Any, index: int, parameter: Tensor | None) -> bool:
    """Whether a node's input is that very parameter; a frozen one leaves no trace to compare."""
    inputs = node.next_functions
    producer = inputs[index][0] if index < len(inputs) else None
    if parameter is None:
        return producer is None
    if not _has_memory(parameter):
        return False
    if not parameter.requires_grad:
        return producer is None
    return getattr(producer, 'variable', None) is parameter


def _layer_norm(result: _Result, module: Any) -> Callable[..., Tensor]:
    shape, eps = result.setting('normalized_shape'), module.eps
    return lambda x, w, b: torch.native_layer_norm(x, shape, w, b, eps)[0]


def _group_norm(result: _Result, module: Any) -> Callable[..., Tensor]:
    n, c, hw, group = (result.setting(name) for name in ('N', 'C', 'HxW', 'group'))
    eps = module.eps
    return lambda x, w, b: torch.native_group_norm(x, w, b, n, c, hw, group, eps)[0]


def _rms_norm(result: _Result, module: Any) -> Callable[..., Tensor]:
    shape, eps = result.setting('normalized_shape'), module.eps
    return lambda x, w, _: fused_rms_norm(x, shape, w, eps)


def _batch_norm(result: _Result, module: Any) -> Callable[..., Tensor] | None:
    eps, training = module.eps, result.setting('training')
    mean, var = (None if training else result.read(f'running_{name}') for name in ('mean', 'var'))
    if not training and (mean is None or var is None):
        return None

    cudnn = torch.backends.cudnn.enabled

    def compute(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        m, v = (None, None) if mean is None or var is None else (mean(), var())
        return torch.batch_norm(x, w, b, m, v, training, 0.0, eps, cudnn)

    return compute


_KEEP_RESULT = frozenset(('Softmax', 'Sigmoid', 'Tanh'))
_BATCH_NORM = _norm(_batch_norm, BatchNorm)
_RECOMPUTABLE: dict[str, Callable[[_Result], Compute | None]] = {
    'Gelu': _pointwise(torch.ops.aten.gelu, 'approximate'),
    'Silu': _pointwise(nn.functional.silu),
    'Mish': _pointwise(nn.functional.mish),
    'Hardswish': _pointwise(nn.functional.hardswish),
    'Softplus': _pointwise(torch.ops.aten.softplus, 'beta', 'threshold'),
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
