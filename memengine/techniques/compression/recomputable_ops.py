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

from memengine._torch_private.autograd import result_of, saved_by
from memengine._torch_private.modules import BatchNorm
from memengine._torch_private.ops import fused_rms_norm
from memengine.techniques.compression.backward_needs import made_by, operation
from memengine.techniques.modules.saved_tensors import KeptAsIs, is_plain
from memengine.techniques.modules.wrapped_forward import innermost_forward

__all__ = ['Held', 'Holder', 'Repeated', 'Repetition', 'Trail', 'repetition_of']

_STEPS = 4  # operations in a chain
_LIBRARIES = ('torch', 'timm', 'torchvision')  # whose norms use their own weights and epsilon

Compute = Callable[[], Tensor]


class Held(Protocol):
    """A saved tensor as hooks hold it."""

    @property
    def is_exact(self) -> bool:
        """Whether what it gives back is what was saved."""

    @property
    def is_whole(self) -> bool:
        """Whether it stays as it is."""

    @property
    def module(self) -> nn.Module | None:
        """Which saved it, if that is known."""

    def ahead(self) -> Tensor:
        """The tensor, before autograd itself asks for it."""


Holder = Callable[[Any, str], Held | None]  # what hooks hold of a node's field, if it is theirs


@dataclass
class Trail:
    """What operations are computed again from.

    Attributes:
        sources: What is held of their own.
        is_certain: Whether all that they used is known, and not only what a module says of itself.
    """

    sources: list[Held] = field(default_factory=list)
    is_certain: bool = True


@dataclass(frozen=True)
class Repetition:
    """How to compute a storage's content again.

    Args:
        operation: What made it.
        compute: Runs that, into memory of its own that is laid out as the first result's.
        trail: What it starts from.
    """

    operation: str
    compute: Compute
    trail: Trail

    @property
    def is_exact(self) -> bool:
        """Whether it gives what there was; not, when a source is in a lossy code."""
        return all(source.is_exact for source in self.trail.sources)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """The result. (Meters do not look into what can be called: sources are counted already.)"""
        return self.compute()

    def code(self, view: Tensor) -> Repeated:
        """A codec for views of the storage."""
        return Repeated(self, tuple(view.shape), view.stride(), int(view.storage_offset()))


@dataclass(frozen=True)
class Repeated:
    """Code of a view of a storage, of which nothing is kept.

    Args:
        repetition: Gives the storage.
        shape: The view's.
        stride: As well, in elements.
        offset: In the storage, in elements.
    """

    repetition: Repetition
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def decode(self) -> Tensor:
        """The view, of the result computed again."""
        return self.repetition().as_strided(self.shape, self.stride, self.offset)


def repetition_of(node: Any, saved_as: str, tensor: Tensor, holder: Holder) -> Repetition | None:
    """How to compute what a node has saved again, if its operation is one of these.

    Args:
        node: Of autograd's graph, which has saved the tensor.
        saved_as: In which field.
        tensor: The saved tensor; a view of the result will do.
        holder: Knows what is held of other nodes. Only that is kept, no node.
    """
    maker = made_by(node, saved_as)
    if maker is None or operation(maker) not in _REPEATED:
        return None
    result = result_of(maker)
    if prod(result.shape) * result.dtype.itemsize != tensor.untyped_storage().nbytes():
        return None  # part of something larger, or a copy
    made = _Made(maker, holder, Trail(), _STEPS)
    compute = made.repeated()
    return Repetition(operation(maker), compute, made.trail) if compute is not None else None


@dataclass(frozen=True)
class _Made:
    """An operation's result."""

    node: Any
    holder: Holder
    trail: Trail
    steps: int

    def repeated(self) -> Compute | None:
        build = _REPEATED.get(operation(self.node))
        return build(self) if build is not None and self.steps else None

    def held(self, field: str) -> Held | None:
        """What is held in a field; a parameter that is sharded again is not there to be used."""
        held = self.holder(self.node, field)
        if held is None or isinstance(held, KeptAsIs) and not _is_there(held.content):
            return None
        self.trail.sources.append(held)
        return held

    def saved(self, field: str) -> Compute | None:
        held = self.held(field)
        return held.ahead if held is not None else None

    def operand(self, field: str, index: int) -> Compute | None:
        """An input: as it is saved, or computed again."""
        return self.saved(field) or self.before(index)

    def before(self, index: int = 0, steps: int = _STEPS) -> Compute | None:
        """The result of the operation before: as that saves it, or computed again in few steps."""
        if index >= len(self.node.next_functions):
            return None  # a number, of an operation of another form
        node, output = self.node.next_functions[index]
        if node is None or output:
            return None
        maker = _Made(node, self.holder, self.trail, min(self.steps - 1, steps))
        if operation(node) in _KEEP_RESULT:
            return maker.saved('result')
        if operation(node) == 'Relu' and (held := self.holder(node, 'result')) and held.is_whole:
            return held.ahead
        return maker.repeated()

    def setting(self, name: str) -> Any:
        return saved_by(self.node, name)


def _is_there(tensor: Tensor) -> bool:
    return is_plain(tensor) and tensor.untyped_storage().nbytes() > 0


def _pointwise(function: Callable[..., Tensor], *settings: str) -> Callable[[_Made], Any]:
    def build(made: _Made) -> Compute | None:
        x = made.saved('self')
        given = {name: made.setting(name) for name in settings}
        return (lambda: function(x(), **given)) if x is not None else None

    return build


def _relu(made: _Made) -> Compute | None:
    x = made.before()
    return (lambda: torch.relu(x())) if x is not None else None


def _sum(made: _Made) -> Compute | None:
    """Of a residual branch that ends in BatchNorm; one step each, so that sums do not add up."""
    a, b = made.before(0, steps=1), made.before(1, steps=1)
    if a is None or b is None or made.setting('alpha') != 1:
        return None
    return lambda: a() + b()


def _cast(made: _Made) -> Compute | None:
    x, result = made.before(), result_of(made.node)
    return (lambda: x().to(result.device, result.dtype)) if x is not None else None


def _product(made: _Made) -> Compute | None:
    a, b = made.operand('self', 0), made.operand('other', 1)
    return (lambda: a() * b()) if a is not None and b is not None else None


def _dropout(made: _Made) -> Compute | None:
    x, mask, p = made.before(), made.saved('result1'), made.setting('p')
    if x is None or mask is None:
        return None
    scale = 1 / (1 - p) if p < 1 else 0.0
    return lambda: torch.ops.aten.native_dropout_backward(x(), mask(), scale)  # the same product


def _norm(function: Callable[..., Any], *kinds: type[nn.Module]) -> Callable[[_Made], Any]:
    """Norms of modules, which have what autograd's nodes lack: epsilon, and some the bias.

    That a module's norm uses what the module says of itself is known of those of libraries alone.
    """

    def build(made: _Made) -> Compute | None:
        x = made.held('input')
        module = x.module if x is not None else None
        if x is None or not isinstance(module, kinds):
            return None
        affine = [getattr(module, name, None) for name in ('weight', 'bias')]
        if not all(_is_input(made.node, place, p) for place, p in enumerate(affine, start=1)):
            return None
        home = innermost_forward(module).__module__.partition('.')[0]
        made.trail.is_certain &= home in _LIBRARIES
        kept = [KeptAsIs(p) if p is not None else None for p in affine]
        rest = function(made, module)
        if rest is None:
            return None
        return lambda: rest(x.ahead(), *(p.tensor() if p is not None else None for p in kept))

    return build


def _is_input(node: Any, index: int, parameter: Tensor | None) -> bool:
    """Whether a node's input is that very parameter; a frozen one leaves no trace to compare."""
    inputs = node.next_functions
    made_by = inputs[index][0] if index < len(inputs) else None
    if parameter is None:
        return made_by is None
    if not _is_there(parameter):
        return False
    if not parameter.requires_grad:
        return made_by is None
    return getattr(made_by, 'variable', None) is parameter


def _layer_norm(made: _Made, module: Any) -> Callable[..., Tensor]:
    shape, eps = made.setting('normalized_shape'), module.eps
    return lambda x, w, b: torch.native_layer_norm(x, shape, w, b, eps)[0]


def _group_norm(made: _Made, module: Any) -> Callable[..., Tensor]:
    n, c, hw, group = (made.setting(name) for name in ('N', 'C', 'HxW', 'group'))
    return lambda x, w, b: torch.native_group_norm(x, w, b, n, c, hw, group, module.eps)[0]


def _rms_norm(made: _Made, module: Any) -> Callable[..., Tensor]:
    shape, eps = made.setting('normalized_shape'), module.eps
    return lambda x, w, _: fused_rms_norm(x, shape, w, eps)


def _batch_norm(made: _Made, module: Any) -> Callable[..., Tensor] | None:
    eps, training = module.eps, made.setting('training')
    mean, var = (None if training else made.saved(f'running_{name}') for name in ('mean', 'var'))
    if not training and (mean is None or var is None):
        return None

    cudnn = torch.backends.cudnn.enabled

    def compute(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        m, v = (None, None) if mean is None or var is None else (mean(), var())
        return torch.batch_norm(x, w, b, m, v, training, 0.0, eps, cudnn)

    return compute


_KEEP_RESULT = frozenset(('Softmax', 'Sigmoid', 'Tanh'))
_BATCH_NORM = _norm(_batch_norm, BatchNorm)
_REPEATED: dict[str, Callable[[_Made], Compute | None]] = {
    'Gelu': _pointwise(torch.ops.aten.gelu, 'approximate'),
    'Silu': _pointwise(nn.functional.silu),
    'Mish': _pointwise(nn.functional.mish),
    'Hardswish': _pointwise(nn.functional.hardswish),
    'Softplus': _pointwise(torch.ops.aten.softplus, 'beta', 'threshold'),
    'Relu': _relu,
    'ToCopy': _cast,
    'Mul': _product,
    'Add': _sum,
    'NativeDropout': _dropout,
    'NativeLayerNorm': _norm(_layer_norm, nn.LayerNorm),
    'NativeGroupNorm': _norm(_group_norm, nn.GroupNorm),
    'FusedRmsNorm': _norm(_rms_norm, nn.RMSNorm),  # of GPUs; elsewhere it is products
    'NativeBatchNorm': _BATCH_NORM,
    'CudnnBatchNorm': _BATCH_NORM,
    'MiopenBatchNorm': _BATCH_NORM,
}
