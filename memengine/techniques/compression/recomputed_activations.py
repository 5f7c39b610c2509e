"""Recomputed activations: what norms and activation functions give is computed again in backward.

A layer keeps its input for the gradient of its weight. Where that input is a GELU's or a norm's
result, what it was computed from is kept as well, by the GELU or the norm itself; so one of the two
is kept for nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memengine._torch_private.autograd import version_of
from memengine._torch_private.fake import is_fake
from memengine.technique import Settings, Technique, setting, with_settings
from memengine.techniques.codecs.codec import Codec
from memengine.techniques.compression.backward_needs import IN_PLACE_FORMS, Need
from memengine.techniques.compression.recomputation.recomputation import Recomputation
from memengine.techniques.compression.rule_handle import RuleHandle, add_rule
from memengine.techniques.compression.rules import (
    COMPILE_CONFLICTS,
    EXACT,
    FindRecomputation,
    RecomputedPlace,
    chosen_modules,
)
from memengine.techniques.modules.blocks import BLOCKS, Selector, first_of, select_modules
from memengine.techniques.modules.fetched_later import FetchedLater

_SETTING = 'recomputed_activations'


def recompute_activations(
    model: nn.Module,
    *,
    modules: Selector | Sequence[Selector] | None = None,
    exclude: Selector | Sequence[Selector] = (),
    first: int | None = None,
) -> RecomputedActivations:
    """Let a model compute the results of cheap operations again instead of keeping them. Exact.

    Cheap are GELU, SiLU and their kin, LayerNorm, RMSNorm, GroupNorm and BatchNorm (of modules),
    ReLU and dropout after one of them, and elementwise products. What is computed again is what
    they gave to linear layers, convolutions and each other; no product of matrices and no
    convolution is. What is needed for one fact only is kept in that: where ReLU is positive and
    dropout's masks in one bit, max-pool's indices in the fewest bytes that hold them, pooled inputs
    as a shape.

    Also a context manager: ``with recompute_activations(model): ...``.

    Args:
        model: Changed in place; names, parameters and state dict stay what they are.
        modules: Where, with all that is in them: names, globs, classes, or ``'blocks'``; None for
            everywhere.
        exclude: Where not.
        first: Only in so many of these modules, without ``modules`` in so many of the model's
            blocks, in their order: bytes fall and time rises by as much with each.

    Returns:
        The handle: ``kept`` says what was saved; ``undo()``.

    Raises:
        ValueError: For names that the model lacks, a model that recomputes already or that is
            compiled.
        RuntimeError: In a forward, or in ``undo()``, when a result that came out the same does not
            any more.

    Cost: one pass or two over each such result, for every layer that needs it, and some 20 us of
    Python for each tensor that is saved; of a pre-norm vision transformer's bytes three eighths are
    not kept. Gradients are those of the plain step, bit for bit: each result is computed again at
    once and compared the first, second, fourth, eighth ... time, and kept if it differs. The result
    of a norm whose ``forward`` is not torch's, timm's or torchvision's is compared every time. An
    accelerator is waited for the first time only: what later comparisons say is read in the next
    forward or ``undo()``, and such a norm's result is kept. What is changed through ``.data``, or
    between two operations under ``no_grad``, in some later steps only goes unnoticed in between. No
    random state is touched; BatchNorm counts once; autocast, DDP, FSDP, slices and the gradient
    cache compose. Beside quantised activations, what is computed again comes from their codes and
    is as near as those. Inside activation checkpointing nothing happens.

    Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022
    (its selective recomputation, of other operations); Rota Bulo et al., In-Place Activated
    BatchNorm, 2018.
    """
    if first is not None:
        where = BLOCKS if modules is None else modules
        selected = select_modules(model, where, setting=_SETTING)
        modules = list(first_of(selected, first, _SETTING))
    rule = RecomputedActivations(model)
    add_rule(model, rule, chosen_modules(model, modules, exclude, _SETTING))
    return rule


class RecomputedActivations(RuleHandle):
    """What is computed again; made by :func:`recompute_activations`."""

    setting = _SETTING
    codes_each_view = False
    only_recomputes = True
    fidelity = EXACT

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._is_same: dict[RecomputedPlace, bool] = {}
        self._uses: Counter[RecomputedPlace] = Counter()
        self._comparisons: list[tuple[RecomputedPlace, FetchedLater]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), '_comparisons': []}

    def begin_forward(self) -> None:
        """What was compared on an accelerator is known by now.

        Raises:
            RuntimeError: When something that was computed again differed in an earlier forward.
        """
        self._read_comparisons()

    def undo(self) -> None:
        """Leave the model as it was, and read what was compared in its last forward.

        Raises:
            RuntimeError: When that differed; the model is as it was then, too.
        """
        super().undo()
        self._read_comparisons()

    def _read_comparisons(self) -> None:
        comparisons, self._comparisons = self._comparisons, []
        for place, found in comparisons:
            self._learn(place, *found.tolist())

    def codec(self, name: str, need: Need, tensor: Tensor, find: FindRecomputation) -> Codec | None:
        """Keep nothing of what can be computed again."""
        recomputation = find()
        if recomputation is None or not self._serves(tensor, recomputation, name, need):
            return None
        return recomputation.code

    def _serves(self, tensor: Tensor, recomputation: Recomputation, name: str, need: Need) -> bool:
        """Whether it gives the tensor, as far as can be told."""
        if not recomputation.is_exact:  # what comes from codes cannot be compared
            once = recomputation.operation in (*IN_PLACE_FORMS, 'Relu')
            version = version_of(tensor)
            is_untouched = version <= once or version == recomputation.version
            return recomputation.derivation.is_certain and is_untouched
        layout = tensor.stride(), tensor.dtype, version_of(tensor)
        made = recomputation.number, name, need, recomputation.operation
        return self.still_serves(RecomputedPlace(*made, *layout), tensor, recomputation)

    def still_serves(
        self, place: RecomputedPlace, tensor: Tensor, recomputation: Recomputation
    ) -> bool:
        """Whether it gives the tensor: compared now, or before.

        Raises:
            RuntimeError: When it did before, and does not any more.
        """
        if not recomputation.derivation.is_certain:
            return tensor.is_cpu and _is_same(tensor, recomputation)
        uses = self._uses[place] = self._uses.get(place, 0) + 1
        if place not in self._is_same:  # also if a thread has counted, and is comparing still
            self._is_same[place] = _is_same(tensor, recomputation)
        elif uses & (uses - 1) == 0 and self._is_same[place]:  # the second, fourth, eighth ... time
            if is_fake(tensor):
                pass  # most of the steps that a prediction stands for compare nothing
            elif tensor.is_cpu:
                is_same = _is_same(tensor, recomputation)
                self._learn(place, is_same, is_same or _is_near(tensor, recomputation))
            else:
                self._comparisons.append((place, _compared_there(tensor, recomputation)))
        return self._is_same[place]

    def _learn(self, place: RecomputedPlace, is_same: bool, is_near: bool) -> None:
        self._is_same[place] = is_same
        if not is_near:
            raise RuntimeError(
                f'{_SETTING}: what {place.name} is given was the result of {place.operation} in '
                'the first steps and is another by now: something has changed it behind '
                f"autograd's back, or used other weights; set exclude=['{place.name}']"
            )


@torch.no_grad()
def _is_same(tensor: Tensor, recomputation: Recomputation) -> bool:
    """Whether what is computed again is there already, bit for bit (any NaN is like another)."""
    again = recomputation.code(tensor).decode()
    return torch.equal(again, tensor) or torch.allclose(again, tensor, 0, 0, equal_nan=True)


@torch.no_grad()
def _is_near(tensor: Tensor, recomputation: Recomputation) -> bool:
    """Whether it is but rounding, of an operation that adds up in any order."""
    difference = recomputation.code(tensor).decode() - tensor
    return not difference.norm() > 1e-3 * tensor.norm()


@torch.no_grad()
def _compared_there(tensor: Tensor, recomputation: Recomputation) -> FetchedLater:
    """The answers of :func:`_is_same` and :func:`_is_near`; the device is not waited for."""
    again = recomputation.code(tensor).decode()
    is_same = again.eq(tensor).logical_or_(again.isnan().logical_and_(tensor.isnan())).all()
    is_far = (again - tensor).norm() > 1e-3 * tensor.norm()
    return FetchedLater(torch.stack([is_same, is_far.logical_not()]))


@dataclass(frozen=True)
class RecomputedActivationsSettings(Settings):
    """Settings of :func:`recompute_activations`."""

    modules: Selector | Sequence[Selector] | None = setting(
        None, help='where, with all that is in them: names, globs, classes or blocks; None: all'
    )
    exclude: Selector | Sequence[Selector] = setting((), help='where not')
    first: int | None = setting(
        None, help='only in so many of these, or of the blocks, in their order', low=1
    )
    strict: bool = setting(True, help='whether nothing to compute again is an error')


TECHNIQUE = Technique(
    key=_SETTING,
    title='recomputed activations',
    settings=RecomputedActivationsSettings,
    apply=with_settings(recompute_activations),
    call='memengine.recompute_activations',
    shorthand='modules',
    after=('efficient_conv_bn_eval',),  # which keeps less of what norms read
    conflicts=COMPILE_CONFLICTS,
    use_when='always when memory is short; first',
    saves='what norms, activation functions, gates and dropout gave, bit for bit: three eighths of '
    "a vision transformer's bytes, a third of ResNet-50's, two thirds of EfficientNet's",
    price='a pass over each, no product',
    # Beside checkpointed blocks of a small model there is nothing left to do.
    example=RecomputedActivationsSettings(strict=False),
)
