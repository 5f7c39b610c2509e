"""Two steps of a training, plain or carried out in another way, and whether both learn the same.

Shared by the fuzz, the reproductions that it writes, and the zoo.
"""

from __future__ import annotations

import copy
import random
import resource
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from memengine._torch_private.modules import BatchNorm
from memengine._torch_private.ops import pytree
from memengine.technique import settings_of, techniques
from memengine.techniques import Tower, additive_step, cached_step, split_batch, step_in_backward
from memengine.techniques.slices.tower import call_module
from memengine.testing import assert_same_step

ROOT = Path(__file__).parent.parent
Loss = Callable[[Tensor], Tensor]
Learned = dict[str, dict[str, Tensor | None]]  # losses, gradients and state, by name
SLICE = 2  # samples
STEPS = 2


def embed(model: nn.Module, batch: Any) -> Tensor:
    """All that a model gives of each sample, [B, D]."""
    size = len(pytree.tree_leaves(batch)[0])
    given = [
        leaf.flatten(1)
        for leaf in pytree.tree_leaves(call_module(model, batch))
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.shape[:1] == (size,)
        if leaf.ndim > 1
    ]
    return torch.cat(given, 1)


def additive_loss(embeddings: Tensor) -> Tensor:
    """A sum over samples."""
    weights = torch.arange(embeddings.shape[1], dtype=embeddings.dtype).cos()  # [D]
    return (embeddings * weights).sin().mean(1).sum()


def coupled_loss(embeddings: Tensor) -> Tensor:
    """A loss in which samples meet."""
    embeddings = nn.functional.normalize(embeddings, dim=1)
    return (2 * embeddings @ embeddings.mT).logsumexp(1).sum() + additive_loss(embeddings)


# ------------------------------------------------------------------ steps


def plain_step(model: nn.Module, batch: Any, loss: Loss, optimizer: Any) -> Tensor:
    """Forward, backward."""
    value = loss(embed(model, batch))
    value.backward()
    return value


def plain_step_in_slices(model: nn.Module, batch: Any, loss: Loss, optimizer: Any) -> Tensor:
    """The same, but that the model is called with a slice at a time; all graphs are kept."""
    pieces = []
    for start in range(0, len(pytree.tree_leaves(batch)[0]), SLICE):
        piece = pytree.tree_map(lambda x, start=start: x[start : start + SLICE], batch)
        pieces.append(embed(model, piece))
    value = loss(torch.cat(pieces))
    value.backward()
    return value


def accumulated_step(model: nn.Module, batch: Any, loss: Loss, optimizer: Any) -> Tensor:
    """Accumulation within an iteration, of an additive loss."""
    slices = split_batch(batch, SLICE)
    return additive_step(slices, lambda piece: loss(embed(model, piece)), modules=[model])


def gradient_cache_step(model: nn.Module, batch: Any, loss: Loss, optimizer: Any) -> Tensor:
    """The gradient cache."""
    return cached_step(Tower(model, split_batch(batch, SLICE), embed), loss)


def step_with_updates_inside(model: nn.Module, batch: Any, loss: Loss, optimizer: Any) -> Tensor:
    """The optimiser's step inside backward; gradients are gone after it."""
    with step_in_backward(optimizer):
        return plain_step(model, batch, loss, optimizer)


# ------------------------------------------------------------------ trainings


def end_after(seconds: int) -> None:
    """End this process after so many seconds of CPU, or ten times as many of the clock."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    signal.alarm(10 * seconds)


@dataclass(frozen=True)
class Way:
    """A way of training.

    Attributes:
        apply: Techniques, each applied to the model.
        step: How a step is carried out.
        is_coupled: Whether samples meet in the loss.
        is_frozen: Whether BatchNorm is in eval mode, as a step in slices needs it.
        is_lossy: Whether gradients only have to be there: parameters are moved by the plain ones,
            and losses and state are the plain ones bit for bit.
    """

    apply: Sequence[Callable[[nn.Module], Any]] = ()
    step: Callable[..., Tensor] = plain_step
    is_coupled: bool = False
    is_frozen: bool = False
    is_lossy: bool = False

    @property
    def in_slices(self) -> bool:
        """Whether the model is called with slices of the batch."""
        return self.step in (accumulated_step, gradient_cache_step)


def learned(
    model: nn.Module, batches: Sequence[Any], way: Way, led_by: Learned | None = None
) -> Learned:
    """What a copy of a model learns from batches, moved by its own gradients or by others."""
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, BatchNorm):
            layer.train(not way.is_frozen)
    for apply in way.apply:
        apply(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss = coupled_loss if way.is_coupled else additive_loss
    losses: dict[str, Tensor | None] = {}
    gradients: dict[str, Tensor | None] = {}
    for number, batch in enumerate(batches):
        random.seed(number)
        np.random.seed(number)
        torch.manual_seed(number)
        fresh = pytree.tree_map(lambda x: x.clone(), batch)  # a model may write into its input
        losses[f'loss {number}'] = way.step(model, fresh, loss, optimizer).detach()
        for name, parameter in model.named_parameters():
            key = f'gradient {number} of {name}'
            gradients[key] = None if parameter.grad is None else parameter.grad.clone()
            if led_by:
                parameter.grad = led_by['gradients'][key]
        optimizer.step()
        optimizer.zero_grad()
    state: dict[str, Tensor | None] = {
        name: value.nan_to_num(0.0, 0.0, 0.0)  # of masks
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor) and not value.is_complex()
    }
    draws = {'next random number': torch.rand(1), "Python's": torch.tensor(random.random())}
    return {'losses': losses, 'gradients': gradients, 'state': {**state, **draws}}


class PlainTraining:
    """A model with its batches, and what plain training makes of them."""

    def __init__(self, model: nn.Module, batches: Sequence[Any]) -> None:
        self.model, self.batches = model, batches
        self._known: dict[Way, Learned] = {}

    def learned(self, way: Way, step: Callable[..., Tensor] = plain_step) -> Learned:
        """What a plain step learns, with the loss and BatchNorm's mode of a way.

        Raises:
            FloatingPointError: When a loss is no number, so that nothing can be compared.
        """
        plain = Way((), step, way.is_coupled, way.is_frozen)
        if plain not in self._known:
            found = learned(self.model, self.batches, plain)
            values = (found['losses'] | found['gradients']).values()
            if not all(one is None or one.isfinite().all() for one in values):
                raise FloatingPointError('the plain step gives numbers that are not finite')
            self._known[plain] = found
        return self._known[plain]

    def learned_from_rounded(self, way: Way) -> Learned:
        """What it learns from weights that differ in their last digits."""
        model = copy.deepcopy(self.model)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 1e-15 * torch.randn_like(parameter))
        return learned(model, self.batches, Way((), plain_step, way.is_coupled, way.is_frozen))


def outcome(plain: PlainTraining, way: Way) -> str:
    """What becomes of a way of training: a word, and a reason if it is not the good one.

    Returns:
        ``'same'``; ``'same in the same slices'``, of the plain step, where that differs from the
        one with the whole batch; ``'lossy'`` as it is stated; ``'refused: ...'`` by an error that
        names a technique; ``'unfit: ...'`` where the plain step fails; or ``'wrong: ...'``.
    """
    try:
        expected = [plain.learned(way)]
        if way.in_slices:
            expected.append(plain.learned(way, plain_step_in_slices))
    except Exception as error:  # the model's, or torch's: nothing of ours takes part
        return f'unfit: {in_a_line(error)}'
    try:
        found = learned(plain.model, plain.batches, way, expected[0] if way.is_lossy else None)
    except Exception as error:
        return f'{"refused" if is_refusal(error) else "wrong"}: {in_a_line(error)}'
    if way.is_lossy:
        return _lossy_outcome(found, expected[-1])
    reasons = []
    has_gradients = way.step is not step_with_updates_inside
    for good, want in zip(('same', 'same in the same slices'), expected, strict=False):
        try:
            _assert_same(found, want, has_gradients)
            return good
        except AssertionError as error:
            reasons.append(in_a_line(error))
    try:
        _assert_same(plain.learned_from_rounded(way), expected[0], has_gradients)
    except AssertionError as error:
        return f'unfit: rounding its weights does as much to the plain step ({in_a_line(error)})'
    return f'wrong: {reasons[-1]}'


def is_refusal(error: Exception) -> bool:
    """Whether an error is a sentence that names a technique, or a setting of one.

    So is torch's that BatchNorm has no statistics of a slice of one sample.
    """
    known = techniques()
    fields = {name for one in known.values() for name in settings_of(one.settings)}
    places = {one.name.partition('=')[0] for one in known.values()}
    names = {*known, *places, *(name for name in fields if '_' in name)}
    is_sentence = type(error) in (ValueError, TypeError, RuntimeError)
    names.add('Expected more than 1 value per channel when training')
    return is_sentence and any(name in str(error) for name in names)


def _assert_same(found: Learned, want: Learned, has_gradients: bool) -> None:
    """Each part by its own scale."""
    assert_same_step(found['losses'], want['losses'])
    if has_gradients:
        assert_same_step(found['gradients'], want['gradients'])
    assert_same_step(found['state'], want['state'])


def _lossy_outcome(found: Learned, want: Learned) -> str:
    for part in ('losses', 'state'):
        for name, value in want[part].items():
            ours = found[part][name]
            assert value is not None and ours is not None
            if not torch.equal(ours, value):
                return f'wrong: {name} is not bit for bit that of the plain step'
    for name, gradient in want['gradients'].items():
        ours = found['gradients'][name]
        if (gradient is None) != (ours is None) or not (ours is None or ours.isfinite().all()):
            return f'wrong: {name} is missing, unexpected or not finite'
    return 'lossy'


def in_a_line(error: BaseException) -> str:
    return ' '.join(f'{type(error).__name__}: {error}'.split())[:400]


def shaken(model: nn.Module) -> nn.Module:
    """In float64, without the zeros and ones that layers begin with, which hide what is missing."""
    model = model.double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model
