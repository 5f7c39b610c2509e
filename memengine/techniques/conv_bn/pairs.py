"""Which BatchNorm reads which convolution's output, found in each call, and what then runs.

Who feeds whom is not traced beforehand: each call looks whether its input is the very tensor that
a convolution has returned. So control flow, shared layers and what is called in between make no
difference, and whatever is not such a pair is carried out as if this were not here.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from memengine._torch_private.autograd import (
    checkpointed_pass,
    current_backward,
    gradient_hooks_of,
    version_of,
)
from memengine._torch_private.modules import forward_hooks_of, forward_pre_hooks_of
from memengine._torch_private.ops import do_not_compile, is_traceable_wrapper_subclass
from memengine.techniques.conv_bn.gradient import (
    ConvOutput,
    Geometry,
    conv_bn_eval,
    frozen_bn,
    lean_convolution,
)

Pair = tuple[str, str]  # a convolution and a BatchNorm by their names

_CONVOLUTION = ('input', 'weight', 'bias', 'stride', 'padding', 'dilation', 'groups')
_TRANSPOSED = (*_CONVOLUTION[:5], 'output_padding', 'groups', 'dilation')
_CONVOLUTIONS = dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _CONVOLUTION) | dict.fromkeys(
    (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _TRANSPOSED
)
_KEEP_THEIR_INPUT = {F.silu, F.hardswish, F.mish, F.gelu}
_local = threading.local()  # .modes: those of this thread's calls, innermost last


class ConvBNPairs:
    """What meets in forward passes, and how it is carried out.

    Attributes:
        found: Every pair that met in a forward pass with gradients; None where BatchNorm kept
            nothing in the latest such call, else why it did.
        frozen: BatchNorm layers by name that read something else and kept nothing, as their
            weight takes no gradient.
        has_run: Whether a layer was called with gradients.
        is_paused: Whether layers run as they are.
    """

    def __init__(self) -> None:
        self.found: dict[Pair, str | None] = {}
        self.frozen: dict[str, None] = {}
        self.has_run = self.is_paused = False
        self._has_other_user: dict[Pair, int] = {}  # and the backward pass in which this was seen
        self._forget_tensors()

    def _forget_tensors(self) -> None:
        self._outputs = WeakTensorKeyDictionary()  # of convolutions: tensor to ConvOutput
        self._activated = WeakTensorKeyDictionary()  # to (activation, before, versions, pass)

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model begins without tensors."""
        return {**vars(self), '_outputs': None, '_activated': None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_tensors()

    def convolve(self, mode: _LayerMode, function: Any, args: Any, kwargs: Any) -> Tensor:
        """A convolution as it always is; how its output came about is remembered beside it."""
        arguments = dict(zip(_CONVOLUTIONS[function], args, strict=False)) | kwargs
        x, weight, bias = arguments['input'], arguments['weight'], arguments.get('bias')
        if (
            not torch.is_grad_enabled()
            or not isinstance(x, Tensor)  # torch says so
            or x.dim() != weight.dim()  # no batch axis
            or is_traceable_wrapper_subclass(x)
            or is_traceable_wrapper_subclass(weight)
            or _has_other_hooks(forward_hooks_of(mode.layer))  # which may ask for its gradient
        ):
            return function(*args, **kwargs)
        x, arguments['padding'] = _explicit_padding(x, weight, arguments)
        x = arguments['input'] = _as_convolved(x)
        nothing = (None, None, None, None)
        activation, preactivation, versions, begun_in = self._activated.get(x, nothing)
        if versions != _versions(x, preactivation) or not _is_in_pass(begun_in):
            activation = preactivation = None
        source = ConvOutput(
            *(mode.name, x, weight, bias),
            Geometry.of(arguments, 'output_padding' in _CONVOLUTIONS[function]),
            *(activation, preactivation),
        )
        plain = partial(function, **arguments)
        # Its graph goes on living beside BatchNorm's: it must not keep what that does not.
        is_lean = activation is not None or not weight.requires_grad
        output = lean_convolution(source, plain) if is_lean else plain()
        if output.requires_grad:
            versions = _versions(output, x, weight, bias, preactivation)
            self._outputs[output] = source._replace(versions=versions, begun_in=_this_pass())
        else:
            self._outputs[output] = ConvOutput(mode.name, begun_in=_this_pass())
        return output

    def normalise(
        self,
        mode: _LayerMode,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """BatchNorm, without keeping ``input`` where it is an output of a convolution."""
        plain = (running_mean, running_var, weight, bias, training, momentum, eps)
        source: ConvOutput | None = self._outputs.pop(input, None)
        if source is not None and not _is_in_pass(source.begun_in):
            source = None
        if not torch.is_grad_enabled():
            return F.batch_norm(input, *plain)
        keeps_nothing = not (training or running_var is None or _needs_gradient(weight))
        normalise = frozen_bn if keeps_nothing else F.batch_norm
        if source is None:
            if keeps_nothing and (input.requires_grad or _needs_gradient(bias)):
                self.frozen[mode.name] = None
            return normalise(input, *plain)
        pair = (source.name, mode.name)
        reason = self._why_not(pair, source, input, training, mode.layer)
        self.found[pair] = None if keeps_nothing and input.requires_grad else reason
        if reason is not None:
            return normalise(input, *plain)
        assert running_mean is not None and running_var is not None
        # No gradient comes this way, unless something else has used the convolution's output, or
        # somebody who has it could ask for its gradient.
        input.register_hook(partial(self._see_other_user, pair))
        is_looked_at = partial(_is_looked_at, weakref.ref(input), gradient_hooks_of(input))
        statistics, affine = (running_mean, running_var), (weight, bias)
        output = conv_bn_eval(source, input, statistics, affine, eps, is_looked_at)
        mode.normalised = output
        return output

    def activate(self, activation: Callable[[Tensor], Tensor], preactivation: Tensor) -> Tensor:
        """An activation that keeps its input: a convolution of the result need not keep that."""
        output = activation(preactivation)
        versions = _versions(output, preactivation)
        self._activated[output] = (activation, preactivation, versions, _this_pass())
        return output

    def _why_not(
        self, pair: Pair, source: ConvOutput, output: Tensor, training: bool, norm: nn.Module
    ) -> str | None:
        """Why BatchNorm has to keep its input, or None."""
        if training:
            return 'BatchNorm uses the statistics of the batch (it is in training mode)'
        if source.x is None:
            return 'no gradient goes to the convolution'
        # While a backward pass recomputes a forward pass, it has to do what that one did.
        if self._has_other_user.get(pair, current_backward()) != current_backward():
            return 'something else uses the output of the convolution, too'
        if (
            _has_other_hooks(forward_pre_hooks_of(norm))
            or gradient_hooks_of(output)
            or output.retains_grad
        ):
            return 'a hook looks at the output of the convolution'
        now = _versions(output, source.x, source.weight, source.bias, source.preactivation)
        if source.versions != now:
            return 'a tensor was changed in place between the two'
        return None

    def _see_other_user(self, pair: Pair, grad: Tensor | None) -> None:
        if grad is not None:
            self._has_other_user.setdefault(pair, current_backward())


class _LayerMode(TorchFunctionMode):
    """What happens to functions that a convolution or a normalisation layer calls."""

    def __init__(self, pairs: ConvBNPairs, layer: nn.Module, name: str) -> None:
        super().__init__()
        self.pairs, self.layer, self.name = pairs, layer, name
        self.normalised: Any = None  # what BatchNorm gave in this call

    @do_not_compile
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CONVOLUTIONS:
            return self.pairs.convolve(self, func, args, kwargs)
        if func is F.batch_norm:
            return self.pairs.normalise(self, *args, **kwargs)
        if func in _KEEP_THEIR_INPUT and len(args) == 1 and args[0] is self.normalised:
            # Nobody but this layer has seen what the activation would change in place.
            kwargs.pop('inplace', None)
            return self.pairs.activate(partial(func, **kwargs), args[0])
        return func(*args, **kwargs)


class OwnHook:
    """A hook of this technique, which asks for no gradient."""


class EnterLayer(OwnHook):
    """Forward pre-hook: a layer's call begins."""

    def __init__(self, pairs: ConvBNPairs, name: str) -> None:
        self.pairs, self.name = pairs, name

    @do_not_compile
    def __call__(self, layer: nn.Module, args: Any) -> None:
        """Watch what the layer calls."""
        if self.pairs.is_paused:
            return
        self.pairs.has_run |= torch.is_grad_enabled()
        mode = _LayerMode(self.pairs, layer, self.name)
        mode.__enter__()
        _modes().append(mode)


class LeaveLayer(OwnHook):
    """Forward hook: the layer's call has ended, or raised."""

    @do_not_compile
    def __call__(self, layer: nn.Module, args: Any, output: Any) -> None:
        """Watch no longer."""
        if _modes() and _modes()[-1].layer is layer:
            _modes().pop().__exit__(None, None, None)


def _is_looked_at(output: weakref.ref[Tensor], hooks: dict[int, Any]) -> bool:
    """Whether somebody still has a tensor, or a hook of another one waits for its gradient."""
    return output() is not None or len(hooks) > 1


def _this_pass() -> weakref.ref[Any] | None:
    """Of the checkpointed module that runs, if there is one."""
    checkpointed = checkpointed_pass()
    return None if checkpointed is None else weakref.ref(checkpointed)


def _is_in_pass(begun_in: weakref.ref[Any] | None) -> bool:
    """Whether what was noted is known to this pass of a checkpointed module in both its runs.

    What comes from outside is another tensor in the second run, which would then keep other
    tensors than the first did.
    """
    checkpointed = checkpointed_pass()
    return checkpointed is None or (begun_in is not None and begun_in() is checkpointed)


def _needs_gradient(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _modes() -> list[_LayerMode]:
    if not hasattr(_local, 'modes'):
        _local.modes = []
    modes: list[_LayerMode] = _local.modes
    return modes


def _has_other_hooks(hooks: dict[int, Any]) -> bool:
    return any(not isinstance(hook, OwnHook) for hook in hooks.values())


def _versions(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(-1 if tensor is None else version_of(tensor) for tensor in tensors)


def _explicit_padding(x: Tensor, weight: Tensor, arguments: Any) -> tuple[Tensor, Any]:
    """The input and the padding in numbers; as in torch, what is odd of 'same' goes to the end."""
    padding = arguments.get('padding', 0)
    if not isinstance(padding, str):
        return x, padding
    dilation, axes = arguments.get('dilation', 1), weight.dim() - 2
    dilation = [dilation] * axes if isinstance(dilation, int) else dilation
    total = [d * (r - 1) for d, r in zip(dilation, weight.shape[2:], strict=True)]
    if padding == 'valid':
        total = [0] * axes
    if any(t % 2 for t in total):
        x = F.pad(x, [side for t in reversed(total) for side in (0, t % 2)])
    return x, [t // 2 for t in total]


def _as_convolved(x: Tensor) -> Tensor:
    """Under autocast the input in half precision, as that is what is kept."""
    device = x.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return x
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(device))
