"""Quantised activations: what autograd saves is kept in 8 bits or fewer, by groups.

Where the bits of a given mean are best spent is measured: :meth:`QuantizedActivations.allot`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memengine.technique import Settings, StepInfo, Technique, setting
from memengine.techniques.codecs.codec import Codec
from memengine.techniques.codecs.quantized import Quantizer
from memengine.techniques.codecs.running_range import RunningRangeQuantizer
from memengine.techniques.compression.backward_needs import Need
from memengine.techniques.compression.bit_allocation import allot_bits
from memengine.techniques.compression.rule_handle import RuleHandle, add_rule
from memengine.techniques.compression.rules import (
    COMPILE_CONFLICTS,
    FindRecomputation,
    KeptBytes,
    chosen_modules,
)
from memengine.techniques.modules.blocks import Selector
from memengine.techniques.modules.forward_state import RandomState, SmallBuffers
from memengine.techniques.modules.running_statistics import frozen_statistics
from memengine.techniques.modules.wrapped_forward import THE_MODEL

_SETTING = 'quantized_activations'
_WIDTHS = (1, 2, 4, 8)
_UNCOMPRESSED = 32
_BEYOND_ANY = 1e60  # squared distance of a gradient that two bits made infinite
_PROBE_BITS = 2  # bits at which sensitivity is measured: where errors are well above rounding

Bits = int | Mapping[str, int]
_Width = Literal[32, 8, 4, 2, 1]
_LEVELS: dict[str, tuple[Bits, float | None]] = {  # GACT's names: bits, and their mean if allotted
    'L1': (4, None),
    'L1.1': (8, None),
    'L1.2': (2, None),
    'L2': (8, 4.0),
    'L2.1': (8, 3.0),
    'L2.2': (8, 2.0),
}
_NeedAt = tuple[str, str]  # a module's name, and what is needed there
_Kind = tuple[str, str, tuple[int, ...]]  # the same, and a sample's shape


def quantize_activations(
    model: nn.Module,
    bits: Bits = 8,
    *,
    modules: Selector | Sequence[Selector] | None = None,
    exclude: Selector | Sequence[Selector] = (),
    group_size: int = 256,
    ranges: Literal['group', 'running'] = 'group',
    min_numel: int = 1024,
) -> QuantizedActivations:
    """Keep what a model saves for backward in a few bits. Lossy, and unbiased in what is kept.

    Coded are the inputs of layers, norms and activations, attention's tensors, probabilities and
    factors of products, in any model, however it is written. What is needed for one fact only is
    kept exactly, in less: where ReLU is positive and dropout's masks in one bit, max-pool's
    indices in the fewest bytes that hold them, pooled inputs as a shape. Statistics, and what the
    table of operations does not know, stay as they are. Below 8 bits fused attention is run once
    more in backward, on what the codes give back: its gradient is that of attention to these.
    The forward pass is not touched.

    Also a context manager: ``with quantize_activations(model, bits=4): ...``.

    Args:
        model: Changed in place; names, parameters and state dict stay what they are.
        bits: 8, 4, 2 or 1 for each element, 32 for as it is. A dict gives them by what is needed
            (``linear``, ``convolution``, ``activation``, ``norm``, ``softmax``, ``attention``,
            ``product``) or by globs of modules' names; the first that matches counts, and
            what none matches stays as it is.
        modules: Where, with all that is in them: names, globs, classes, or ``'blocks'``; None for
            everywhere.
        exclude: Where not.
        group_size: Elements that share a range, a multiple of 8; of a norm's input less, down to a
            half, where so many are a part of a row, or by channel (:class:`Quantizer`).
        ranges: ``'group'``: each group's own extremes, with stochastic rounding. ``'running'``: as
            Mesa does, 8 bits in running ranges by head or channel, which clip and so bias;
            queries, keys and values share theirs.
        min_numel: Smaller tensors stay as they are.

    Returns:
        The handle: ``bits_of``, ``allot()``, ``kept`` says what was saved; ``undo()``.

    Raises:
        ValueError: For settings out of range, names that the model lacks, a model that is
            quantised already or that is compiled.

    Cost: ``bits / 8`` bytes for each element, and two extremes for each group; some nine passes
    over each saved tensor, half in the forward, half in backward, or two where kernels are compiled
    (:class:`Quantizer`). Random numbers come from a generator of their own, so dropout draws what
    it would have drawn. BatchNorm, autocast, DDP, FSDP, slices, the gradient cache and gradient
    scaling compose. Inside activation checkpointing nothing is coded, as nothing is kept there.

    Source: Liu et al., GACT: Activation Compressed Training for Generic Network Architectures,
    ICML 2022; Pan et al., Mesa: A Memory-saving Training Framework for Transformers, 2021.
    """
    by_name = dict(bits) if isinstance(bits, Mapping) else {'*': bits}
    names = [name or THE_MODEL for name, _ in model.named_modules()]
    kinds = {need.kind for need in Need if need.is_of_values}
    for key, width in by_name.items():
        if width not in (*_WIDTHS, _UNCOMPRESSED):
            raise ValueError(f'{_SETTING}: bits are 8, 4, 2 or 1, or 32 for none, got {width!r}')
        if key not in kinds and not any(fnmatchcase(name, key) for name in names):
            raise ValueError(
                f"{_SETTING}: bits names '{key}', which is no module's name or glob, and none of "
                f'{", ".join(sorted(kinds))}'
            )
    if ranges not in ('group', 'running'):
        raise ValueError(f"{_SETTING}: ranges is 'group' or 'running', got {ranges!r}")
    if ranges == 'running' and set(by_name.values()) - {8, _UNCOMPRESSED}:
        raise ValueError(f"{_SETTING}: ranges='running' works at 8 bits, got bits={bits!r}")
    rule = QuantizedActivations(model, by_name, group_size, ranges == 'running', min_numel)
    add_rule(model, rule, chosen_modules(model, modules, exclude, _SETTING))
    return rule


class QuantizedActivations(RuleHandle):
    """How many bits are kept where; made by :func:`quantize_activations`.

    Attributes:
        bits_of: Bits by module's name and need, as allotted; empty until :meth:`allot`.
        average_bits: The mean to allot before the first step; None for bits as stated.
        allot_every: Iterations after which it is allotted again; 0 for once.
    """

    setting = _SETTING
    fidelity = max(_WIDTHS)

    def __init__(
        self,
        model: nn.Module,
        bits: Mapping[str, int],
        group_size: int,
        has_running_ranges: bool,
        min_numel: int,
    ) -> None:
        super().__init__(model)
        self._bits, self._min_numel = bits, min_numel
        self._group_size = Quantizer(group_size=group_size).group_size  # which it may refuse
        self._stated: dict[_NeedAt, int] = {}
        self._running: dict[_Kind, RunningRangeQuantizer] = {}
        self.codes_each_view = has_running_ranges
        self.bits_of: dict[_NeedAt, int] = {}
        self.average_bits: float | None = None
        self.allot_every = 0
        self._trial_bits: Mapping[_NeedAt, int] | None = None  # bits while sensitivity is measured

    @property
    def state(self) -> Hashable:
        """Bits as allotted, or on trial."""
        trial = self._trial_bits
        return tuple(self.bits_of.items()), None if trial is None else tuple(trial.items())

    def fidelity_of(self, codec: Codec) -> float:
        """The bits of each element; by channel, as BatchNorm wants them, they serve all others."""
        return codec.bits + codec.by_channel / 2 if isinstance(codec, Quantizer) else self.fidelity

    def codec(self, name: str, need: Need, tensor: Tensor, find: FindRecomputation) -> Codec | None:
        """As many bits as this place has."""
        place = name, need.kind
        width = self._width_at(place)
        numel = tensor.untyped_storage().nbytes() // tensor.itemsize  # which a view would keep
        if width == _UNCOMPRESSED or numel < self._min_numel:
            return None
        if self.codes_each_view:
            if tensor.ndim == 0:  # which has no channels
                return None
            return self._ranges_of((*place, tuple(tensor.shape[1:])))
        size = self._group_size
        if need is Need.NORM and tensor.ndim > 0 and tensor.stride(-1) == 1:
            size = _within_rows(size, tensor.shape[-1])
        return Quantizer(width, size, by_channel=need is Need.BATCH_NORM)

    def _ranges_of(self, kind: _Kind) -> RunningRangeQuantizer:
        dim = 1 if len(kind[-1]) > 2 else -1  # heads or channels, which stand second or last
        return self._running.setdefault(kind, RunningRangeQuantizer(dim))

    def run_state(self) -> dict[str, Any]:
        """Bits as allotted, with the mean that was wanted, and running ranges."""
        ranges = {kind: each.bounds for kind, each in self._running.items()}
        state = {'bits': dict(self.bits_of), 'ranges': ranges}
        found: dict[str, Any] = {name: entries for name, entries in state.items() if entries}
        return {**found, 'average_bits': self.average_bits} if found else {}

    def load_run_state(self, state: dict[str, Any]) -> None:
        """Go on with these; bits of another mean are not what this run was set to."""
        if state['average_bits'] == self.average_bits:
            self.bits_of = dict(state.get('bits', {}))
        for kind, bounds in state.get('ranges', {}).items():
            self._ranges_of(kind).bounds = bounds

    def _width_at(self, place: _NeedAt) -> int:
        stated = self._stated.get(place)
        if stated is None:
            name, need = place
            matching = (b for key, b in self._bits.items() if key == need or fnmatchcase(name, key))
            stated = self._stated[place] = next(matching, _UNCOMPRESSED)
        if self._trial_bits is not None:
            return (
                _UNCOMPRESSED
                if stated == _UNCOMPRESSED
                else self._trial_bits.get(place, _UNCOMPRESSED)
            )
        return self.bits_of.get(place, stated)

    def before_step(self, step: StepInfo) -> None:
        """Allot bits by the step's batch, when it is time."""
        is_time = self.allot_every and step.iteration % self.allot_every == 0
        if self.average_bits is None or (self.bits_of and not is_time):
            return
        widths = list(self.allot(self.average_bits, step.loss).values())
        if not widths:
            step.log('Quantised activations: the gradient is not finite, so no bits are allotted')
            return
        counted = (f'{widths.count(width)} places {width} bits' for width in sorted(set(widths)))
        step.log(
            f'Quantised activations: {self.average_bits:g} bits on average: {", ".join(counted)}'
        )

    def allot(self, average_bits: float, loss: Callable[[], Tensor]) -> dict[_NeedAt, int]:
        """Spend a mean number of bits where it counts most, by measurement.

        The plain gradient is computed once, then once more for each place with that place alone
        in two bits; how far that moves the gradient is the place's sensitivity. Bits are then
        allotted to make the sum of all errors least.

        Args:
            average_bits: Mean over all coded elements, from 1 to 8.
            loss: Runs the model on a batch, in training mode, and gives the loss.

        Returns:
            Bits by module's name and need, in force from now on; those of before, where the plain
            gradient is not finite.

        Raises:
            ValueError: For a mean out of range, or when the loss saves nothing to be coded.

        Cost: a forward and a backward for each place, now and then. Random state and BatchNorm's
        statistics are as if nothing had run.
        """
        if not 1 <= average_bits <= 8:
            raise ValueError(f'{_SETTING}: average_bits is from 1 to 8, got {average_bits!r}')
        if self.codes_each_view:
            raise ValueError(f"{_SETTING}: ranges='running' works at 8 bits and has none to allot")
        kept, self.kept = self.kept, KeptBytes()
        state = RandomState.of(self.model)
        try:
            self._gradient(loss, state, None)
            sizes = {place: before for place, (before, _) in self.kept.places.items()}
            exact = self._gradient(loss, state, {})
            if not all(g is None or g.isfinite().all() for g in exact):
                return self.bits_of
            errors = []
            for place in sizes:
                lossy = self._gradient(loss, state, {place: _PROBE_BITS})
                errors.append(_squared_distance(lossy, exact))
        finally:
            self._trial_bits, self.kept = None, kept
        if not sizes:
            raise ValueError(f'{_SETTING}: the loss saves nothing that is to be coded')
        sensitivities = [error * (2**_PROBE_BITS - 1) ** 2 for error in errors]
        bits = allot_bits(sensitivities, list(sizes.values()), average_bits, choices=_WIDTHS)
        self.bits_of = dict(zip(sizes, bits, strict=True))
        return self.bits_of

    def _gradient(
        self, loss: Callable[[], Tensor], state: RandomState, widths: Mapping[_NeedAt, int] | None
    ) -> list[Tensor | None]:
        self._trial_bits = widths
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        buffers = SmallBuffers(self.model)
        with state.replay(), buffers.restored(), frozen_statistics(self.model):
            return list(torch.autograd.grad(loss(), parameters, allow_unused=True))


def _within_rows(group_size: int, row: int) -> int:
    """Elements of a group that spans no two rows, where that takes groups of half as many at least.

    A norm divides the error of each row by its spread: one of little spread, such as the class
    token of a new ViT, must not have its neighbours' range.
    """
    sizes = range(group_size, group_size // 2 - 1, -8)
    return next((size for size in sizes if row % size == 0), group_size)


def _squared_distance(some: list[Tensor | None], others: list[Tensor | None]) -> float:
    pairs = zip(some, others, strict=True)
    distance = sum(
        float((one - other).square().sum())
        for one, other in pairs
        if one is not None and other is not None
    )
    return distance if math.isfinite(distance) else _BEYOND_ANY


@dataclass(frozen=True)
class QuantizedActivationsSettings(Settings):
    """Settings of :func:`quantize_activations`, and of when bits are allotted."""

    bits: _Width | Mapping[str, _Width] = setting(
        8, help='for each element, 32 for as it is; or a dict of it by need or name', unit='bits'
    )
    level: str | None = setting(
        None, help=f"GACT's name for bits and average_bits: one of {', '.join(_LEVELS)}"
    )
    average_bits: float | None = setting(
        None, help='mean to allot by measured sensitivity', unit='bits', low=1, high=8
    )
    allot_every: int = setting(0, help='when to measure again; 0: never', unit='iterations', low=0)
    modules: Selector | Sequence[Selector] | None = setting(
        None, help='where, with all that is in them: names, globs, classes or blocks; None: all'
    )
    exclude: Selector | Sequence[Selector] = setting((), help='where not')
    group_size: int = setting(256, help='elements that share a range, a multiple of 8', low=8)
    ranges: Literal['group', 'running'] = setting(
        'group', help="each group's own extremes, or running ones of 8 bits, as Mesa's"
    )
    min_numel: int = setting(1024, help='smaller tensors stay as they are', unit='elements', low=0)
    strict: bool = setting(True, help='whether nothing to quantise is an error')

    @property
    def bits_and_mean(self) -> tuple[Bits, float | None]:
        """Bits as stated, and the mean to allot, if any."""
        return (self.bits, self.average_bits) if self.level is None else _LEVELS[self.level]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level is not None and self.level not in _LEVELS:
            raise ValueError(f'level is one of {", ".join(_LEVELS)}, got {self.level!r}')
        mean = self.bits_and_mean[1]
        if self.allot_every and self.level is None and mean is None:
            raise ValueError(
                f'allot_every={self.allot_every} has nothing to allot; set average_bits, or a '
                'level that has a mean'
            )
        if mean is not None and self.ranges == 'running':
            raise ValueError(
                f"ranges='running' works at 8 bits, and average_bits={mean:g} wants others; leave "
                'one out'
            )


def _apply(model: nn.Module, settings: QuantizedActivationsSettings) -> QuantizedActivations:
    bits, mean = settings.bits_and_mean
    handle = quantize_activations(
        model,
        bits,
        modules=settings.modules,
        exclude=settings.exclude,
        group_size=settings.group_size,
        ranges=settings.ranges,
        min_numel=settings.min_numel,
    )
    handle.average_bits, handle.allot_every = mean, settings.allot_every
    return handle


TECHNIQUE = Technique(
    key=_SETTING,
    title='quantised activations',
    settings=QuantizedActivationsSettings,
    apply=_apply,
    call='memengine.quantize_activations',
    shorthand='bits',
    after=('dropit',),  # which then has the inputs of layers
    conflicts=COMPILE_CONFLICTS,
    exactness='lossy',
    use_when='everything that is kept is too much',
    saves='three quarters (8 bits) to seven eighths (4 bits) of all activations',
    price='rounding, without bias, and unrounding; the forward pass is the plain one',
    page='compressed_activations.md',
    example=QuantizedActivationsSettings(bits=8, min_numel=1),
)
