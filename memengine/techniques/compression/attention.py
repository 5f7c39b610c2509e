"""Fused attention from codes: backward's probabilities are those of the scores that it computes.

It saves no probabilities: backward takes exp(score - log_sum) of queries, keys and the logarithm
of each row's sum. Where queries and keys come back from a code, and that sum as it was, these add
up to anything: scores of 100 come back from 4 bits with errors of 20, and exp(20) is a factor of
5e8 in the gradient. So sum and output are computed again, of what the codes give back: the
gradient is that of attention to these, at the cost of one forward of it. In 8 bits, whose errors
are 17 times smaller, they are as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from memengine._torch_private.attention import FUSED_ATTENTION
from memengine._torch_private.autograd import saved_by
from memengine.techniques.codecs.quantized import Quantizer
from memengine.techniques.compression.backward_needs import operation_name
from memengine.techniques.compression.recomputation.recomputation import (
    FindSource,
    Recomputation,
    Source,
)
from memengine.techniques.compression.replay import CodedAgain, HeldWhole
from memengine.techniques.compression.saved.saved_tensor import SavedTensor

_NEAR_ENOUGH = 8  # bits


def attend_to_codes(node: Any, find_source: FindSource) -> None:
    """Have what attention saves of its results follow queries, keys and values in few bits.

    With dropout the output is kept: its mask is not drawn again.

    Args:
        node: Of autograd's graph; of another operation, nothing is done.
        find_source: Knows what is held of it. Only that is kept, no node.
    """
    attention = FUSED_ATTENTION.get(operation_name(node))
    if attention is None:
        return
    inputs = [find_source(node, field) for field in ('query', 'key', 'value')]
    if attention.mask is not None and saved_by(node, attention.mask) is not None:
        inputs.append(find_source(node, attention.mask))
    sources = [source for source in inputs if source is not None]
    if len(sources) < len(inputs):
        return  # held by somebody else
    settings = {name: saved_by(node, name) for name in ('is_causal', 'scale')}
    fields = ('output', attention.log_sum)
    wanted = (1,) if saved_by(node, 'dropout_p') else (0, 1)
    again = _RecomputedAttention(partial(attention.attend, **settings), wanted)
    for index in wanted:
        held = find_source(node, fields[index])
        if isinstance(held, SavedTensor | HeldWhole | CodedAgain):
            compute = partial(again.result, index)
            held.follows = Recomputation(operation_name(node), compute, sources)


def is_coarse(saved: SavedTensor | CodedAgain) -> bool:
    """Whether it is to be coded in so few bits that what was computed from it differs."""
    return isinstance(saved.codec, Quantizer) and saved.codec.bits < _NEAR_ENOUGH


class _RecomputedAttention:
    """Attention run again. Backward asks for each wanted result, so the other waits for that."""

    def __init__(self, attend: Callable[..., tuple[Tensor, ...]], wanted: Sequence[int]) -> None:
        self._attend, self._wanted = attend, wanted
        self._waiting: dict[int, Tensor] = {}

    def result(self, index: int, sources: Sequence[Source]) -> Tensor:
        if index not in self._waiting:
            results = self._attend(*(source.decode() for source in sources))
            self._waiting = {each: results[each] for each in self._wanted}
        return self._waiting.pop(index)
