"""The peak of a training step, predicted without its memory: on tensors that have none."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor, nn

from memengine._torch_private.fake import (
    FAKE_REFUSES,
    deep_copies,
    modules_cast_in_place,
    resizes_noted,
)
from memengine.memory.cpu_workspaces import library_bytes, mapped_bytes
from memengine.memory.ledger import tensors_in
from memengine.memory.live_memory import SAVED, TRANSIENT, Allocation, KnownOperators, LiveMemory
from memengine.memory.training_step import TrainingStep

PARAMETERS, GRADIENTS, OPTIMIZER = 'parameters', 'gradients', 'optimiser state'
BUFFERS, TEACHER, BATCH, ALLOCATOR = 'buffers', 'teacher', 'batch', 'allocator'
BUCKETS = 'buckets'
_NEGLIGIBLE_BYTES = 64 * 2**10  # bytes: a loss to log, a centre


class Phase(NamedTuple):
    """What a step is about at a time.

    Attributes:
        passed: Which pass through the model has begun: none, the first, the last, or another.
        part: The part of the model that began a forward pass last.
        module: Whose operators are carried out.
        in_backward: Whether they are of its backward.
    """

    passed: str
    part: str
    module: str
    in_backward: bool


class UnpredictableError(ValueError):
    """A step whose course depends on values, or that leaves torch: it has to be measured."""


@dataclass(frozen=True)
class Prediction:
    """What a training step takes, once the optimiser has its state.

    Attributes:
        peak_bytes: The most at once.
        by_category: The peak's bytes by what they are for, the largest first: ``'parameters'``,
            ``'gradients'``, ``'optimiser state'``, ``'buffers'``, ``'teacher'`` (all parameters
            that are not trained), ``'batch'``, ``'buckets'`` of DDP, ``'saved activations'`` (by
            autograd, or in its place), ``'transients'``, ``'workspaces'`` of kernels and
            ``'allocator'`` (whole pages, what libraries keep).
        by_module: The peak's activations and transients by the module in whose forward they were
            made, or in the backward of it, the largest first; ``''`` is what was made outside.
        by_part: Bytes when a part of the model (its child) last began a forward pass, and the most
            from when it began one until another did.
        at: The operator that made the last of the peak.
        flops: Of products of matrices and convolutions in a step, all passes together.
        moved_bytes: Read and written by a step's operators.
        offloaded_bytes: Moved out of the device's memory, and back.
        operators: How many of them, but for views.
        guessed: Numbers that the step read and that no fake tensor has; they were taken for 1, what
            asks whether any of many is so for no.
    """

    peak_bytes: int
    by_category: dict[str, int]
    by_module: dict[str, int] = field(repr=False)
    by_part: dict[str, tuple[int, int]] = field(repr=False)
    at: str
    flops: int
    moved_bytes: int
    offloaded_bytes: int
    operators: int
    guessed: int


@contextmanager
def on_fake_tensors(
    known: KnownOperators | None = None, lines: bool = True
) -> Iterator[LiveMemory]:
    """Within, tensors know their shape only; what becomes of them is noted.

    Args:
        known: From predictions before this one, which makes it faster.
        lines: Whether it is noted which line of the program each is of.

    Raises:
        UnpredictableError: For what depends on values, or leaves torch.
    """
    known = known or KnownOperators()
    memory = LiveMemory(known, lines)
    try:
        with (
            known.mode,
            memory,
            resizes_noted(memory.resize),
            deep_copies(),
            modules_cast_in_place(),
        ):
            yield memory
    # Also what leaves torch, or counts on a number that was guessed.
    except (*FAKE_REFUSES, RuntimeError, TypeError, IndexError, ArithmeticError) as error:
        raise UnpredictableError(
            'the step cannot be carried out on tensors without values, as a prediction does '
            f'({error}); measure it instead: memengine measure'
        ) from error


def predict(build: Callable[[], TrainingStep]) -> Prediction:
    """Predict the peak of a training step, by category and module.

    The step is really carried out, with every technique that is in it, but on tensors that
    know their shape only: nothing is allocated but small tensors, and nothing computed. It is
    the CPU's: its operators, its kernels' workspaces. It is carried out twice, as some techniques
    measure in the first step what to do in those that follow, unless ``is_settled`` says that
    none does and nothing but the optimiser's state is left behind.

    Args:
        build: Makes the model, its optimiser and the batch; called once, in a mode in which tensors
            have no memory. A batch that is there already is taken as it is, in the same way.

    Returns:
        The peak of a step whose optimiser has its state.

    Raises:
        UnpredictableError: When the step's course depends on values: a detector's boxes, codes of
            activations, code that leaves torch for NumPy. Measure it with
            :func:`memengine.memory.measure`.

    Cost: the time that Python takes for the operators, about 0.1 ms each; half of it where others
    of the same shapes came before.
    """
    return prediction_of(carried_out(build, lines=False))


def carried_out(
    build: Callable[[], TrainingStep], known: KnownOperators | None = None, lines: bool = True
) -> LiveMemory:
    """All that becomes of memory in a step, for :func:`predict`."""
    with _garbage_is_of_these(), on_fake_tensors(known, lines) as memory:
        step = build()
        _assign(memory, step)
        with memory.named(step.model), _gradients_noted(memory, step.model):
            memory.start_again()
            step.run()
            _assign(memory, step)
            left = memory.left()
            state_only = all(p.category == OPTIMIZER or p.nbytes <= _NEGLIGIBLE_BYTES for p in left)
            # With its state there from the start, this step is as those that follow.
            if step.is_settled and state_only:
                memory.count_as_held_before(p for p in left if p.category == OPTIMIZER)
            else:
                memory.start_again()
                step.run()
            memory.end()
    return memory


@contextmanager
def _garbage_is_of_these() -> Iterator[None]:
    """Python's collector leaves alone what was there before, of which libraries' parts are many."""
    if gc.get_freeze_count():  # somebody's, who would find it thawed
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def made_once(make: Callable[[], Any], known: KnownOperators) -> Any:
    """Tensors for several steps that are carried out with the same known operators.

    Those whose numbers are known are real ones, as a step's account knows no numbers of another's.

    Args:
        make: Makes them, in containers, in a mode in which they have no memory.
        known: As of :func:`carried_out`.
    """
    with on_fake_tensors(known) as memory:
        made = make()
    return memory.with_known_numbers(made)


def _assign(memory: LiveMemory, step: TrainingStep) -> None:
    """Say of what is there between steps what it is for."""
    for parameter in step.model.parameters():
        memory.note(parameter, PARAMETERS if parameter.requires_grad else TEACHER)
    for buffer in step.model.buffers():
        memory.note(buffer, BUFFERS)
    for tensor in tensors_in(step.batch):
        memory.note(tensor, BATCH)
    for tensor in tensors_in(step.buckets):
        memory.note(tensor, BUCKETS)
    if step.optimizer is not None:
        for tensor in tensors_in(list(step.optimizer.state.values())):
            memory.note(tensor, OPTIMIZER)


@contextmanager
def _gradients_noted(memory: LiveMemory, model: nn.Module) -> Iterator[None]:
    def note(parameter: Tensor) -> None:
        if parameter.grad is not None:  # else an optimiser has taken it in backward
            memory.note(parameter.grad, GRADIENTS)

    with ExitStack() as hooks:
        for parameter in model.parameters():
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(note)
                hooks.callback(handle.remove)
        yield


def taken_bytes(memory: LiveMemory) -> list[int]:
    """What is taken of the system after each event, but for what libraries take."""
    return list(accumulate(_taken(nbytes) for nbytes, _ in memory.events))


def allocations_at(memory: LiveMemory, last: int) -> dict[Allocation, int]:
    """What is there after an event, with its bytes."""
    there: dict[Allocation, int] = {}
    for nbytes, allocation in memory.events[: last + 1]:
        if nbytes >= 0:
            there[allocation] = nbytes
        else:
            del there[allocation]
    return there


def prediction_of(memory: LiveMemory) -> Prediction:
    """The peak of what was carried out."""
    live = taken_bytes(memory)
    last = max(range(len(live)), key=live.__getitem__)
    there = allocations_at(memory, last)
    by_category, by_module = Counter[str](), Counter[str]()
    for allocation, nbytes in there.items():
        by_category[allocation.category] += nbytes
        if allocation.category in (SAVED, TRANSIENT):
            by_module[allocation.origin.module] += nbytes
    peak = live[last] + library_bytes(live[last])
    by_category[ALLOCATOR] = peak - sum(there.values())
    return Prediction(
        peak_bytes=peak,
        by_category=dict(by_category.most_common()),
        by_module=dict(by_module.most_common()),
        by_part=_by_part(memory.begun, live),
        at=memory.events[last][1].op,
        flops=memory.flops,
        moved_bytes=memory.moved_bytes,
        offloaded_bytes=memory.offloaded_bytes,
        operators=memory.operators,
        guessed=memory.guessed,
    )


def _by_part(begun: list[tuple[int, str]], live: list[int]) -> dict[str, tuple[int, int]]:
    ends = [index for index, _ in begun] + [len(live)]
    parts: dict[str, tuple[int, int]] = {}
    for (index, name), end in zip(begun, ends[1:], strict=True):
        peak = max(live[index - 1 : end])
        most = max(peak + library_bytes(peak), parts.get(name, (0, 0))[1])
        parts[name] = live[index - 1], most
    return parts


def peaks_by_phase(memory: LiveMemory) -> dict[Phase, int]:
    """The most in each phase of what was carried out."""
    live = taken_bytes(memory)
    passes = sum(not name for _, name in memory.begun)
    begun, passed, part = iter([*memory.begun, (len(live), '')]), 0, ''
    following = next(begun)
    phases: dict[Phase, int] = {}
    for index in range(memory.begin, len(live)):
        while following[0] <= index:
            part = following[1]
            passed += not part
            following = next(begun)
        nbytes, allocation = memory.events[index]
        if nbytes >= 0:
            which = {0: 'none', 1: 'first', passes: 'last'}.get(passed, 'another')
            origin = allocation.origin
            phase = Phase(which, part, origin.module, origin.in_backward)
            phases[phase] = max(phases.get(phase, 0), live[index] + library_bytes(live[index]))
    return phases


def _taken(nbytes: int) -> int:
    return mapped_bytes(nbytes) if nbytes >= 0 else -mapped_bytes(-nbytes)
