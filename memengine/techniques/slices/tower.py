"""One encoder in a step in slices, and its part of the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from memengine.techniques.slices.slicing import join_slices


def call_module(module: nn.Module, inputs: Any) -> Any:
    """Call a module as its inputs suggest.

    A mapping becomes keyword arguments, a list or tuple positional ones, a tuple of a list and a
    mapping both; anything else is the one argument.
    """
    if isinstance(inputs, Mapping):
        return module(**inputs)
    if isinstance(inputs, (list, tuple)):
        if len(inputs) == 2 and isinstance(inputs[0], list) and isinstance(inputs[1], Mapping):
            return module(*inputs[0], **inputs[1])
        return module(*inputs)
    return module(inputs)


@dataclass(frozen=True)
class Tower:
    """One encoder and its part of the batch, in slices.

    Args:
        module: Holds the parameters and buffers of the encoder (wrapped by DDP or not). Several
            towers may share one; an ``nn.ModuleList`` stands for its members.
        slices: Inputs, slice by slice; see :func:`~memengine.techniques.split_batch`.
        encode: ``encode(module, slice)`` returns the slice's embeddings. It must go through
            ``module``'s own ``forward`` where that is wrapped.
        slices_per_forward: How many consecutive slices the graph-free pass embeds at once. Refused
            where the encoder draws random numbers or uses batch statistics, as the pass could then
            not be repeated in smaller slices.
        part: The part of ``module`` that these slices go through, where that holds several
            encoders: it says whether the tower is trained. None for all of it.
        frozen: A part without trainable parameters that every forward calls once, such as a
            backbone below a head that is trained. It is run once; its outputs are held.
        join: Puts consecutive slices into one, for ``slices_per_forward``.
        coupled: Whether the coupled loss reads a slice's embeddings; None for all slices.
        coupled_part: ``coupled_part(embeddings, slice)`` returns what the coupled loss reads of
            them: a tensor, or nested dicts, lists and tuples of tensors, with the samples in
            dimension 0. None for all of it.
        within: The module around ``module`` that reduces its gradients across ranks (DDP), where a
            trainer has wrapped what holds the encoder. None for ``module`` itself.
    """

    module: nn.Module
    slices: Sequence[Any]
    encode: Callable[[nn.Module, Any], Any] = call_module
    slices_per_forward: int = 1
    part: nn.Module | None = None
    frozen: nn.Module | None = None
    join: Callable[[Sequence[Any]], Any] = join_slices
    coupled: Callable[[Any], bool] | None = None
    coupled_part: Callable[[Any, Any], Any] | None = None
    within: nn.Module | None = None
