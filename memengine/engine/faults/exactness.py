"""The plain step beside the one that techniques carry out, and how far their gradients differ.

Nothing of it is left in training: random state, the values of parameters, buffers and other
tensors that modules hold, their attributes and the gradients so far are what they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memengine._torch_private.ops import pytree
from memengine.engine.distributed.processes import cpu_group
from memengine.engine.optim.optim_wrapper import OptimWrapper
from memengine.engine.step import SlicedModel, plain_step
from memengine.technique import Handle
from memengine.techniques.compiling import CompiledBlocks
from memengine.techniques.modules.forward_state import ModuleState, RandomState
from memengine.techniques.modules.running_statistics import layers_with_batch_statistics
from memengine.techniques.slices.out_of_memory import StepStart, run_until_it_fits

__all__ = ['Difference', 'PlainStep', 'difference', 'first_samples']

Gradients = list[Tensor]  # of the parameters that are trained, in the model's order
_LEAST = 0.01  # share of the whole gradient's norm on which smaller tensors are measured


class Difference(NamedTuple):
    """How far a gradient is from the expected one.

    Attributes:
        error: The largest relative error (in norm) of any parameter's.
        parameter: Its name.
        not_finite: Which of the two has an entry that is NaN or infinite: that one, the expected.
    """

    error: float
    parameter: str
    not_finite: tuple[bool, bool]


@torch.no_grad()
def difference(module: nn.Module, actual: Gradients, expected: Gradients) -> Difference:
    """Compare gradients; on several ranks the largest difference of any. Every rank must ask.

    That of a parameter is measured on its own norm, or on a hundredth of the whole gradient's where
    that is more: what is zero but for rounding is no error.
    """
    dtypes = [torch.promote_types(g.dtype, torch.float32) for g in expected]
    pairs = [(a.to(d), e.to(d)) for a, e, d in zip(actual, expected, dtypes, strict=True)]
    errors = torch.stack([torch.linalg.vector_norm(a - e).double().cpu() for a, e in pairs])
    norms = torch.stack([torch.linalg.vector_norm(e).double().cpu() for _, e in pairs])
    least = _LEAST * torch.linalg.vector_norm(norms)
    errors = torch.where(errors == 0, errors, errors / torch.maximum(norms, least))
    bad = [not all(bool(g.isfinite().all()) for g in side) for side in (actual, expected)]
    figures = torch.cat([errors.nan_to_num(torch.inf), torch.tensor(bad).double()])
    if dist.is_initialized():
        shared = figures.to(expected[0].device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        figures = shared.cpu()
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    worst = int(figures[:-2].argmax())
    ours, plains = figures[-2:].bool().tolist()
    return Difference(figures[worst].item(), names[worst], (ours, plains))


class PlainStep:
    """Finds the gradient that a step has when techniques are not there.

    In a step in slices of a model that draws random numbers or has batch statistics, each slice
    stays by itself, as those are part of what is learned.

    Args:
        wrapper: Carries the steps out.
        module: The bare model.
        handles: The techniques that are applied to it.
        samples: On how many samples of a batch; None for all, until memory wants fewer.
        log: Takes a sentence for the run's log.

    Raises:
        ValueError: For one sample, where samples meet in the loss.

    Attributes:
        samples: As above; fewer once a plain step has run out of memory.
    """

    def __init__(
        self,
        wrapper: OptimWrapper,
        module: Any,
        handles: Sequence[Handle],
        samples: int | None,
        log: Any,
    ) -> None:
        self._wrapper, self._module, self._handles = wrapper, module, handles
        self.samples, self._log = samples, log
        self._fewest = 2 if isinstance(module, SlicedModel) and module.coupled else 1
        if samples is not None and samples < self._fewest:
            raise ValueError(
                f'verify_exactness.samples={samples}: samples meet in the loss of '
                f'{type(module).__name__}, which is 0 of one alone; set it to at least 2'
            )
        self._in_slices = bool(wrapper.sizes and layers_with_batch_statistics(module))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained."""
        return [p for p in self._module.parameters() if p.requires_grad]

    def gradient(self, data: Any, size: int) -> Gradients:
        """The plain gradient of a batch of ``size`` samples, or of its first ``samples``.

        Where memory has no room for it, ``samples`` becomes half of what was tried.

        Raises:
            torch.OutOfMemoryError: When there is no room for the fewest that can be compared.
            ValueError: Where compiled modules draw random numbers, as they draw others plainly.
        """

        def step() -> Gradients:
            part = data if self.samples is None else first_samples(data, self.samples, size)
            return self._plain_gradient(part)

        def tried() -> int:
            return size if self.samples is None else min(self.samples, size)

        def shrink() -> bool:
            if tried() // 2 < self._fewest:
                return False
            self._log(f'{_does_not_fit(tried())}; steps are compared on {tried() // 2}')
            self.samples = tried() // 2
            return True

        try:
            group = cpu_group('running out of memory')
            return run_until_it_fits(step, shrink, self._module, group, data)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f'{_does_not_fit(tried())}, and no smaller one can be compared: leave it out'
            ) from error

    def techniques_gradient(self, data: Any, size: int) -> Gradients:
        """The gradient of the first ``samples`` of a batch as the wrapper carries the step out."""
        assert self.samples is not None
        part = first_samples(data, self.samples, size)
        with undone_afterwards(self._module), self._wrapper.gradients_only():
            self._wrapper.train_step(self._module, part)
            return gradients_of(self.parameters)

    def _plain_gradient(self, data: Any) -> Gradients:
        with undone_afterwards(self._module) as random, self._paused(), self._same_draws():
            gradients = self._take(data)
            drawn = not random.unchanged()
        if self._in_slices or not (self._wrapper.sizes and drawn):
            return gradients
        self._in_slices = True
        self._log(
            'verify_exactness: slices draw their own random numbers, so the plain step '
            'embeds slice by slice, too'
        )
        with undone_afterwards(self._module), self._paused():
            return self._take(data)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        with ExitStack() as stack:
            for handle in self._handles:
                stack.enter_context(handle.paused())
            yield

    @contextmanager
    def _same_draws(self) -> Iterator[None]:
        """Refuse plain forwards of modules that would draw other random numbers compiled."""
        before: list[RandomState] = []

        def enter(*_: Any) -> None:
            before.append(RandomState.of(self._module))

        def leave(*_: Any) -> None:
            if not before.pop().unchanged():
                raise ValueError(
                    'verify_exactness: a compiled block draws random numbers, and compiled code '
                    "draws others than the plain step; set compile_blocks.options={'fallback_"
                    "random': True} (in place of a mode), or leave one of the two out"
                )

        with ExitStack() as stack:
            for handle in self._handles:
                if isinstance(handle, CompiledBlocks) and handle.draws_others:
                    for module in handle.modules.values():
                        stack.enter_context(module.register_forward_pre_hook(enter))
                        stack.enter_context(module.register_forward_hook(leave))
            yield

    def _take(self, data: Any) -> Gradients:
        data = pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, data)
        module = _InSlices(self._module, self._wrapper) if self._in_slices else self._module
        taker = _GradientTaker(self._wrapper, self.parameters)
        plain_step(module, data, taker)
        return taker.gradients


class _GradientTaker:
    """Takes the gradient of a loss in place of an update, scaled as it is in training."""

    def __init__(self, wrapper: OptimWrapper, parameters: list[nn.Parameter]) -> None:
        self._wrapper, self._parameters = wrapper, parameters
        self.gradients: Gradients = []

    def optim_context(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self._wrapper.precision.autocast()

    def update_params(self, loss: Tensor) -> None:
        loss = self._wrapper.precision.scaled(self._wrapper.scale_loss(loss))
        found = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        pairs = zip(found, self._parameters, strict=True)
        self.gradients = [torch.zeros_like(p) if g is None else g for g, p in pairs]


class _InSlices(nn.Module):
    """A model whose loss is that of its slices, each embedded by itself, with all their graphs."""

    def __init__(self, module: Any, wrapper: OptimWrapper) -> None:
        super().__init__()
        self.module, self.parse_losses = module, module.parse_losses
        self.data_preprocessor = module.data_preprocessor
        self.size = next(iter(wrapper.sizes.values()))

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = 'loss') -> Any:
        module, sums, parts = self.module, [], []
        targets = module.targets(inputs, data_samples, self.size)
        pieces = module.slices(inputs, data_samples, self.size)
        if module.coupled:  # slices that samples meet in draw their random numbers first
            pieces = sorted(pieces, key=lambda piece: not piece.coupled)
        for piece in pieces:
            embeddings = module(piece.inputs, piece.data_samples, mode='tensor')
            if module.additive:
                sums.append(module.slice_loss(embeddings, targets, piece))
            if module.coupled and piece.coupled:
                parts.append(module.coupled_part(embeddings, piece))
        losses: dict[str, Any] = {}
        if module.additive:
            total = reduce(partial(pytree.tree_map, torch.add), sums)
            losses.update(module.batch_losses(total, targets))
        if module.coupled:
            losses.update(module.coupled_loss(module.join(parts), targets, data_samples))
        return losses


def _does_not_fit(samples: int) -> str:
    return f'verify_exactness: the plain step of {samples} samples runs out of memory'


def gradients_of(parameters: Iterable[nn.Parameter]) -> Gradients:
    """The gradients that are there; zeros for one that is not."""
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]


@contextmanager
def undone_afterwards(module: nn.Module) -> Iterator[RandomState]:
    """Run a block without gradients so far, after which all is as it was.

    Yields:
        The random state at the beginning.

    Cost: a copy of parameters, buffers and other tensors that modules hold, for the block.
    """
    state = ModuleState(module)
    gradients = [(p, p.grad) for p in module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    start = StepStart(module, state.tensors())
    try:
        with state.restored():
            yield start.random
    finally:
        start.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient


def first_samples(data: Any, count: int, size: int) -> Any:
    """The first ``count`` of the ``size`` samples of a batch, as a data loader gives it.

    Tensors and lists that have an entry for each sample are cut; a list of views [B, C, H, W] in
    each of them.

    Raises:
        ValueError: When nothing in it has as many entries.
    """
    found = False

    def cut(node: Any) -> Any:
        nonlocal found
        if isinstance(node, Mapping):
            return {key: cut(value) for key, value in node.items()}
        is_list = isinstance(node, (list, tuple))
        views = is_list and any(isinstance(x, Tensor) and x.ndim > 3 for x in node)
        has_entries = not views if is_list else isinstance(node, Tensor) and node.ndim > 0
        if has_entries and len(node) == size:
            found = True
            return node[:count]
        return [cut(value) for value in node] if is_list else node

    part = cut(data)
    if not found:
        raise ValueError(
            f'verify_exactness: nothing in a batch has {size} entries, so it cannot be cut to '
            f'{count} samples; set verify_exactness.samples=None, or a smaller batch'
        )
    return part
