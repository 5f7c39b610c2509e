"""How saved values are kept: what a rule is, and the account of what it saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from memengine.techniques.codecs.codec import Codec
from memengine.techniques.compression.backward_needs import Need
from memengine.techniques.compression.recomputable_ops import Repetition

__all__ = ['EXACT', 'WHEN_COMPILED', 'Repeat', 'Rule', 'Tally']

EXACT = 100  # a fidelity
_COMPILED = 'what compiled code saves cannot be told apart; set one of them'
WHEN_COMPILED = {'compile': _COMPILED, 'compile_blocks': _COMPILED}  # conflicts of all rules
Repeat = Callable[[], Repetition | None]


class Tally:
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


class Rule(Protocol):
    """Chooses how values are kept.

    Attributes:
        setting: What errors call it.
        fidelity: Of several rules' codes of one tensor, that of the highest is kept; EXACT for one
            that gives back what there was, which comes before all others.
        by_view: Whether each view of a storage has a code of its own, because its shape matters.
        kept: What it has saved so far.
    """

    setting: str
    fidelity: int
    by_view: bool
    kept: Tally

    def codec(self, name: str, need: Need, tensor: Tensor, repeat: Repeat) -> Codec | None:
        """How to keep a tensor that the module of that name needs; None for as it is.

        ``repeat()`` finds out how to compute the tensor's storage again from what is kept anyway.
        """
