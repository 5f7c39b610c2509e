"""Rules that are put to a model and taken away, and what the handles of all have in common."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Hashable
from typing import Any, TypeVar
from uuid import uuid4

from torch import Tensor, nn

from memengine._torch_private.modules import is_compiled
from memengine.technique import PausableHandle, Report
from memengine.techniques.activation_offload import ActivationOffload
from memengine.techniques.codecs.codec import Codec
from memengine.techniques.compression.hooks.compressed_forward import CompressedForward
from memengine.techniques.compression.recomputation.recomputation import Recomputation
from memengine.techniques.compression.rules import EXACT, KeptBytes, RecomputedPlace, Rule
from memengine.techniques.modules.wrapped_forward import THE_MODEL, is_wrapped, wrapper_of

AnyHandle = TypeVar('AnyHandle', bound='RuleHandle')


def rules_of(model: nn.Module) -> list[Rule]:
    """The rules that hold in a model's modules, each once."""
    forwards = filter(None, (wrapper_of(m, CompressedForward) for m in model.modules()))
    return list({id(rule): rule for forward in forwards for rule, _ in forward.rules}.values())


def add_rule(model: nn.Module, rule: Rule, modules: Container[nn.Module]) -> None:
    """Keep what modules of a model save by a rule, until :func:`remove_rule`.

    Args:
        model: Its modules' ``forward`` is wrapped; the model stays what it is.
        rule: The rule.
        modules: Those for which it holds; in others it has no say.

    Raises:
        ValueError: When the model has a rule of that kind, or a module is offloaded already, or
            compiled: its graph saves what it likes.
    """
    if any(type(other) is type(rule) for other in rules_of(model)):
        raise ValueError(f'{rule.setting}: {type(model).__name__} has it already; undo that first')
    for name, module in model.named_modules():
        if is_compiled(module):
            raise ValueError(
                f'{rule.setting}: {name or THE_MODEL} is compiled, and what compiled code saves '
                'cannot be told apart; use either'
            )
        if is_wrapped(module, ActivationOffload):
            raise ValueError(
                f'{rule.setting}: activation_offload is applied to {name or THE_MODEL} already, '
                'and would move what is not compressed yet; apply it afterwards'
            )
    for name, module in model.named_modules():
        if type(module) is nn.Identity and 'forward' not in vars(module):
            continue  # of which large models have many, and which saves nothing
        forward = wrapper_of(module, CompressedForward)
        if forward is None:
            forward = CompressedForward(name, module)
            forward.begin()
        forward.model_rules.append(rule)
        if module in modules:
            rules = [*forward.rules, (rule, name or THE_MODEL)]
            forward.rules = sorted(rules, key=_order)


def _order(pair: tuple[Rule, str]) -> tuple[bool, int]:
    """Exact rules first, then those for the fewest tensors."""
    return pair[0].fidelity != EXACT, pair[0].fidelity


def remove_rule(model: nn.Module, rule: Rule) -> None:
    """Leave the model as it was before :func:`add_rule`; nothing for a rule that does not hold.

    Modules of the model that were copied into it since then (a head that peft trains beside the
    original, a block that is repeated) have copies of the rule, which go with it.

    Raises:
        ValueError: When a forward has been wrapped by something else in the meantime; nothing is
            changed then.
    """
    forwards = []
    for name, module in model.named_modules():
        forward = wrapper_of(module, CompressedForward)
        if forward is None and 'forward' in vars(module) and type(module) is not nn.Identity:
            raise ValueError(
                f'{rule.setting}: the forward of {name or THE_MODEL} was wrapped again '
                'afterwards; undo that first'
            )
        if forward is not None and any(user.origin == rule.origin for user in forward.model_rules):
            forwards.append(forward)
    for forward in forwards:
        forward.rules = [pair for pair in forward.rules if pair[0].origin != rule.origin]
        forward.model_rules = [user for user in forward.model_rules if user.origin != rule.origin]
        if not forward.model_rules:
            forward.undo()


class RuleHandle(PausableHandle):
    """A rule's way back to its model, which it does not hold and copies do not take along.

    Attributes:
        kept: Bytes before and after, in all forward passes so far, and by module and need.
        origin: What its copies, and no other rules, have as well.
    """

    setting: str
    fidelity: int
    only_recomputes = False

    def __init__(self, model: nn.Module) -> None:
        self._model: Callable[[], nn.Module | None] = weakref.ref(model)
        self.kept = KeptBytes()
        self.origin: Hashable = uuid4()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), '_model': _nothing}

    @property
    def model(self) -> nn.Module:
        """The model.

        Raises:
            ValueError: When it is gone, or this is a copy.
        """
        model = self._model()
        if model is None:
            raise ValueError(f'{self.setting}: the model that this was made for is not there')
        return model

    def __enter__(self: AnyHandle) -> AnyHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    @property
    def state(self) -> Hashable:
        """Most rules choose alike for ever."""
        return ()

    def fidelity_of(self, codec: Codec) -> float:
        """Most rules have codecs that are equally near."""
        return self.fidelity

    def begin_forward(self) -> None:
        """Most rules do not count what is saved in a forward."""

    def still_serves(
        self, place: RecomputedPlace, tensor: Tensor, recomputation: Recomputation
    ) -> bool:
        """Most rules compute nothing again."""
        return False

    def report(self) -> Report | None:
        """What has been compressed."""
        if not self.kept.before:
            return Report(
                left=f'{self.setting}: the first iteration saved nothing that can be compressed: '
                'what is trained is frozen, checkpointed, excluded, or smaller than a code would be'
            )
        before, after = self.kept.before / 2**20, self.kept.after / 2**20
        return Report(
            f'{self.setting}: {before:.1f} MiB saved as {after:.1f} MiB in the first iteration, in '
            f'{len(self.kept.places)} places'
        )

    def undo(self) -> None:
        """Leave the model as it was."""
        remove_rule(self.model, self)  # type: ignore[arg-type]


def _nothing() -> None:
    return None
