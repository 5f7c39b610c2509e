"""One encoder in a step in slices: its part of the batch, and what it does in both passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from memengine._torch_private.autograd import base_of, version_of
from memengine._torch_private.ops import pytree
from memengine.techniques.modules.random_state import accelerators_of
from memengine.techniques.modules.running_statistics import layers_with_batch_statistics
from memengine.techniques.slices.first_forwards import FirstForwards, Replay
from memengine.techniques.slices.frozen_part import FrozenPart
from memengine.techniques.slices.slicing import join_slices

__all__ = ['Tower', 'TowerRun', 'call_module']


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


class TowerRun:
    """What one tower does in a step, and what it hands from the first pass to the second.

    Args:
        tower: The tower.
        coupled: Whether the step has a coupled loss.
        additive: Whether the step has an additive loss.
        keep_graph: How many slices keep their graph from the first pass.

    Raises:
        ValueError: For what :func:`sliced_step` refuses of a tower.
    """

    def __init__(self, tower: Tower, coupled: bool, additive: bool, keep_graph: int) -> None:
        if coupled:
            _check_tower(tower)
        self.module = tower.module
        self._tower = tower
        is_read = tower.coupled or (lambda piece: True)
        read = [piece for piece in tower.slices if coupled and is_read(piece)]
        once = [piece for piece in tower.slices if not (coupled and is_read(piece))]
        self.is_read = bool(read)
        tensors = _tensors_in(tower.slices) if read else []
        encoder = tower.module if tower.part is None else tower.part
        learned = any(tensor.requires_grad for tensor in [*encoder.parameters(), *tensors])
        self.trained = learned or additive
        self.kept = read[max(len(read) - keep_graph, 0) :] if self.trained else []
        self._graph_free = read[: len(read) - len(self.kept)]
        self.repeated = self._graph_free if self.trained else []
        self._second_pass = [*self.repeated, *(once if additive else [])]
        self._frozen = None
        inputs_trained = any(tensor.requires_grad for tensor in tensors)
        if tower.frozen is not None and self.repeated and not inputs_trained:
            self._frozen = FrozenPart(tower.frozen)
        devices = accelerators_of(self.module, tensors) if read else ()
        self._first_forwards = FirstForwards(self.module, devices)
        self._graphs: list[list[Tensor]] = []  # embeddings of the kept slices
        self._chunks: list[list[Tensor]] = []  # embeddings of the graph-free slices
        self._leaves: list[Tensor] = []  # the same as leaves of the loss's graph
        self._pending: list[Tensor | None] = []  # rows of their gradients not yet pushed
        self._structure: pytree.TreeSpec | None = None

    def first_pass_groups(self) -> Iterator[Sequence[Any]]:
        """The graph-free slices, as many together as go through one forward."""
        size = self._tower.slices_per_forward
        for start in range(0, len(self._graph_free), size):
            yield self._graph_free[start : start + size]

    @property
    def graph_count(self) -> int:
        """Graphs that the step builds of this tower."""
        return len(self.kept) + len(self._second_pass)

    def second_pass_slices(self) -> Iterator[tuple[Any, Replay | None]]:
        """Slices that get a graph one by one; for those that are repeated, what to do so in."""
        yield from zip_longest(self._second_pass, self._first_forwards.replays)

    def embed_without_graph(self, group: Sequence[Any]) -> None:
        """First pass of slices that are embedded again later, if trained."""
        piece = group[0] if len(group) == 1 else self._tower.join(group)
        given = _tensors_in(group)
        versions = [version_of(tensor) for tensor in given]
        with self._first_forwards.next(len(group) if self.trained else 0) as state:
            with self._frozen.first_pass() if self._frozen else nullcontext():
                self._chunks.append(self._coupled_tensors(self.encode(piece), piece))
        torch.clear_autocast_cache()  # else weights cast without graph reach the second pass
        if not self.trained:
            return
        if versions != [version_of(tensor) for tensor in given]:
            raise ValueError(
                f'{type(self.module).__name__} changes its input in place, and the gradient cache '
                'needs it a second time; set inplace=False in its first layers, clone the input '
                'there, or keep the graph of all slices (keep_graph)'
            )
        if len(group) > 1 and not state.unchanged():
            raise ValueError(
                f'{type(self.module).__name__} draws random numbers (dropout, drop-path), and one '
                'larger chunk draws others than its slices do; leave out forward_chunk_size '
                '(slices_per_forward), or switch the randomness off'
            )

    def embed_and_keep(self, piece: Any) -> Any:
        """First pass of a slice that keeps its graph."""
        self._first_forwards.keep_others()
        outputs = self.encode(piece)
        self._graphs.append(self._coupled_tensors(outputs, piece))
        return outputs

    def encode(self, piece: Any) -> Any:
        """Embeddings of a slice."""
        return self._tower.encode(self.module, piece)

    def encode_again(self, piece: Any) -> Any:
        """Embeddings of a slice in its second pass."""
        with self._frozen.second_pass() if self._frozen else nullcontext():
            return self.encode(piece)

    def _coupled_tensors(self, outputs: Any, piece: Any) -> list[Tensor]:
        """What the coupled loss reads of a slice's embeddings, as a flat list of tensors."""
        name = type(self.module).__name__
        if self._tower.coupled_part is not None:
            outputs = self._tower.coupled_part(outputs, piece)
        leaves, structure = pytree.tree_flatten(outputs)
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

    def embeddings(self) -> Any:
        """Embeddings of the whole batch; those without graph are leaves, which get gradients."""
        self._first_forwards.finish()
        for chunks in zip(*self._chunks, strict=True):
            leaf = torch.cat(chunks) if len(chunks) > 1 else chunks[0].detach()
            differentiable = leaf.is_floating_point() or leaf.is_complex()
            self._leaves.append(leaf.requires_grad_(self.trained and differentiable))
        parts = [self._leaves, *self._graphs] if self._leaves else self._graphs
        self._graphs, self._chunks = [], []
        whole = [torch.cat(part) if len(part) > 1 else part[0] for part in zip(*parts, strict=True)]
        assert self._structure is not None
        return pytree.tree_unflatten(whole, self._structure)

    def take_gradients(self) -> bool:
        """Take the cached gradients off the leaves; whether there are any."""
        self._pending = [leaf.grad for leaf in self._leaves]
        self._leaves = []
        return any(gradient is not None for gradient in self._pending)

    def cached_gradients(self, outputs: Any, piece: Any) -> list[tuple[Tensor, Tensor]]:
        """Embeddings of the next repeated slice, each with its part of the cached gradient."""
        pairs = []
        for index, output in enumerate(self._coupled_tensors(outputs, piece)):
            pending = self._pending[index]
            if pending is None:
                continue
            rows, self._pending[index] = pending[: len(output)], pending[len(output) :]
            if output.requires_grad:
                pairs.append((output, rows))
        return pairs


def _tensors_in(tree: Any) -> list[Tensor]:
    if isinstance(tree, Mapping) and not isinstance(tree, dict):
        tree = dict(tree)
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _check_tower(tower: Tower) -> None:
    name = type(tower.module).__name__
    if not tower.slices:
        raise ValueError(f'there is no slice for {name}')
    if tower.slices_per_forward < 1:
        raise ValueError(f'slices_per_forward must be at least 1, got {tower.slices_per_forward}')
    for tensor in _tensors_in(tower.slices):
        base = base_of(tensor)  # a slice is a view
        if tensor.requires_grad and not (tensor if base is None else base).is_leaf:
            raise ValueError(
                f'a slice for {name} is computed by an upstream graph, which each slice would '
                'run through again; compute it inside the encoder, or detach it'
            )
    if tower.slices_per_forward == 1:
        return
    layers = layers_with_batch_statistics(tower.module if tower.part is None else tower.part)
    if layers:
        raise ValueError(
            f'{name} normalises by the statistics of the batch ({layers[0]}), which differ between '
            'a larger chunk and its slices; leave out forward_chunk_size (slices_per_forward)'
        )
