"""How saved values are kept: what a rule is, and the account of what it saves."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from memengine.techniques.codecs.codec import Codec
from memengine.techniques.compression.backward_needs import Need
from memengine.techniques.compression.recomputation.recomputation import Recomputation
from memengine.techniques.modules.blocks import Selector, select_modules

EXACT = 100  # a fidelity
_WHY_NOT_COMPILED = 'what compiled code saves cannot be told apart; set one of them'
COMPILE_CONFLICTS = dict.fromkeys(('compile', 'compile_blocks'), _WHY_NOT_COMPILED)  # of all rules
FindRecomputation = Callable[[], Recomputation | None]


class KeptBytes:
    """How many bytes were saved before, and after: in all, and where.

    Attributes:
        before: Bytes of the tensors that were coded, each as often as it was saved.
        after: Bytes of their codes, each once.
        places: Both, by the name of the module and what the tensor was needed for.
    """

    def __init__(self) -> None:
        self.before = self.after = 0
        self.places: dict[tuple[str, str], tuple[int, int]] = {}

    def add(self, place: str, need: str, before: int, after: int) -> None:
        """Note a tensor."""
        self.before, self.after = self.before + before, self.after + after
        so_far = self.places.get((place, need), (0, 0))
        self.places[place, need] = so_far[0] + before, so_far[1] + after


class RecomputedPlace(NamedTuple):
    """Where in a model a result is computed again, and as what it was saved there.

    Attributes:
        number: Of the tensor, among those that its module saves in a forward.
        name: The module's.
        need: What a derivative needs of it.
        operation: Whose result it is.
        stride: The tensor's, as are the rest.
        dtype: As well.
        version: As well.
    """

    number: int
    name: str
    need: Need
    operation: str
    stride: tuple[int, ...]
    dtype: torch.dtype
    version: int


class Rule(Protocol):
    """Chooses how values are kept.

    Attributes:
        setting: What errors call it.
        fidelity: The most that codes of it have; EXACT for what gives back what there was.
        codes_each_view: Whether views of one storage have codes of their own: their shape matters.
        only_recomputes: Whether it codes nothing but what can be computed again.
        kept: What it has saved so far.
        is_paused: Whether the model runs as if it did not hold.
        origin: What its copies, and no other rules, have as well.
    """

    setting: str
    fidelity: int
    codes_each_view: bool
    only_recomputes: bool
    kept: KeptBytes
    is_paused: bool
    origin: Hashable

    @property
    def state(self) -> Hashable:
        """What its choices hang on besides the tensor; while it is equal, they are the same."""

    def begin_forward(self) -> None:
        """A forward of the model, or of a part of it that is called by itself, begins."""

    def codec(self, name: str, need: Need, tensor: Tensor, find: FindRecomputation) -> Codec | None:
        """How to keep a tensor that the module of that name needs; None for as it is.

        ``find()`` finds out how to compute the tensor's storage again from what is kept anyway.
        """

    def fidelity_of(self, codec: Codec) -> float:
        """How near a code of it is: of several for one memory, that of the highest is kept."""

    def still_serves(
        self, place: RecomputedPlace, tensor: Tensor, recomputation: Recomputation
    ) -> bool:
        """Whether what served there before gives a tensor now, as far as can be told.

        Of a rule that only recomputes; the recomputation is exact.
        """


def chosen_modules(
    model: nn.Module,
    modules: Selector | Sequence[Selector] | None,
    exclude: Selector | Sequence[Selector],
    setting: str,
) -> set[nn.Module]:
    """The modules for which a rule holds: the selected ones with all that is in them.

    Args:
        model: Where to look.
        modules: As :func:`select_modules` takes them; None for all.
        exclude: As well; those that are left out.
        setting: What to call the setting in errors.

    Raises:
        ValueError: When a name matches nothing.
    """

    def within(selectors: Selector | Sequence[Selector]) -> set[nn.Module]:
        selected = select_modules(model, selectors, setting=setting)
        return {part for module in selected.values() for part in module.modules()}

    chosen = set(model.modules()) if modules is None else within(modules)
    return chosen - within(exclude) if exclude else chosen
