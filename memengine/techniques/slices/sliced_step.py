"""The step in slices: the plain step's gradient for a batch of any size, in a slice's memory.

A loss is the sum of two kinds of terms. An *additive* one is the sum of its slices' losses
(classification; DINO once the teacher's targets are there). In a *coupled* one samples see each
other (SimCLR, SupCon, CLIP, KoLeo): it needs the embeddings of the whole batch, but only those. So
the slices that it reads are embedded without a graph; the loss gives the gradient with respect to
the embeddings; and each slice is embedded again, with a graph, to push its part of that gradient
into the parameters, together with the gradient of its own additive loss. A slice that no coupled
term reads is embedded once.

:func:`~memengine.techniques.additive_step` and :func:`~memengine.techniques.cached_step` are the
two ends: no coupled term, and no additive one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, reduce
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from memengine._torch_private.distributed import numbers_reduced
from memengine._torch_private.ops import pytree
from memengine.techniques.layers.weight_norm import shared_weights
from memengine.techniques.modules.running_statistics import frozen_statistics
from memengine.techniques.slices.tower import Tower
from memengine.techniques.slices.tower_run import Replay, TowerRun

Losses: TypeAlias = Tensor | Mapping[str, Tensor]
Context: TypeAlias = Callable[[], AbstractContextManager[Any]]


class StepLosses(NamedTuple):
    """What a step's terms were, without graph; None where there is no such term."""

    coupled: Any
    additive: Any


def sliced_step(
    towers: Tower | Sequence[Tower],
    coupled_loss: Callable[..., Losses] | None = None,
    slice_loss: Callable[[Any, Any], Losses] | None = None,
    *,
    keep_graph: int = 0,
    context: Context = nullcontext,
    backward: Callable[[Tensor], Any] = Tensor.backward,
) -> StepLosses:
    """Add the gradient of ``coupled_loss + sum of slice_loss`` to the parameters.

    Args:
        towers: The encoders. One without trainable parameters whose slices have no additive loss
            is run once, without a graph.
        coupled_loss: Called with the embeddings of the whole batch of each tower that it reads,
            slices in their order; returns the loss, or losses by name (those with ``loss`` in their
            name are summed). Its own parameters (a learnable temperature, a head) get their
            gradient in this one call.
        slice_loss: ``slice_loss(embeddings, slice)`` returns a slice's loss or losses by name,
            whose sum over the slices is the batch's. Other entries are summed too.
        keep_graph: Number of slices whose graph is kept from the first pass and not built again:
            the last ones of those that the coupled loss reads, over all towers that are trained.
            As many as there are (or more) make the plain step.
        context: Makes the context of each forward pass and of the losses, e.g.
            ``lambda: torch.autocast('cuda', torch.float16)``.
        backward: Runs backward from a loss, e.g. ``lambda loss: scaler.scale(loss).backward()``.
            Cached gradients then carry the scale and are not scaled again. A repeated slice
            without an additive loss hands it a zero, through which its gradient flows.

    Returns:
        The coupled losses, and the additive ones summed over the slices.

    Raises:
        ValueError: For no encoder or slice, a negative ``keep_graph``, a slice that an upstream
            graph computes, losses that are not scalars, a coupled loss that does not depend on the
            embeddings, an encoder that changes its input in place where that is needed again, and
            ``slices_per_forward`` where it could not be exact.
        RuntimeError: When a buffer other than BatchNorm's changes in every forward pass.

    Cost: bytes saved for backward are those of ``max(keep_graph, 1)`` slices, or the coupled
    loss's own and those of ``keep_graph`` slices, however large the batch; what the coupled loss
    reads and its gradient are held. Exactly (trained slices that the coupled loss reads -
    ``keep_graph``) extra forwards; none where there is no coupled loss.

    Precision: under autocast embeddings keep their type, and so do cached gradients, as in the
    plain step; backward runs outside autocast. Randomness: each slice is repeated from its own
    random state (torch on every device in use, Python, NumPy), and the step leaves the generators
    as the plain one does; slices that the coupled loss reads draw before the others. BatchNorm:
    normalises by the slice's statistics, as that many unsynchronised ranks do; running statistics
    are updated once per slice, in that order. DDP: gradients are reduced once per module, in its
    last backward. Hooks: forward hooks fire again where a slice is repeated; gradient hooks fire
    once per slice, with that slice's part of the gradient. Inputs that require a gradient get it.

    Source: Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup
    (2021), for the cached gradients.
    """
    towers = [towers] if isinstance(towers, Tower) else list(towers)
    runs = _plan_runs(towers, coupled_loss is not None, slice_loss is not None, keep_graph)
    step = _Step(runs, slice_loss, context, backward)
    kept = step.first_pass()
    coupled = None if coupled_loss is None else step.run_coupled_loss(coupled_loss, kept)
    kept = [_detached(losses) for losses in kept]
    return StepLosses(coupled, _sum([*kept, *step.second_pass(coupled_loss is not None)]))


class _Step:
    """The two passes of a step and the coupled loss between them."""

    def __init__(
        self,
        runs: Sequence[TowerRun],
        slice_loss: Callable[[Any, Any], Losses] | None,
        context: Context,
        backward: Callable[[Tensor], Any],
    ) -> None:
        self._runs = runs
        self._slice_loss = slice_loss
        self._context, self._backward = context, backward
        self._sync = SyncOnce(run.reducer for run in runs for _ in range(run.graph_count))

    def first_pass(self) -> list[Losses]:
        """Embed what the coupled loss reads; additive losses of the slices that keep a graph."""
        kept = []
        for run in self._runs:
            for group in run.first_pass_groups():
                with torch.no_grad(), self._context():
                    run.embed_without_graph(group)
            for piece in run.kept:
                with self._sync.next_graph(run.reducer), self._context():
                    outputs = run.embed_and_keep(piece)
                    if self._slice_loss is not None:
                        kept.append(self._slice_loss(outputs, piece))
        return kept

    def run_coupled_loss(self, coupled_loss: Callable[..., Losses], kept: list[Losses]) -> Any:
        """The loss, and its gradient with respect to the embeddings that have no graph.

        The graphs of slices that keep them, with their additive losses, end here.
        """
        embeddings = [run.embeddings() for run in self._runs if run.is_read]
        with self._context():
            losses = coupled_loss(*embeddings)
        loss = total_loss(losses)
        if not loss.requires_grad:
            raise ValueError('the loss depends neither on the embeddings nor on any parameter')
        with self._sync.shared_backward(), _without_autocast(loss):
            self._backward(sum(map(total_loss, kept), start=loss))
        _check_dependence(self._runs)
        return _detached(losses)

    def second_pass(self, coupled: bool) -> list[Any]:
        """A slice's additive loss and its cached gradient, in one backward; the losses."""
        later = [(run, *work) for run in self._runs for work in run.second_pass_slices()]
        sharing = [] if self._slice_loss is None else [run.module for run in self._runs]
        done = []
        with shared_weights(sharing) as before_the_last:
            for number, (run, piece, replay) in enumerate(later, start=1):
                if number == len(later):
                    before_the_last()
                with self._sync.next_graph(run.reducer) as synchronises:
                    zeros = _zero_gradients(run.reducer) if synchronises and coupled else []
                    losses = self._second_pass_of(run, piece, replay, zeros)
                if losses is not None:
                    done.append(losses)
        return done

    def _second_pass_of(
        self, run: TowerRun, piece: Any, replay: Replay | None, zeros: list[tuple[Tensor, Tensor]]
    ) -> Any:
        # A repeated slice counts once, in backward too where layers are checkpointed.
        with nullcontext() if replay is None else frozen_statistics(run.module):
            with nullcontext() if replay is None else replay(), self._context():
                outputs = run.encode(piece) if replay is None else run.encode_again(piece)
                losses = None if self._slice_loss is None else self._slice_loss(outputs, piece)
            cached = [] if replay is None else run.cached_gradients(outputs, piece)
            loss = None if losses is None else total_loss(losses)
            _run_backward([*cached, *zeros], loss, self._backward)
        return None if losses is None else _detached(losses)


def total_loss(losses: Losses) -> Tensor:
    """The scalar to run backward from.

    Args:
        losses: The loss, or losses by name: those with ``loss`` in their name are summed, other
            entries are for the log (MMEngine's rule).

    Raises:
        ValueError: When a loss is not a scalar, or no entry is a loss.
    """
    parts = losses
    if isinstance(losses, Mapping):
        parts = {name: value for name, value in losses.items() if 'loss' in name}
        if not parts:
            raise ValueError(f'no entry of the losses is named a loss, got {sorted(losses)}')
    else:
        parts = {'loss': losses}
    for name, part in parts.items():
        if not isinstance(part, Tensor) or part.numel() != 1:
            what = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
            raise ValueError(f'{name} must be a scalar tensor, got {what}')
    total, *others = (part.reshape(()) for part in parts.values())
    return sum(others, start=total)


def _detached(losses: Losses) -> Any:
    return pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, losses)


def _sum(losses: Sequence[Any]) -> Any:
    """Losses of slices added up, of whatever structure they are; None where there are none."""
    return reduce(partial(pytree.tree_map, torch.add), losses) if losses else None


def _without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Around a backward pass inside somebody's autocast, which is for forward passes only."""
    return torch.autocast(tensor.device.type, enabled=False)


@runtime_checkable
class Synchronising(Protocol):
    """A module that reduces gradients across ranks in backward, unless told not to yet."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """The context of forward and backward in which gradients are only added up."""


def synchronising(module: nn.Module) -> list[Synchronising]:
    """The module if it is such a one, or the members of a ModuleList that are."""
    members = module if isinstance(module, nn.ModuleList) else [module]
    # What torch.compile returns has its module's methods, but not by its type.
    bare = [dict(member.named_children()).get('_orig_mod', member) for member in members]
    return [member for member in bare if isinstance(member, Synchronising)]


class SyncOnce:
    """Lets modules that reduce gradients across ranks (DDP) do so in their last backward only.

    Until a module's last graph, forward and backward run in its ``no_sync()``. Modules without
    that method have nothing to synchronise.

    Args:
        graphs: The modules in the order in which their graphs are built; one entry per graph.
    """

    def __init__(self, graphs: Iterable[nn.Module]) -> None:
        self._left = Counter(member for graph in graphs for member in synchronising(graph))

    @contextmanager
    def next_graph(self, module: nn.Module) -> Iterator[bool]:
        """Around the forward (and backward) of the module's next graph.

        Yields:
            Whether gradients are synchronised in it.
        """
        members = [member for member in synchronising(module) if member in self._left]
        self._left.subtract(members)
        with ExitStack() as stack:
            for member in members:
                if self._left[member] > 0:
                    stack.enter_context(member.no_sync())
            yield any(self._left[member] == 0 for member in members)

    @contextmanager
    def shared_backward(self) -> Iterator[None]:
        """Around a backward through graphs of any of the modules."""
        with ExitStack() as stack:
            for module, left in self._left.items():
                if left > 0:
                    stack.enter_context(module.no_sync())
            yield


class _WithCachedGradients(torch.autograd.Function):
    """A loss whose backward also pushes given gradients into other tensors, as they are."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *roots: Tensor) -> Tensor:
        ctx.gradients = gradients  # not saved by hooks, which may compress what they are given
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (grads[0], None, *ctx.gradients)


def _run_backward(
    pairs: Sequence[tuple[Tensor, Tensor]], loss: Tensor | None, backward: Callable[[Tensor], Any]
) -> None:
    """One backward from a slice's loss, if it has one, and with given gradients from tensors."""
    if pairs:  # by the caller's own backward, too, which may tell DDP that one begins
        roots, gradients = [root for root, _ in pairs], [gradient for _, gradient in pairs]
        loss = torch.zeros((), device=roots[0].device) if loss is None else loss
        loss = _WithCachedGradients.apply(loss, gradients, *roots)
    if loss is not None:
        with _without_autocast(loss):
            backward(loss)


def _plan_runs(
    towers: Sequence[Tower], coupled: bool, additive: bool, keep_graph: int
) -> list[TowerRun]:
    """Which slices keep their graph: the last ``keep_graph`` of all that the coupled loss reads."""
    if not isinstance(keep_graph, int) or keep_graph < 0:
        raise ValueError(f'keep_graph must be a number of slices, got {keep_graph!r}')
    if not towers:
        raise ValueError('there is no encoder to run')
    runs: list[TowerRun] = []
    for tower in reversed(towers):
        run = TowerRun(tower, coupled, additive, keep_graph)
        keep_graph -= len(run.kept)
        runs.insert(0, run)
    _check_ddp(runs)
    return runs


def _check_ddp(runs: Sequence[TowerRun]) -> None:
    """Refuse what DDP would end in the middle of: with a static graph it expects each backward to
    be a step; and it looks for unused parameters one forward at a time, and takes those of the
    other towers for unused before their backward. And gradients that it would not reduce."""
    for member in {member for run in runs for member in synchronising(run.reducer)}:
        if isinstance(member, DistributedDataParallel):
            _refuse_thawed(member)
    for run in runs:
        if (
            isinstance(run.reducer, DistributedDataParallel)
            and run.reducer.static_graph
            and len(run.kept) < run.graph_count > 1
        ):
            raise ValueError(
                'DDP with static_graph=True takes the first backward for a whole step, and a step '
                'in slices has one for each slice; set static_graph=False'
            )
    for module in {run.reducer for run in runs if run.kept}:
        sharing = [run for run in runs if run.reducer is module and run.trained]
        all_kept = all(run.graph_count == len(run.kept) for run in sharing)
        if _finds_unused(module) and len(sharing) > 1 and all_kept:
            raise ValueError(
                'keep_graph keeps all slices of several towers in one DDP module with '
                'find_unused_parameters=True; set it to False (towers that take no part in the '
                'last backward are seen to), or keep fewer slices'
            )


def _refuse_thawed(model: DistributedDataParallel) -> None:
    """Refuse parameters that DDP took for frozen when it was made."""
    trained, reduced = numbers_reduced(model)
    if trained > reduced and model.process_group.size() > 1:
        raise ValueError(
            f'{type(model.module).__name__}: {trained - reduced} of its {trained} trained '
            'parameters were frozen when it was wrapped in DistributedDataParallel, so that their '
            "gradients would stay each rank's own; wrap it anew once they are thawed"
        )


def _finds_unused(module: nn.Module) -> bool:
    return isinstance(module, DistributedDataParallel) and bool(module.find_unused_parameters)


def _check_dependence(runs: Sequence[TowerRun]) -> None:
    """Refuse a loss that no repeated slice has a part in; the step would train nothing."""
    cached = [run.take_gradients() for run in runs if run.repeated]
    if cached and not any(cached):
        raise ValueError(
            'the loss does not depend on the embeddings of any encoder that is trained'
        )


def _zero_gradients(module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Parameters that DDP awaits in the last backward, though they got their gradient before.

    It reduces when every parameter has taken part in that one backward. Those of the loss, or of
    another tower in the same module, take part by a gradient of zero.
    """
    if not isinstance(module, DistributedDataParallel) or _finds_unused(module):
        return []  # told to find unused parameters, DDP sees to it itself
    return [
        (p, p.new_zeros(()).expand_as(p))
        for p in module.parameters()
        if p.requires_grad and p.grad is not None
    ]
