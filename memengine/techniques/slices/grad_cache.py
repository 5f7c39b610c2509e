"""Gradient cache: a contrastive batch of any size in the memory of one slice.

The step itself is ``sliced_step.py``'s; the object :class:`GradCache` stands in
``grad_cache_call.py``.

Source: Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup (2021).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from memengine.technique import Settings, Technique, setting
from memengine.techniques.slices.sliced_step import Context, Losses, sliced_step
from memengine.techniques.slices.tower import Tower

__all__ = ['Tower', 'cached_step']


def cached_step(
    towers: Tower | Sequence[Tower],
    loss_fn: Callable[..., Losses],
    *,
    keep_graph: int = 0,
    context: Context = nullcontext,
    backward: Callable[[Tensor], Any] = Tensor.backward,
) -> Any:
    """Add the gradient of a loss in which samples meet, in the memory of one slice.

    :func:`~memengine.techniques.sliced_step` without an additive loss: every slice is embedded
    without a graph; the loss gives the gradient with respect to the embeddings; and each slice is
    embedded again, with a graph, to push its part of that gradient into the parameters.

    Args:
        towers: The encoders. One without trainable parameters is run once, without a graph.
        loss_fn: Called with each tower's embeddings of the whole batch; returns the loss, or
            losses by name (those with ``loss`` in their name are summed). Its own parameters (a
            learnable temperature, a head) get their gradient in this one call.
        keep_graph, context, backward: As of ``sliced_step``.

    Returns:
        What ``loss_fn`` returned, without graph.

    Errors, cost, precision, randomness, BatchNorm, DDP, hooks: as ``sliced_step``. Exactly (trained
    slices - ``keep_graph``) extra forwards.

    Example:
        >>> tower = Tower(model, split_batch(torch.cat([view1, view2]), 16))
        >>> loss = cached_step(tower, lambda z: NTXentLoss()(*z.chunk(2)))
        >>> optimizer.step()
    """
    return sliced_step(
        towers, loss_fn, keep_graph=keep_graph, context=context, backward=backward
    ).coupled


@dataclass(frozen=True)
class GradCacheSettings(Settings):
    """Settings of the gradient cache, as ``optim_wrapper`` takes them."""

    chunk_size: float | Mapping[str, float] | Literal['auto'] = setting(
        help='most samples in a slice, or a dict of it by tower', unit='samples', low=1
    )
    keep_graph: int | Literal['auto'] = setting(
        0, help='slices whose graph is kept and not computed again', unit='slices', low=0
    )
    forward_chunk_size: int | None = setting(
        None, help='most samples in a forward of the pass without graph', unit='samples', low=1
    )


TECHNIQUE = Technique(
    key='grad_cache',
    title='gradient cache',
    settings=GradCacheSettings,
    switch='optim_wrapper.type=GradCacheOptimWrapper optim_wrapper.chunk_size=16',
    call='memengine.GradCache',
    loss='coupled',
    use_when='samples meet in the loss or in a part of it (SimCLR, SupCon, SelfCon, CLIP, SigLIP; '
    'DINO with KoLeo) and a batch does not fit',
    saves='activations: all but those of one slice',
    price='one more forward of each slice in which samples meet, but of the `keep_graph` last',
    page='grad_cache.md',
    example=GradCacheSettings(chunk_size=3),
)
