"""What one encoder does in both passes of a step in slices.

Forwards without a graph start from a random state, and from what modules keep beside their
parameters (counters, buffers that are swapped, results that are computed once and kept in a dict);
each is run again from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from memengine._torch_private.autograd import base_of, version_of
from memengine._torch_private.ops import pytree
from memengine.techniques.modules.forward_state import (
    Change,
    ModuleState,
    RandomState,
    SmallBuffers,
    accelerators_of,
    own_generators,
)
from memengine.techniques.modules.running_statistics import (
    layers_with_batch_statistics,
    unrepeatable,
)
from memengine.techniques.slices.frozen_part import FrozenPart
from memengine.techniques.slices.tower import Tower

Replay: TypeAlias = Callable[[], AbstractContextManager[None]]


class FirstForwards:
    """States before the graph-free forwards of a module, in their order.

    Cost: a random state, and some 25 microseconds for each module inside, by forward. What each
    forward leaves on its modules is held until the end of the step.
    """

    def __init__(self, module: nn.Module, devices: Iterable[torch.device]) -> None:
        self._module, self._devices = module, tuple(devices)
        self._are_others_kept = False
        self._before: list[ModuleState] = []
        self._after: ModuleState | None = None
        self._kept_results: dict[tuple[int, Any], Change] = {}
        self._draws: list[tuple[RandomState, SmallBuffers]] = []

    @property
    def replays(self) -> Iterator[Replay]:
        """For each forward, in their order, the context of its second run: what modules kept before
        the first one, and its random numbers. Afterwards all is as the first forwards have left it,
        but for tensors with a graph, which are as in the plain step.

        Made as they are asked for: held here, they would hold this, and a step's states would stay
        until Python's collector comes.
        """
        for number, (random_state, buffers) in enumerate(self._draws):
            yield partial(self._replay, number, random_state, buffers)

    @contextmanager
    def next(self, slices: int) -> Iterator[RandomState]:
        """Around a forward that will be run again, in so many slices.

        Raises:
            RuntimeError: When it writes into a tensor that modules keep, as the forwards before it
                could then not be repeated. The first one may: values that are set once.
        """
        modules, buffers = ModuleState(self._module), SmallBuffers(self._module)
        random_state = RandomState(self._devices, own_generators(self._module))
        yield random_state
        written = modules.written_to() if self._before else None
        if written is not None:
            raise unrepeatable(self._module, written)
        for _ in range(slices):
            self._draws.append((random_state, buffers))
            self._before.append(modules)

    def keep_others(self) -> None:
        """Called before forwards that keep their graph, and are not run again."""
        if self._before and not self._are_others_kept:
            self._are_others_kept = True
            self._before.append(ModuleState(self._module))

    def finish(self) -> None:
        """Note what all forwards have left, before the loss may change it."""
        if self._before:
            self._after = ModuleState(self._module)

    @contextmanager
    def _replay(
        self, number: int, random_state: RandomState, buffers: SmallBuffers
    ) -> Iterator[None]:
        changes = self._before[number].changes(self._after)
        places = {change.place for change in changes}
        # What an earlier slice has computed and kept has that slice's graph, if it has one.
        changes += [c for place, c in self._kept_results.items() if place not in places]
        for change in changes:
            change.undo()
        try:
            with random_state.replay(), buffers.restored():
                yield
        finally:
            self._note_kept_results(number, changes)
            for change in changes:
                if not change.has_graph:
                    change.redo()

    def _note_kept_results(self, number: int, changes: list[Change]) -> None:
        """What this slice, and none after it, has changed of modules that keep a graph."""
        following = self._before[number + 1 : number + 2]
        later = {c.place for state in following for c in state.changes(self._after)}
        once = [change for change in changes if change.place not in later]
        with_graph = {change.module: change for change in once if change.has_graph}
        if with_graph and self._are_others_kept:
            kept = next(iter(with_graph.values()))
            raise RuntimeError(
                f'{kept.path} of {type(self._module).__name__} is computed from parameters in one '
                'slice and kept for the others, and has no graph in those that keep theirs from '
                'the first pass (keep_graph); set keep_graph=0 or put the layer into training mode'
            )
        self._kept_results.update((c.place, c) for c in once if c.module in with_graph)


class TowerRun:
    """What one tower does in a step, and what it hands from the first pass to the second."""

    def __init__(self, tower: Tower, coupled: bool, additive: bool, keep_graph: int) -> None:
        if coupled:
            _check_tower(tower)
        self.module = tower.module
        self.reducer = tower.module if tower.within is None else tower.within
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
                tensors = self._coupled_tensors(self.encode(piece), piece)
        # A view of a parameter requires a gradient without a graph, too, and its parts put together
        # would be no leaf.
        self._chunks.append([tensor.detach() for tensor in tensors])
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
            leaf = torch.cat(chunks) if len(chunks) > 1 else chunks[0]
            differentiable = leaf.is_floating_point() or leaf.is_complex()
            self._leaves.append(leaf.requires_grad_(self.trained and differentiable))
        leaves = [_AsComputed.apply(leaf) if leaf.requires_grad else leaf for leaf in self._leaves]
        parts = [leaves, *self._graphs] if leaves else self._graphs
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


class _AsComputed(torch.autograd.Function):
    """A leaf as the result of an operation, which a loss may change in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


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
