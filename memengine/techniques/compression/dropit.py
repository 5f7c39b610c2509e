"""DropIT: a layer keeps only the largest elements of its input for the gradient of its weight.

gamma: the share of elements that is dropped.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memengine.technique import Report, Settings, StepInfo, Technique, setting
from memengine.techniques.codecs.codec import Codec
from memengine.techniques.codecs.quantized import Quantizer
from memengine.techniques.codecs.sparse import Cast, Sparsifier
from memengine.techniques.compression.backward_needs import Need
from memengine.techniques.compression.rule_handle import RuleHandle, add_rule, remove_rule, rules_of
from memengine.techniques.compression.rules import (
    COMPILE_CONFLICTS,
    FindRecomputation,
    chosen_modules,
)
from memengine.techniques.modules.blocks import Selector
from memengine.techniques.modules.wrapped_forward import THE_MODEL

_SETTING = 'dropit'
_Schedule = Sequence[tuple[int, float]]


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


class DropIT(RuleHandle):
    """Which inputs are dropped; made by :func:`drop_activations`.

    Attributes:
        schedule: Pairs of an iteration and the gamma from there on, linear in between.
    """

    setting = _SETTING
    codes_each_view = False
    fidelity = 1  # below that of quantised values, which all that need values can use

    def __init__(self, model: nn.Module, sparsifiers: Mapping[str, Sparsifier]) -> None:
        super().__init__(model)
        self._sparsifiers = sparsifiers
        self.schedule: _Schedule = ()

    @property
    def gamma(self) -> float:
        """Share of elements to drop from now on; the largest, if it is given by names."""
        return max(sparsifier.gamma for sparsifier in self._sparsifiers.values())

    @gamma.setter
    def gamma(self, gamma: float) -> None:
        for sparsifier in self._sparsifiers.values():
            sparsifier.gamma = gamma

    def before_step(self, step: StepInfo) -> None:
        """Follow the schedule."""
        if self.schedule:
            self.gamma = _gamma_at(self.schedule, step.iteration)

    def report(self) -> Report | None:
        """What has been dropped; nothing to say while gamma is 0."""
        return super().report() if self.gamma else None

    @property
    def state(self) -> Hashable:
        """Where anything is dropped."""
        return tuple(sparsifier.gamma > 0 for sparsifier in self._sparsifiers.values())

    def fidelity_of(self, codec: Codec) -> float:
        """The share that is kept."""
        return 1 - codec.gamma if isinstance(codec, Sparsifier) else self.fidelity

    def codec(self, name: str, need: Need, tensor: Tensor, find: FindRecomputation) -> Codec | None:
        """Drop what layers keep."""
        if need in (Need.LINEAR, Need.CONVOLUTION):
            for glob, sparsifier in self._sparsifiers.items():
                if fnmatchcase(name, glob):
                    return sparsifier if sparsifier.gamma else None
        return None


def _gamma_at(schedule: _Schedule, iteration: int) -> float:
    before = [entry for entry in schedule if entry[0] <= iteration]
    after = [entry for entry in schedule if entry[0] > iteration]
    if not before or not after:
        return (before[-1] if before else after[0])[1]
    (start, first), (end, last) = before[-1], after[0]
    return first + (last - first) * (iteration - start) / (end - start)


@dataclass(frozen=True)
class DropITSettings(Settings):
    """Settings of :func:`drop_activations`, with a schedule."""

    strategy: Literal['mink', 'block_mink', 'random'] = setting(
        'mink', help='which elements go: the smallest of a tensor, of each block, or any'
    )
    gamma: float | Mapping[str, float] = setting(
        0.9, help='share of elements to drop, or a dict of it by globs of names', low=0, below=1
    )
    modules: Selector | Sequence[Selector] | None = setting(
        None, help='where, with all that is in them: names, globs, classes or blocks; None: all'
    )
    exclude: Selector | Sequence[Selector] = setting((), help='where not')
    schedule: _Schedule | None = setting(
        None, help='in place of gamma: pairs of an iteration and the gamma there, linear in between'
    )
    block_size: int | Literal['row'] | None = setting(
        None, help="of strategy='block_mink': elements of a block, by default 256", low=1
    )
    value_bits: Literal[32, 16, 8, 4, 2] = setting(
        32, help='what is kept, as it is, in bfloat16, or quantised', unit='bits'
    )
    strict: bool = setting(True, help='whether nothing to drop is an error')

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule is None:
            return
        iterations = [entry[0] for entry in self.schedule]
        if not iterations or sorted(set(iterations)) != iterations:
            raise ValueError(
                'schedule is pairs of an iteration and a gamma, in order, such as '
                f'[(0, 0.5), (1000, 0.9)], got {self.schedule!r}'
            )
        for _, gamma in self.schedule:
            if not 0 <= gamma < 1:
                raise ValueError(f'schedule: gamma is from 0 to below 1, got {gamma!r}')


def _apply(model: nn.Module, settings: DropITSettings) -> DropIT:
    handle = drop_activations(
        model,
        settings.strategy,
        settings.schedule[0][1] if settings.schedule else settings.gamma,
        modules=settings.modules,
        exclude=settings.exclude,
        block_size=settings.block_size,
        values=_codec_of(settings.value_bits),
    )
    handle.schedule = settings.schedule or ()
    return handle


def _codec_of(value_bits: int) -> Codec | None:
    if value_bits == 16:
        return Cast(torch.bfloat16)
    return None if value_bits == 32 else Quantizer(value_bits)


TECHNIQUE = Technique(
    key=_SETTING,
    title='dropped activations (DropIT)',
    settings=DropITSettings,
    apply=_apply,
    call='memengine.to_dropit',
    shorthand='gamma',
    after=('recomputed_activations',),  # what costs nothing to give up goes first
    conflicts=COMPILE_CONFLICTS,
    exactness='lossy',
    use_when='inputs of linear layers and convolutions are what does not fit',
    saves="seven eighths of layers' inputs, at gamma 0.9; what ReLU and dropout keep, to bits",
    price='selecting what is kept; the forward pass is the plain one, the error is stated',
    page='compressed_activations.md',
    example=DropITSettings(strategy='block_mink', block_size='row', gamma=0.5),
)
