"""DropIT: a layer keeps only the largest elements of its input for the gradient of its weight.

gamma: the share of elements that is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor, nn

from memengine.techniques.codecs.codec import Codec
from memengine.techniques.codecs.sparse import Sparsifier
from memengine.techniques.compression.backward_needs import Need
from memengine.techniques.compression.rules import Repeat
from memengine.techniques.compression.scope import (
    Handle,
    add_rule,
    chosen_modules,
    remove_rule,
    rules_of,
)
from memengine.techniques.modules.blocks import Selector
from memengine.techniques.modules.wrapped_forward import THE_MODEL

__all__ = ['DropIT', 'drop_activations', 'to_dropit', 'undo_dropit']

_SETTING = 'dropit'


def to_dropit(
    model: nn.Module,
    strategy: str = 'mink',
    gamma: float | Mapping[str, float] = 0.9,
    autocast: bool | None = None,
    **settings: Any,
) -> nn.Module:
    """The published call: :func:`drop_activations`, which returns the model.

    Args:
        model: Changed in place.
        strategy: Which elements are dropped.
        gamma: Share of elements to drop.
        autocast: Taken so that older calls go on working; autocast is followed as it is.
        **settings: Of :func:`drop_activations`.

    Returns:
        The model; :func:`undo_dropit` leaves it as it was.
    """
    del autocast
    drop_activations(model, strategy, gamma, **settings)
    return model


def undo_dropit(model: nn.Module) -> None:
    """Let a model's layers keep their whole inputs again.

    Raises:
        ValueError: When the model does not drop.
    """
    found = [rule for rule in rules_of(model) if isinstance(rule, DropIT)]
    if not found:
        raise ValueError(f'{_SETTING}: {type(model).__name__} drops nothing')
    for rule in found:
        remove_rule(model, rule)


def drop_activations(
    model: nn.Module,
    strategy: str = 'mink',
    gamma: float | Mapping[str, float] = 0.9,
    *,
    modules: Selector | Sequence[Selector] | None = None,
    exclude: Selector | Sequence[Selector] = (),
    block_size: int | Literal['row'] | None = None,
    values: Codec | None = None,
) -> DropIT:
    """Let a model's layers keep only a part of their inputs for backward. Lossy.

    Layers are all products with weights, however they are written: linear and convolutions of any
    kind, transposed, grouped, a fused qkv, attention's projections, tied and low-rank ones. The
    forward pass and the gradients with respect to inputs are not touched; a weight's gradient is
    that of the input without its dropped elements. What ReLU, dropout and pooling keep of the same
    memory is reduced to the bits that they need. An input that another operation keeps whole
    (without quantisation, attention does) is not dropped: that would save nothing.

    A part of the model is left out by ``exclude``, or by an attribute: ``layer.no_dropit = True``.

    Args:
        model: Changed in place; names, parameters and state dict stay what they are.
        strategy: ``'mink'``: the smallest magnitudes of the whole tensor are dropped, as
            published; ``'block_mink'``: those of each block; ``'random'``: any.
        gamma: Share of elements to drop, from 0 to below 1. 0 is the plain step, bit for bit. A
            dict gives it by globs of modules' names, of which the first that matches counts.
        modules: Where, with all that is in them: names, globs, classes, or ``'blocks'``; None for
            everywhere.
        exclude: Where not.
        block_size: For ``'block_mink'`` only: elements of a block, by default 256, or ``'row'`` for
            the last dimension.
        values: Codec of the elements that are kept, such as ``Cast(torch.bfloat16)`` or
            ``Quantizer(8)``.

    Returns:
        The handle: ``gamma`` may be set at any time; ``kept`` says what was saved; ``undo()``.

    Raises:
        ValueError: For settings out of range, names that the model lacks, a model that drops
            already or that is compiled.

    Cost: of a dropped input ``1 - gamma`` of its values, and one bit or one byte for the place of
    each; at gamma 0.9 in fp32 an eighth. Selecting costs some passes over the tensor, in the
    forward. The relative error of a weight's gradient grows with gamma. No random state is
    touched; BatchNorm, DDP, FSDP, slices, the gradient cache and gradient scaling compose; in
    evaluation mode and without gradients nothing happens. Inside activation checkpointing nothing
    is dropped, as nothing is kept there.

    Source: Chen et al., DropIT: Dropping Intermediate Tensors for Memory-Efficient DNN Training,
    ICLR 2023.
    """
    if any(isinstance(rule, DropIT) for rule in rules_of(model)):
        raise ValueError(f'{_SETTING}: {type(model).__name__} drops already; undo that first')
    by_name = gamma if isinstance(gamma, Mapping) else {'*': gamma}
    names = [name or THE_MODEL for name, _ in model.named_modules()]
    for glob in by_name:
        if not any(fnmatchcase(name, glob) for name in names):
            raise ValueError(f"{_SETTING}: gamma names '{glob}', which matches no module")
    sparsifiers = {
        glob: Sparsifier(strategy, share, block_size, values) for glob, share in by_name.items()
    }
    rule = DropIT(model, sparsifiers)
    opted_out = [module for module in model.modules() if getattr(module, 'no_dropit', False)]
    chosen = chosen_modules(model, modules, exclude, _SETTING)
    chosen -= {part for module in opted_out for part in module.modules()}
    add_rule(model, rule, chosen)
    return rule


class DropIT(Handle):
    """Which inputs are dropped; made by :func:`drop_activations`.

    Attributes:
        kept: Bytes before and after, in all forward passes so far, and by module and need.
    """

    setting = _SETTING
    by_view = False
    fidelity = 1  # below that of quantised values, which all that need values can use

    def __init__(self, model: nn.Module, sparsifiers: Mapping[str, Sparsifier]) -> None:
        super().__init__(model)
        self._sparsifiers = sparsifiers

    @property
    def gamma(self) -> float:
        """Share of elements to drop from now on; the largest, if it is given by names."""
        return max(sparsifier.gamma for sparsifier in self._sparsifiers.values())

    @gamma.setter
    def gamma(self, gamma: float) -> None:
        for sparsifier in self._sparsifiers.values():
            sparsifier.gamma = gamma

    def codec(self, name: str, need: Need, tensor: Tensor, repeat: Repeat) -> Codec | None:
        """Drop what layers keep."""
        if need in (Need.LINEAR, Need.CONVOLUTION):
            for glob, sparsifier in self._sparsifiers.items():
                if fnmatchcase(name, glob):
                    return sparsifier if sparsifier.gamma else None
        return None
