"""What a forward has noted, for later ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memengine.techniques.codecs.codec import Codec
from memengine.techniques.compression.backward_needs import Need
from memengine.techniques.compression.recomputation.recomputation import Recomputation
from memengine.techniques.compression.rules import RecomputedPlace, Rule
from memengine.techniques.compression.saved.coded_part import Layout
from memengine.techniques.compression.saved.saved_tensor import SavedAs, SavedTensor
from memengine.techniques.modules.saved_tensors import KeptAsIs


class HeldWhole(KeptAsIs):
    """A saved tensor of which the plan says that it stays as it is.

    Attributes:
        follows: As of a :class:`SavedTensor`.
    """

    __slots__ = ('follows', 'module')

    def __init__(self, tensor: Tensor, module: nn.Module) -> None:
        KeptAsIs.__init__(self, tensor)  # super() takes longer
        self.module = module
        self.follows: Recomputation | None = None

    def tensor(self) -> Tensor:
        """The tensor, or what stands for it."""
        if self.follows is None or self.follows.is_exact:
            return KeptAsIs.tensor(self)
        return self.follows()

    decode = prefetch = tensor


class HowComputed(NamedTuple):
    """How a saved tensor was computed again.

    Attributes:
        made: The recomputation; its sources are not held.
        saved_at: For each source the place in the plan, None for what is to be had elsewhere.
        rule: By which.
        place: Where.
        nbytes: Of the storage.
        first: Place in the plan of the first tensor of its memory; None where that is the only one.
    """

    made: Recomputation
    saved_at: list[int | None]
    rule: Rule
    place: RecomputedPlace
    nbytes: int
    first: int | None


class HowCoded(NamedTuple):
    """How a saved tensor was coded.

    Attributes:
        saved_as: By which node, and as what.
        need: What that node's derivative needs of it.
        rules: Of the module that saves it.
        name: What the rule's model calls that.
        rule: By which; None for a fact.
        codec: That it would have had alone; None for a fact's, which depends on the content.
        codec_of_part: That has made the code, the nearest of all that it is for; None likewise.
        dtype: The tensor's.
        layout: Where it lies in its storage.
        nbytes: Of the storage.
        first: Place in the plan of the first tensor of its memory; None where that is the only one.
        together: How many tensors of its memory were coded at once.
        part: Place in the plan of the first tensor that is read from the same code.
        base: Where lies what that code stands for; None for the tensor alone.
    """

    saved_as: SavedAs
    need: Need
    rules: Sequence[tuple[Rule, str]]
    name: str
    rule: Rule | None
    codec: Codec | None
    codec_of_part: Codec | None
    dtype: torch.dtype
    layout: Layout
    nbytes: int
    first: int | None
    together: int
    part: int
    base: Layout | None


class Step(NamedTuple):
    """What the plan has for a saved tensor, and what has to be the same of it.

    Attributes:
        node: Its node's number, from the forward's first on, and so how many were made in between.
        shape: The tensor's.
        stride: As well.
        dtype: As well.
        rules: Of the module that saves it; each module has a list of its own.
        is_parameter: Whether it is one; of its shape nothing is asked then.
        how: How it was computed again, or coded; None where it stays.
    """

    node: int | None
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    rules: Sequence[Any]
    is_parameter: bool = False
    how: HowComputed | HowCoded | None = None


class Plan(NamedTuple):
    """What a forward has left.

    Attributes:
        steps: For each saved tensor, in the order of saving; None: to be looked at.
        has_copies: Whether copies were saved for operations that worked in place.
        states: Of all rules of modules that saved anything, also of modules within the model.
        owned: Storages that were the model's own, by key.
    """

    steps: Sequence[Step | None]
    has_copies: bool
    states: Sequence[tuple[Rule, Hashable]]
    owned: Mapping[int, weakref.ref[torch.UntypedStorage]]

    @property
    def holds(self) -> bool:
        """Whether rules choose as they did."""
        return all(rule.state == state for rule, state in self.states)


class Noted(NamedTuple):
    """What is noted of a saved tensor."""

    step: Step
    packed: Callable[[], Any]
    stays: bool
    version: int
    offset: int
    nbytes: int


def plan_of(
    noted: Sequence[Noted | None], has_copies: bool, owned: Mapping[int, torch.UntypedStorage]
) -> Plan:
    """What later forwards need not look up."""
    rules = {rule for one in noted if one is not None for rule, _ in one.step.rules}
    states = [(rule, rule.state) for rule in rules]
    storages = {key: weakref.ref(storage) for key, storage in owned.items()}
    return Plan(_Planning(noted).steps(), has_copies, states, storages)


class _Planning:
    """A forward that has ended, as it was noted."""

    def __init__(self, noted: Sequence[Noted | None]) -> None:
        self._noted = noted
        self._packed = [None if one is None else one.packed() for one in noted]
        self._places = {id(one): at for at, one in enumerate(self._packed) if one is not None}
        self._of_memory: dict[int, list[SavedTensor]] = {}
        for one in self._packed:
            if isinstance(one, SavedTensor):
                self._of_memory.setdefault(id(one.memory), []).append(one)

    def steps(self) -> Sequence[Step | None]:
        return [self._step(*both) for both in zip(self._noted, self._packed, strict=True)]

    def _step(self, noted: Noted | None, held: Any) -> Step | None:
        if noted is None or held is None:
            return noted.step if noted is not None and noted.stays else None
        if noted.stays:
            return noted.step
        of_memory = self._of_memory[id(held.memory)]
        if held.is_whole:
            # As another of its memory has to be, and it had not been coded before that was known.
            with_another = not held.coding and any(one.is_for_no_rule for one in of_memory)
            return noted.step if held.is_for_no_rule or with_another else None
        how: HowComputed | HowCoded | None = None
        if held.is_computed_again:
            how = self._how_computed(noted, held)
        elif held.memory.views == len(of_memory) and all(map(_is_coded_for_good, of_memory)):
            how = self._how_coded(noted, held)
        return None if how is None else noted.step._replace(how=how)

    def _how_computed(self, noted: Noted, saved: SavedTensor) -> HowComputed | None:
        """None where that starts from what nobody has noted."""
        made, rule, need = saved.recomputation, saved.rule, saved.need
        assert made is not None and rule is not None and need is not None
        saved_at: list[int | None] = []
        for source, place in zip(made.sources, made.derivation.places, strict=True):
            if isinstance(place, int) and id(source) not in self._places:
                return None
            saved_at.append(self._places[id(source)] if isinstance(place, int) else None)
        step = noted.step
        where = saved.number, saved.name, need, made.operation, step.stride, step.dtype
        others = [one for one in self._of_memory[id(saved.memory)] if one.is_computed_again]
        return HowComputed(
            made.again_from(()),
            saved_at,
            rule,
            RecomputedPlace(*where, noted.version),
            noted.nbytes,
            self._first_of(others),
        )

    def _how_coded(self, noted: Noted, saved: SavedTensor) -> HowCoded:
        part, need, saved_as = saved.part, saved.need, saved.saved_as
        assert part is not None and need is not None and saved_as is not None
        of_memory = self._of_memory[id(saved.memory)]
        of_part = [one for one in of_memory if one.part is part]
        step = noted.step
        layout = noted.offset, step.shape, step.stride
        return HowCoded(
            saved_as=saved_as,
            need=need,
            rules=step.rules,
            name=saved.name,
            rule=saved.rule,
            codec=None if saved.rule is None else saved.codec,
            codec_of_part=None if saved.rule is None else part.codec,
            dtype=step.dtype,
            layout=layout,
            nbytes=noted.nbytes,
            first=self._first_of(of_memory),
            together=sum(one.coding == saved.coding for one in of_memory),
            part=self._places[id(of_part[0])],
            base=None if len(of_part) == 1 and part.layout == layout else part.layout,
        )

    def _first_of(self, saved: Sequence[SavedTensor]) -> int | None:
        return self._places[id(saved[0])] if len(saved) > 1 else None


def _is_coded_for_good(saved: SavedTensor) -> bool:
    """Whether its code follows from its node, and is the first that was made for it."""
    return (
        saved.part is not None
        and saved.recomputation is None
        and saved.saved_as is not None
        and not saved.is_recomputable
        and (saved.need is not Need.PRODUCT or saved.rule is None or saved.has_gradient)
    )
