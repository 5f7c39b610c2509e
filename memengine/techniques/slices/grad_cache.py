"""Gradient cache: a contrastive batch of any size in the memory of one slice.

The loss needs the embeddings of the whole batch, but only the embeddings. So every slice is
embedded without a graph; the loss gives the gradient with respect to the embeddings; and each
slice is embedded again, with a graph, to push its part of that gradient into the parameters. The
result is the gradient of the plain step. Dropout is replayed, BatchNorm counts once.

Source: Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup (2021).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from memengine._torch_private.autograd import base_of
from memengine._torch_private.ops import pytree
from memengine.precision import autocast_off
from memengine.techniques.modules.random_state import RandomState, accelerators_of
from memengine.techniques.modules.running_statistics import (
    frozen_statistics,
    layers_with_batch_statistics,
)
from memengine.techniques.slices.frozen_part import FrozenPart
from memengine.techniques.slices.slicing import (
    Context,
    Losses,
    SyncOnce,
    detached,
    join_slices,
    tensors_in,
    total_loss,
)

__all__ = ['Tower', 'cached_step', 'call_module']


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
            towers may share one.
        slices: Inputs, slice by slice; see :func:`~memengine.techniques.split_batch`.
        encode: ``encode(module, slice)`` returns the slice's embeddings: a tensor, or nested
            dicts, lists and tuples of tensors, with the samples in dimension 0. It must go
            through ``module``'s own ``forward`` where that is wrapped.
        slices_per_forward: How many consecutive slices the graph-free pass embeds at once. Refused
            where the encoder draws random numbers or uses batch statistics, as the pass could then
            not be repeated in smaller slices.
        part: The part of ``module`` that these slices go through, where that holds several
            encoders: it says whether the tower is trained. None for all of it.
        frozen: A part without trainable parameters that every forward calls once, such as a
            backbone below a head that is trained. It is run once; its outputs are held.
        join: Puts consecutive slices into one, for ``slices_per_forward``.
    """

    module: nn.Module
    slices: Sequence[Any]
    encode: Callable[[nn.Module, Any], Any] = call_module
    slices_per_forward: int = 1
    part: nn.Module | None = None
    frozen: nn.Module | None = None
    join: Callable[[Sequence[Any]], Any] = join_slices


def cached_step(
    towers: Tower | Sequence[Tower],
    loss_fn: Callable[..., Losses],
    *,
    keep_graph: int = 0,
    context: Context = nullcontext,
    backward: Callable[[Tensor], Any] = Tensor.backward,
    exchange: Context = nullcontext,
) -> Any:
    """Add the gradient of the plain step to the parameters, in the memory of one slice.

    Args:
        towers: The encoders. One without trainable parameters is run once, without a graph.
        loss_fn: Called with each tower's embeddings of the whole batch; returns the loss, or
            losses by name (those with ``loss`` in their name are summed). Its own parameters (a
            learnable temperature, a head) get their gradient in this one call.
        keep_graph: Number of slices whose graph is kept from the first pass and not built again:
            the last ones, counted over all towers that are trained. As many as there are (or
            more) make the plain step.
        context: Makes the context of each forward pass and of the loss, e.g.
            ``lambda: torch.autocast('cuda', torch.float16)``.
        backward: Runs backward from the loss, e.g. ``lambda loss: scaler.scale(loss).backward()``.
            Cached gradients then carry the scale and are not scaled again.
        exchange: Makes the context of the blocks in which ranks may exchange data: the loss, and
            the slices whose backward reduces gradients. See
            :func:`~memengine.techniques.slices.out_of_memory.run_until_it_fits`.

    Returns:
        What ``loss_fn`` returned, without graph.

    Raises:
        ValueError: For no encoder or slice, a negative ``keep_graph``, a slice that an upstream
            graph computes, losses that are not scalars or do not depend on the embeddings, and
            ``slices_per_forward`` where it could not be exact.
        RuntimeError: When a buffer other than BatchNorm's changes in every forward pass.

    Cost: bytes saved for backward are those of ``max(keep_graph, 1)`` slices, or the loss's own
    and those of ``keep_graph`` slices, however large the batch; all embeddings and their
    gradients are held. Exactly (trained slices - ``keep_graph``) extra forwards.

    Precision: under autocast embeddings keep their type, and so do cached gradients, as in the
    plain step; backward runs outside autocast. Randomness: each slice is repeated from its own
    random state (torch on every device in use, Python, NumPy), and the step leaves the generators
    as the plain one does. BatchNorm: normalises by the slice's statistics, as that many
    unsynchronised ranks do; running statistics are updated once per slice, in the slices' order.
    DDP: gradients are reduced once per module, in its last backward. Hooks: forward hooks fire
    again where a slice is repeated; gradient hooks fire once per slice, with that slice's part of
    the gradient. Inputs that require a gradient get it.

    Example:
        >>> tower = Tower(model, split_batch(torch.cat([view1, view2]), 16))
        >>> loss = cached_step(tower, lambda z: NTXentLoss()(*z.chunk(2)))
        >>> optimizer.step()
    """
    runs = _plan([towers] if isinstance(towers, Tower) else list(towers), keep_graph)
    sync = SyncOnce(
        [run.module for run in runs for _ in run.kept]
        + [run.module for run in runs for _ in run.repeated]
    )

    # First pass: embed every slice; only the kept ones build a graph.
    for run in runs:
        for group in run.groups():
            with torch.no_grad(), context():
                run.embed_without_graph(group)
        for inputs in run.kept:
            with sync.graph(run.module), context():
                run.graphs.append(run.encode(inputs))

    # The loss, and its gradient with respect to the embeddings that have no graph.
    embeddings = [run.embeddings() for run in runs]
    with exchange():
        with context():
            losses = loss_fn(*embeddings)
        loss = total_loss(losses)
        if not loss.requires_grad:
            raise ValueError('the loss depends neither on the embeddings nor on any parameter')
        with sync.loss(), autocast_off(loss.device.type):
            backward(loss)
    losses = detached(losses)
    del loss, embeddings
    _check_dependence(runs)

    # Second pass: embed again, with a graph, and push the cached gradient through it.
    for run in runs:
        for inputs, state in zip(run.repeated, run.states, strict=True):
            with sync.graph(run.module) as last:
                with frozen_statistics(run.module):  # in backward for checkpointed layers
                    with state.replay(), context():
                        outputs = run.embed_again(inputs)
                    with exchange() if last else nullcontext():
                        run.push(outputs, _awaited(run.module) if last else [])
    return losses


class _Run:
    """What one tower does in a step, and what it hands from the first pass to the second."""

    def __init__(self, tower: Tower, keep_graph: int) -> None:
        self.module = tower.module
        self._tower = tower
        tensors = tensors_in(tower.slices)
        parameters = _encoder(tower).parameters()
        self.trained = any(tensor.requires_grad for tensor in [*parameters, *tensors])
        self.kept = tower.slices[len(tower.slices) - keep_graph :] if self.trained else []
        self._graph_free = tower.slices[: len(tower.slices) - len(self.kept)]
        self.repeated = self._graph_free if self.trained else []
        self.states: list[RandomState] = []  # of the repeated slices
        self._frozen = None
        inputs_trained = any(tensor.requires_grad for tensor in tensors)
        if tower.frozen is not None and self.repeated and not inputs_trained:
            self._frozen = FrozenPart(tower.frozen)
        self.graphs: list[list[Tensor]] = []  # embeddings of the kept slices
        self._devices = accelerators_of(self.module, tensors)
        self._chunks: list[list[Tensor]] = []  # embeddings of the graph-free slices
        self._leaves: list[Tensor] = []  # the same as leaves of the loss's graph
        self._pending: list[Tensor | None] = []  # rows of their gradients not yet pushed
        self._structure: pytree.TreeSpec | None = None

    def groups(self) -> Iterator[Sequence[Any]]:
        """The graph-free slices, as many together as go through one forward."""
        size = self._tower.slices_per_forward
        for start in range(0, len(self._graph_free), size):
            yield self._graph_free[start : start + size]

    def encode(self, inputs: Any) -> list[Tensor]:
        """Embeddings of a slice, as a flat list of tensors."""
        name = type(self.module).__name__
        leaves, structure = pytree.tree_flatten(self._tower.encode(self.module, inputs))
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or leaf.dim() == 0:
                what = 'a scalar' if isinstance(leaf, Tensor) else f'a {type(leaf).__name__}'
                raise ValueError(
                    f'embeddings must be tensors with the samples in dimension 0, got {what} from '
                    f'{name}; let encode (get_rep_fn) pick the embeddings out'
                )
        if self._structure is None:
            self._structure = structure
        if not leaves or structure != self._structure:
            raise ValueError(
                f'{name} must return embeddings of one structure for every slice, got {structure} '
                f'after {self._structure}'
            )
        return leaves

    def embed_without_graph(self, group: Sequence[Any]) -> None:
        """First pass of slices that are embedded again later, if trained."""
        state = RandomState(self._devices)
        with self._frozen.first_pass() if self._frozen else nullcontext():
            self._chunks.append(self.encode(self._tower.join(group)))
        torch.clear_autocast_cache()  # else weights cast without graph reach the second pass
        if not self.trained:
            return
        if len(group) > 1 and not state.unchanged():
            raise ValueError(
                f'{type(self.module).__name__} draws random numbers (dropout, drop-path), and one '
                'larger chunk draws others than its slices do; leave out forward_chunk_size '
                '(slices_per_forward), or switch the randomness off'
            )
        self.states += [state] * len(group)

    def embed_again(self, inputs: Any) -> list[Tensor]:
        """Second pass of a slice."""
        with self._frozen.second_pass() if self._frozen else nullcontext():
            return self.encode(inputs)

    def embeddings(self) -> Any:
        """Embeddings of the whole batch; those without graph are leaves, which get gradients."""
        for chunks in zip(*self._chunks, strict=True):
            leaf = torch.cat(chunks) if len(chunks) > 1 else chunks[0].detach()
            differentiable = leaf.is_floating_point() or leaf.is_complex()
            self._leaves.append(leaf.requires_grad_(self.trained and differentiable))
        parts = [self._leaves, *self.graphs] if self._leaves else self.graphs
        self.graphs, self._chunks = [], []
        whole = [torch.cat(part) if len(part) > 1 else part[0] for part in zip(*parts, strict=True)]
        assert self._structure is not None
        return pytree.tree_unflatten(whole, self._structure)

    def take_gradients(self) -> bool:
        """Take the cached gradients off the leaves; whether there are any."""
        self._pending = [leaf.grad for leaf in self._leaves]
        self._leaves = []
        return any(gradient is not None for gradient in self._pending)

    def push(self, outputs: list[Tensor], awaited: list[nn.Parameter]) -> None:
        """Backward from the embeddings of the next repeated slice; ``awaited`` get zeros."""
        roots: list[Tensor] = []
        gradients: list[Tensor] = []
        for index, output in enumerate(outputs):
            pending = self._pending[index]
            if pending is None:
                continue
            rows, self._pending[index] = pending[: len(output)], pending[len(output) :]
            if output.requires_grad:
                roots.append(output)
                gradients.append(rows)
        for parameter in awaited:
            roots.append(parameter)
            gradients.append(parameter.new_zeros(()).expand_as(parameter))
        if roots:
            with autocast_off(roots[0].device.type):
                torch.autograd.backward(roots, gradients)


def _plan(towers: Sequence[Tower], keep_graph: int) -> list[_Run]:
    """Which slices keep their graph: the last ``keep_graph`` of all that are trained."""
    if not isinstance(keep_graph, int) or keep_graph < 0:
        raise ValueError(f'keep_graph must be a number of slices, got {keep_graph!r}')
    if not towers:
        raise ValueError('there is no encoder to run')
    runs: list[_Run] = []
    for tower in reversed(towers):
        _check_tower(tower)
        run = _Run(tower, min(keep_graph, len(tower.slices)))
        keep_graph -= len(run.kept)
        runs.insert(0, run)
    _check_ddp(runs)
    return runs


def _encoder(tower: Tower) -> nn.Module:
    # A module's truth is its length, which a compiled one may not have.
    return tower.module if tower.part is None else tower.part


def _check_tower(tower: Tower) -> None:
    name = type(tower.module).__name__
    if not tower.slices:
        raise ValueError(f'there is no slice for {name}')
    if tower.slices_per_forward < 1:
        raise ValueError(f'slices_per_forward must be at least 1, got {tower.slices_per_forward}')
    for tensor in tensors_in(tower.slices):
        source = base_of(tensor)  # a slice is a view
        if tensor.requires_grad and not (tensor if source is None else source).is_leaf:
            raise ValueError(
                f'a slice for {name} is computed by an upstream graph, which each slice would '
                'run through again; compute it inside the encoder, or detach it'
            )
    layers = layers_with_batch_statistics(_encoder(tower))
    if layers and tower.slices_per_forward > 1:
        raise ValueError(
            f'{name} normalises by the statistics of the batch ({layers[0]}), which differ between '
            'a larger chunk and its slices; leave out forward_chunk_size (slices_per_forward)'
        )


def _check_ddp(runs: Sequence[_Run]) -> None:
    """Refuse what DDP would end in the middle of: it looks for unused parameters one forward at a
    time, and takes those of the other towers for unused before their backward."""
    for module in {run.module for run in runs if run.trained}:
        sharing = [run for run in runs if run.module is module and run.trained]
        if _finds_unused(module) and len(sharing) > 1 and not any(run.repeated for run in sharing):
            raise ValueError(
                'keep_graph keeps all slices of several towers in one DDP module with '
                'find_unused_parameters=True; set it to False (towers that take no part in the '
                'last backward are seen to), or keep fewer slices'
            )


def _finds_unused(module: nn.Module) -> bool:
    return isinstance(module, DistributedDataParallel) and bool(module.find_unused_parameters)


def _check_dependence(runs: Sequence[_Run]) -> None:
    """Refuse a loss that no repeated slice has a part in; the step would train nothing."""
    cached = [run.take_gradients() for run in runs if run.repeated]
    if cached and not any(cached):
        raise ValueError(
            'the loss does not depend on the embeddings of any encoder that is trained'
        )


def _awaited(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that DDP awaits in the last backward, though they got their gradient before.

    It reduces when every parameter has taken part in that one backward. Those of the loss, or of
    another tower in the same module, take part by a gradient of zero.
    """
    if not isinstance(module, DistributedDataParallel) or _finds_unused(module):
        return []  # told to find unused parameters, DDP sees to it itself
    return [p for p in module.parameters() if p.requires_grad and p.grad is not None]
