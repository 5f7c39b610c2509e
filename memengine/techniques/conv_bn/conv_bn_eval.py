"""Frozen BatchNorm that keeps no activation of its own where a convolution feeds it.

In eval mode the two are one convolution, ``z = conv(x, s * w) + t`` with ``s = gamma / sqrt(var +
eps)``. Every gradient follows from the convolution's input ``x``, which is kept for ``w`` anyway,
and from the gradient of ``s * w``; the convolution's output, which BatchNorm keeps, is not
needed. Forward runs as it always does, so its numbers stay the same bit for bit.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from memengine._torch_private.modules import BatchNorm, Convolution, forward_pre_hooks_of
from memengine.suggest import did_you_mean
from memengine.technique import Handle, Report, Settings, Technique, setting
from memengine.techniques.conv_bn.pairs import ConvBNPairs, EnterLayer, LeaveLayer, OwnHook, Pair

_SETTING = 'efficient_conv_bn_eval'

_logger = logging.getLogger(__name__)


class ConvBNEval(Handle):
    """What :func:`efficient_conv_bn_eval`, which makes it, has found and done.

    Attributes:
        is_checked: Whether :meth:`check` was called, by the model's first forward pass with
            gradients or by hand.
    """

    def __init__(self, strict: bool, report: Callable[[str], Any]) -> None:
        self.is_checked = False
        self._pairs = ConvBNPairs()
        self._strict, self._report = strict, report
        self._handles: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model reports to the log."""
        return {**vars(self), '_report': _logger.info}

    @property
    def pairs(self) -> dict[Pair, str | None]:
        """Every (convolution, BatchNorm) that met in a forward pass with gradients, by their names.

        None where BatchNorm kept nothing in the latest such call, else why it did.
        """
        return self._pairs.found

    @property
    def frozen(self) -> list[str]:
        """BatchNorm layers that read something else and keep nothing: their weight is frozen."""
        return list(self._pairs.frozen)

    @property
    def has_run(self) -> bool:
        """Whether a layer was called with gradients."""
        return self._pairs.has_run

    @property
    def fused(self) -> list[Pair]:
        """The pairs in which BatchNorm kept nothing in the latest call."""
        return [pair for pair, reason in self.pairs.items() if reason is None]

    def remove(self) -> None:
        """Make the model plain again."""
        while self._handles:
            self._handles.pop().remove()

    undo = remove

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which all layers run as they are."""
        self._pairs.is_paused = True
        try:
            yield
        finally:
            self._pairs.is_paused = False

    def check(self) -> None:
        """Report what has been found; called after the first forward pass with gradients.

        Raises:
            ValueError: When nothing is saved, unless ``strict=False``.
        """
        self.is_checked = True
        report = self.report()
        if report.done:
            self._report(report.done)
        else:
            self._complain(report.left)

    def report(self) -> Report:
        """What has been found."""
        reasons: dict[str, list[str]] = {}
        for (conv, norm), reason in self.pairs.items():
            reasons.setdefault(reason or '', []).append(f'{conv} → {norm}')
        fused = reasons.pop('', [])
        alone = ''.join(f'; left alone as {why}: {", ".join(n)}' for why, n in reasons.items())
        done = []
        if fused:
            done.append(
                f'{len(fused)} of {len(self.pairs)} Conv-BN pairs keep nothing between the two: '
                f'{", ".join(fused)}'
            )
        if self.frozen:
            done.append(
                f'{len(self.frozen)} other BatchNorm layers keep nothing, as their weight takes no '
                f'gradient: {", ".join(self.frozen)}'
            )
        if done:
            return Report(f'{_SETTING}: {"; ".join(done)}{alone}')
        if self.pairs:
            return Report(
                left=f'{_SETTING} does nothing: none of the {len(self.pairs)} Conv-BN pairs can be '
                f'fused{alone}'
            )
        return Report(
            left=f'{_SETTING} does nothing: no BatchNorm reads the output of a convolution directly'
        )

    def _complain(self, what: str) -> None:
        if self._strict:
            raise ValueError(f'{what}; change that, remove the setting or pass strict=False')
        self._report(what)


class _CheckHook(OwnHook):
    """Forward hook of the model: says what was found as soon as there is something to see."""

    def __init__(self, found: ConvBNEval) -> None:
        self.found = found

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        if self.found.has_run and not self.found.is_checked:
            self.found.check()


def _layers_below(model: nn.Module, modules: str | Iterable[str] | None) -> dict[str, nn.Module]:
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
                if isinstance(layer, (Convolution, BatchNorm)):
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

    A BatchNorm in eval mode whose own weight takes no gradient keeps nothing whatever it reads (a
    sum, a concatenation), where PyTorch keeps its input all the same.

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
            it when nothing is saved.

    Cost: saves the bytes of the output of every convolution in a pair, those of its input where
    neither the weight nor BatchNorm's weight takes a gradient, and those of what another BatchNorm
    reads whose weight takes none; never costs any. After an
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
    layers = _layers_below(model, modules)
    found = ConvBNEval(strict, report)
    for kind, name in ((Convolution, 'convolution'), (BatchNorm, 'BatchNorm')):
        if not any(isinstance(layer, kind) for layer in layers.values()):
            where = modules or type(model).__name__
            found._complain(f'{_SETTING} does nothing: there is no {name} layer in {where}')
    hooks = (h for layer in layers.values() for h in forward_pre_hooks_of(layer).values())
    if any(isinstance(hook, EnterLayer) for hook in hooks):
        raise ValueError('efficient_conv_bn_eval: it is on already; name all modules in one call')
    for name, layer in layers.items():
        found._handles += [
            layer.register_forward_pre_hook(EnterLayer(found._pairs, name), prepend=True),
            layer.register_forward_hook(LeaveLayer(), prepend=True, always_call=True),
        ]
    found._handles.append(model.register_forward_hook(_CheckHook(found)))
    return found


@dataclass(frozen=True)
class EfficientConvBNEvalSettings(Settings):
    """Settings of :func:`efficient_conv_bn_eval`."""

    modules: str | Sequence[str] | None = setting(
        None, help='below which modules: names or globs; None: everywhere'
    )
    strict: bool = setting(True, help='whether it is an error when the first step fuses nothing')


def _apply(model: nn.Module, settings: EfficientConvBNEvalSettings) -> ConvBNEval:
    found = efficient_conv_bn_eval(model, settings.modules, strict=settings.strict)
    found.is_checked = True  # whoever applied it asks for its report
    return found


TECHNIQUE = Technique(
    key=_SETTING,
    title='Conv-BN in eval mode',
    settings=EfficientConvBNEvalSettings,
    apply=_apply,
    switch=f'{_SETTING}=[backbone]',
    call='memengine.efficient_conv_bn_eval',
    shorthand='modules',
    use_when='fine-tuning with frozen BatchNorm',
    saves="what convolutions hand to BatchNorm, bit for bit: 41 to 52 % of a CNN's bytes "
    "(densenet121 16 %, 48 % where BatchNorm's weights are frozen)",
    price='some passes over the weights',
    page='conv_bn_eval.md',
    example=EfficientConvBNEvalSettings(modules=['backbone']),
)
