"""Frozen BatchNorm that keeps no activation of its own where a convolution feeds it.

In eval mode the two are one convolution, ``z = conv(x, s * w) + t`` with ``s = gamma / sqrt(var +
eps)``. Every gradient follows from the convolution's input ``x``, which is kept for ``w`` anyway,
and from the gradient of ``s * w``; the convolution's output, which BatchNorm keeps, is not
needed. Forward runs as it always does, so its numbers stay the same bit for bit.

Who feeds whom is not traced beforehand: each call looks whether its input is the very tensor that
a convolution has returned. So control flow, shared layers and what is called in between make no
difference, and whatever is not such a pair is carried out as if this were not here.
"""

from __future__ import annotations

import fnmatch
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from memengine.suggest import did_you_mean
from memengine.techniques.conv_bn_function import Geometry, conv_bn_eval

__all__ = ['ConvBNEval', 'efficient_conv_bn_eval']

Pair = tuple[str, str]

_CONVOLUTION = ('input', 'weight', 'bias', 'stride', 'padding', 'dilation', 'groups')
_TRANSPOSED = (*_CONVOLUTION[:5], 'output_padding', 'groups', 'dilation')
_CONVOLUTIONS = dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _CONVOLUTION) | dict.fromkeys(
    (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _TRANSPOSED
)
_KEEP_THEIR_INPUT = {F.silu, F.hardswish, F.mish, F.gelu}
_logger = logging.getLogger(__name__)
_local = threading.local()  # .modes: those of this thread's calls, innermost last


class _Output(NamedTuple):
    """How a convolution's output came about."""

    name: str
    x: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    geometry: Geometry | None = None
    activation: Callable[[Tensor], Tensor] | None = None
    before: Tensor | None = None
    versions: tuple[int, ...] = ()  # of the output and these tensors: were any changed since?


class ConvBNEval:
    """What :func:`efficient_conv_bn_eval`, which makes it, has found and done.

    Attributes:
        pairs: Every (convolution, BatchNorm) that met in a forward pass with gradients, by their
            names; None where BatchNorm kept nothing in the latest such call, else why it did.
        has_run: Whether a layer was called with gradients.
        is_checked: Whether :meth:`check` was called, by the model's first such pass or by hand.
    """

    def __init__(self, strict: bool, report: Callable[[str], Any]) -> None:
        self.pairs: dict[Pair, str | None] = {}
        self.has_run = self.is_checked = False
        self._strict, self._report = strict, report
        self._handles: list[Any] = []
        self._has_other_user: dict[Pair, int] = {}  # and the backward pass in which this was seen
        self._forget_tensors()

    def _forget_tensors(self) -> None:
        self._outputs = WeakTensorKeyDictionary()  # of convolutions: tensor to _Output
        self._activated = WeakTensorKeyDictionary()  # tensor to (activation, before, versions)

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model begins without tensors."""
        return {**vars(self), '_outputs': None, '_activated': None, '_report': _logger.info}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_tensors()

    @property
    def fused(self) -> list[Pair]:
        """The pairs in which BatchNorm kept nothing in the latest call."""
        return [pair for pair, reason in self.pairs.items() if reason is None]

    def remove(self) -> None:
        """Make the model plain again."""
        while self._handles:
            self._handles.pop().remove()

    def check(self) -> None:
        """Report what has been found; called after the first forward pass with gradients.

        Raises:
            ValueError: When nothing was fused, unless ``strict=False``.
        """
        self.is_checked = True
        reasons: dict[str, list[str]] = {}
        for (conv, norm), reason in self.pairs.items():
            reasons.setdefault(reason or '', []).append(f'{conv} → {norm}')
        fused = reasons.pop('', [])
        alone = ''.join(f'; left alone as {why}: {", ".join(n)}' for why, n in reasons.items())
        if fused:
            self._report(
                f'efficient_conv_bn_eval: {len(fused)} of {len(self.pairs)} Conv-BN pairs keep '
                f'nothing between the two: {", ".join(fused)}{alone}'
            )
        elif self.pairs:
            self._complain(f'none of the {len(self.pairs)} Conv-BN pairs can be fused{alone}')
        else:
            self._complain('no BatchNorm reads the output of a convolution directly')

    def _complain(self, what: str) -> None:
        if self._strict:
            raise ValueError(
                f'efficient_conv_bn_eval: {what}; change that, remove the setting or pass '
                'strict=False'
            )
        self._report(f'efficient_conv_bn_eval does nothing: {what}')

    def convolve(self, mode: _Mode, function: Any, args: Any, kwargs: Any) -> Tensor:
        """A convolution as it always is; how its output came about is remembered beside it."""
        arguments = dict(zip(_CONVOLUTIONS[function], args, strict=False)) | kwargs
        x, weight, bias = arguments['input'], arguments['weight'], arguments.get('bias')
        if (
            not torch.is_grad_enabled()
            or not isinstance(x, Tensor)  # torch says so
            or x.dim() != weight.dim()  # no batch axis
            or is_traceable_wrapper_subclass(x)
            or is_traceable_wrapper_subclass(weight)
            or _has_others(mode.layer._forward_hooks)  # who may ask for the output's gradient
        ):
            return function(*args, **kwargs)
        x, arguments['padding'] = _explicit_padding(x, weight, arguments)
        x = arguments['input'] = _as_convolved(x)
        activation, before, versions = self._activated.get(x, (None, None, None))
        if versions != _versions(x, before):
            activation = before = None
        output = function(**arguments)
        if not output.requires_grad:
            self._outputs[output] = _Output(mode.name)
        else:
            self._outputs[output] = _Output(
                *(mode.name, x, weight, bias),
                Geometry.of(arguments, 'output_padding' in _CONVOLUTIONS[function]),
                *(activation, before, _versions(output, x, weight, bias, before)),
            )
        return output

    def normalise(
        self,
        mode: _Mode,
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
        source: _Output | None = self._outputs.pop(input, None)
        if source is None or not torch.is_grad_enabled():
            return F.batch_norm(input, *plain)
        pair = (source.name, mode.name)
        self.pairs[pair] = reason = self._why_not(pair, source, input, training, mode.layer)
        if reason is not None:
            return F.batch_norm(input, *plain)
        assert source.x is not None and source.weight is not None and source.geometry is not None
        assert running_mean is not None and running_var is not None
        output = conv_bn_eval(
            *(source.x, source.weight, source.bias),
            input,
            source.geometry,
            partial(F.batch_norm, training=False),
            (running_mean, running_var),
            (weight, bias),
            eps,
            source.activation,
            source.before,
        )
        # No gradient comes this way, unless something else has used the convolution's output.
        input.register_hook(partial(self._see_other_user, pair))
        mode.normalised = output
        return output

    def activate(self, activation: Callable[[Tensor], Tensor], before: Tensor) -> Tensor:
        """An activation that keeps its input: a convolution of the result need not keep that."""
        output = activation(before)
        self._activated[output] = (activation, before, _versions(output, before))
        return output

    def _why_not(
        self, pair: Pair, source: _Output, output: Tensor, training: bool, norm: nn.Module
    ) -> str | None:
        """Why BatchNorm has to keep its input, or None."""
        if training:
            return 'BatchNorm uses the statistics of the batch (it is in training mode)'
        if source.x is None:
            return 'no gradient goes to the convolution'
        # While a backward pass recomputes a forward pass, it has to do what that one did.
        if self._has_other_user.get(pair, _backward_pass()) != _backward_pass():
            return 'something else uses the output of the convolution, too'
        if _has_others(norm._forward_pre_hooks) or output._backward_hooks or output.retains_grad:
            return 'a hook looks at the output of the convolution'
        now = _versions(output, source.x, source.weight, source.bias, source.before)
        if source.versions != now:
            return 'a tensor was changed in place between the two'
        return None

    def _see_other_user(self, pair: Pair, grad: Tensor) -> None:
        self._has_other_user.setdefault(pair, _backward_pass())


class _Mode(TorchFunctionMode):
    """What happens to functions that a convolution or a normalisation layer calls."""

    def __init__(self, found: ConvBNEval, layer: nn.Module, name: str) -> None:
        super().__init__()
        self.found, self.layer, self.name = found, layer, name
        self.normalised: Any = None  # what BatchNorm gave in this call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CONVOLUTIONS:
            return self.found.convolve(self, func, args, kwargs)
        if func is F.batch_norm:
            return self.found.normalise(self, *args, **kwargs)
        if func in _KEEP_THEIR_INPUT and len(args) == 1 and args[0] is self.normalised:
            # Nobody but this layer has seen what the activation would change in place.
            kwargs.pop('inplace', None)
            return self.found.activate(partial(func, **kwargs), args[0])
        return func(*args, **kwargs)


class _Enter:
    """Forward pre-hook: a layer's call begins."""

    def __init__(self, found: ConvBNEval, name: str) -> None:
        self.found, self.name = found, name

    def __call__(self, layer: nn.Module, args: Any) -> None:
        self.found.has_run |= torch.is_grad_enabled()
        mode = _Mode(self.found, layer, self.name)
        mode.__enter__()
        _modes().append(mode)


class _Exit:
    """Forward hook: the layer's call has ended, or raised."""

    def __call__(self, layer: nn.Module, args: Any, output: Any) -> None:
        if _modes() and _modes()[-1].layer is layer:
            _modes().pop().__exit__(None, None, None)


class _Check:
    """Forward hook of the model: says what was found as soon as there is something to see."""

    def __init__(self, found: ConvBNEval) -> None:
        self.found = found

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        if self.found.has_run and not self.found.is_checked:
            self.found.check()


def _modes() -> list[_Mode]:
    if not hasattr(_local, 'modes'):
        _local.modes = []
    modes: list[_Mode] = _local.modes
    return modes


def _backward_pass() -> int:
    return torch._C._current_graph_task_id()  # -1 outside


def _has_others(hooks: dict[int, Any]) -> bool:
    return any(not isinstance(hook, (_Enter, _Exit, _Check)) for hook in hooks.values())


def _versions(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(-1 if tensor is None else tensor._version for tensor in tensors)


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


def _named(model: nn.Module, modules: str | Iterable[str] | None) -> dict[str, nn.Module]:
    """The convolution and BatchNorm layers below the named modules, by their names in ``model``."""
    if isinstance(modules, str):  # MMEngine's page writes "[backbone]"
        modules = [name.strip() for name in modules.strip('[]').split(',')]
    known = dict(model.named_modules())
    layers: dict[str, nn.Module] = {}
    for pattern in [''] if modules is None else modules:
        roots = fnmatch.filter(known, pattern)
        if not roots:
            raise ValueError(
                f"efficient_conv_bn_eval: {type(model).__name__} has no module '{pattern}'"
                f'{did_you_mean(pattern, known, after=";")}'
            )
        for root in roots:
            for name, layer in known[root].named_modules(prefix=root):
                if isinstance(layer, (_ConvNd, _BatchNorm)):
                    layers[name] = layer
    return layers


def efficient_conv_bn_eval(
    model: nn.Module,
    modules: str | Sequence[str] | None = None,
    *,
    strict: bool = True,
    report: Callable[[str], Any] = _logger.info,
) -> ConvBNEval:
    """Train with frozen BatchNorm without keeping what convolutions hand to it.

    A BatchNorm in eval mode whose input is the output of a convolution then keeps nothing for
    backward. That is decided in each call, so ``train()`` and ``eval()`` of any layer may change
    in between. The pair is left alone where the layer is in training mode, where something else
    uses the convolution's output (found in the first backward pass, in which the gradient is
    right, too), where a hook looks at that output, or where it is changed in place.

    Args:
        model: Any module. Found are all subclasses of torch's convolutions and BatchNorms, also
            with further work in the same layer (timm's BatchNormAct2d and Conv2dSame, weight
            standardisation, parametrisations).
        modules: Names of modules in ``model`` to look below, or patterns such as
            ``'backbone.layer*'``; None looks everywhere.
        strict: Whether it is an error when nothing is fused.
        report: Gets one sentence with all names after the first forward pass with gradients.

    Returns:
        What was found, to look at, and to ``remove()``.

    Raises:
        ValueError: For a name that ``model`` does not have, for modules without such layers, and
            when this is on already. With ``strict``, the first forward pass with gradients raises
            it when no pair was fused.

    Cost: saves the bytes of the output of every convolution in a pair, and those of its input
    where neither the weight nor BatchNorm's weight takes a gradient; never costs any. After an
    activation that keeps its own input (SiLU, Hardswish, GELU, Mish) within a BatchNorm layer,
    the next fused convolution keeps that one in place of its own, and computes the activation
    again. Forward is the plain one, bit for bit. Backward computes no gradient of the
    convolution's output, but passes over the weights some four times more; a frozen weight's
    gradient is computed where BatchNorm's weight is trained.

    Autocast, DDP, FSDP, non-reentrant checkpointing, copies and pickles of the model are as
    before, and all hooks of the layers fire; nothing is drawn from random generators. Under
    torch.compile these layers run uncompiled, so ``fullgraph=True`` is refused by torch.

    Source: You et al., Tune-Mode ConvBN Blocks For Efficient Transfer Learning (2023), whose fused
    weight is here made in backward and not kept.

    Example:
        >>> found = efficient_conv_bn_eval(model)
        >>> model(images).sum().backward()
        >>> found.pairs
    """
    layers = _named(model, modules)
    found = ConvBNEval(strict, report)
    for kind, name in ((_ConvNd, 'convolution'), (_BatchNorm, 'BatchNorm')):
        if not any(isinstance(layer, kind) for layer in layers.values()):
            found._complain(f'there is no {name} layer in {modules or type(model).__name__}')
    if any(isinstance(h, _Enter) for m in layers.values() for h in m._forward_pre_hooks.values()):
        raise ValueError('efficient_conv_bn_eval: it is on already; name all modules in one call')
    for name, layer in layers.items():
        found._handles += [
            layer.register_forward_pre_hook(_Enter(found, name), prepend=True),
            layer.register_forward_hook(_Exit(), prepend=True, always_call=True),
        ]
    found._handles.append(model.register_forward_hook(_Check(found)))
    return found
