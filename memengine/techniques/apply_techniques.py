"""Techniques of a model by their keys, in anybody's loop: one call, in the one order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from memengine.suggest import did_you_mean
from memengine.technique import Handle, Settings, StepInfo, Technique, in_order, techniques


def apply_techniques(model: nn.Module, **settings: Any) -> AppliedTechniques:
    """Apply techniques to a model, for a loop that is not memengine's.

    ``apply_techniques(model, recomputed_activations=True, activation_checkpointing='blocks')``
    before a model is trained, or handed to a trainer that does, is all that a technique of the
    model asks for; what acts on the step (:class:`~memengine.GradCache`) or the loss is not here.

    Also a context manager, which undoes them at its end.

    Args:
        model: Changed in place; names, parameters and state dict stay what they are. Call it
            before DDP, FSDP or ``torch.compile`` wrap it.
        **settings: Keys and values as a config takes them: ``dropit=0.9``,
            ``quantized_activations=dict(bits=4)``.

    Returns:
        The handle.

    Raises:
        ValueError: For a key, a value or a pair that cannot be, before anything is changed; by a
            technique that does not find what it is to act on.

    Cost: that of each technique.
    """
    known = {technique.key: technique for technique in in_order(techniques().values())}
    for key in settings:
        if key not in known:
            others = did_you_mean(key, known) or f'; there are {", ".join(known)}'
            raise ValueError(f"'{key}' is no technique that is applied to a model{others}")
    read = {key: technique.read(settings.get(key)) for key, technique in known.items()}
    chosen = {key: value for key, value in read.items() if value is not None}
    for key in chosen:
        for other in known[key].conflicts:
            if _is_chosen(other, chosen):
                raise known[key].refusal(other)
    applied = AppliedTechniques()
    try:
        for key, value in chosen.items():
            applied.add(known[key], value, model)
    except BaseException:
        applied.undo()
        raise
    return applied


def _is_chosen(place: str, chosen: Mapping[str, Settings]) -> bool:
    """Whether ``'key'``, ``'key.setting'`` or ``'key.setting=x|y'`` is among the settings."""
    path, _, wanted = place.partition('=')
    key, _, name = path.partition('.')
    if key not in chosen or not name:
        return key in chosen
    value = vars(chosen[key])[name]
    return value in wanted.split('|') if wanted else bool(value)


class AppliedTechniques:
    """The techniques at work on a model, made by :func:`apply_techniques`.

    Attributes:
        handles: Of each, by its key, in the order in which they were applied.
    """

    def __init__(self) -> None:
        self.handles: dict[str, Handle] = {}
        self._settings: dict[str, Settings] = {}

    def add(self, technique: Technique[Any], settings: Settings, model: nn.Module) -> None:
        """Apply one more."""
        assert technique.apply is not None, 'in_order() gives such only'
        self.handles[technique.key] = technique.apply(model, settings)
        self._settings[technique.key] = settings

    def before_step(
        self,
        iteration: int,
        loss: Callable[[], Tensor] | None = None,
        log: Callable[[str], Any] = print,
    ) -> None:
        """Let schedules go on: DropIT's gamma, the bits that quantised activations allot.

        Needed where a setting names a schedule (``gamma`` as a schedule, ``average_bits``) only.

        Args:
            iteration: Steps done.
            loss: Computes the loss of the step's batch, with graph; for ``average_bits``.
            log: Takes a sentence.
        """

        def missing() -> Tensor:
            raise ValueError('before_step() needs loss=: a technique weighs what the loss feels')

        for handle in self.handles.values():
            handle.before_step(StepInfo(iteration, loss or missing, log))

    def report(self) -> list[str]:
        """What each has done, known after the first step: a sentence or two each.

        Raises:
            ValueError: When one has done nothing, unless its settings say ``strict=False``.
        """
        said = []
        for key, handle in self.handles.items():
            if (report := handle.report()) is None:
                continue
            if not report.done and vars(self._settings[key]).get('strict', True):
                raise ValueError(f'{report.left}; or set strict=False to go on')
            said += [sentence for sentence in (report.done, report.left) if sentence]
        return said

    def undo(self) -> None:
        """Leave the model as it was.

        Raises:
            ValueError: When a forward has been wrapped by something else in the meantime; what is
                left can be undone by another call, once that is gone.
        """
        while self.handles:
            key = next(reversed(self.handles))
            self.handles[key].undo()
            del self.handles[key]

    def __enter__(self) -> AppliedTechniques:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()
