"""torch.compile of a model's repeated blocks: one compilation for all that are alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memengine._torch_private.modules import (
    forget_compilation,
    is_compiled,
    options_of_mode,
    without_compilation,
)
from memengine.suggest import did_you_mean
from memengine.technique import Handle, Report, Settings, Technique, setting
from memengine.techniques.activation_checkpointing.checkpoint_activations import (
    TECHNIQUE as ACTIVATION_CHECKPOINTING,
)
from memengine.techniques.activation_checkpointing.repeatable_forward import CheckpointedForward
from memengine.techniques.compression.rule_handle import rules_of
from memengine.techniques.compression.rules import COMPILE_CONFLICTS
from memengine.techniques.modules.blocks import BLOCKS, Selector, select_modules
from memengine.techniques.modules.wrapped_forward import wrapper_of

_SETTING = 'compile_blocks'
_BUDGET = 'activation_checkpointing.budget'
_NOT_WITH_RULES = COMPILE_CONFLICTS[_SETTING]


def compile_blocks(
    model: nn.Module, modules: Selector | Sequence[Selector] = BLOCKS, **options: Any
) -> CompiledBlocks:
    """Compile each repeated block by itself, in place.

    Blocks of one class with inputs of one kind share a compilation, so it takes the time of one
    block where ``torch.compile(model)`` takes that of the model. What is between them, and
    whatever acts at their borders (checkpointing, FSDP), runs as it is. Names, parameters and
    state dict are untouched; copies and pickles are not compiled.

    Args:
        model: Any module.
        modules: Which of its modules; see :func:`~memengine.techniques.select_modules`.
        **options: Of ``torch.compile``: ``backend``, ``mode``, ``dynamic``, ``fullgraph``.

    Returns:
        The handle: ``names``, ``undo()``.

    Raises:
        ValueError: When a selector matches nothing, torch knows no such backend, a module is
            compiled already, keeps dropped or quantised activations, or is checkpointed by a
            budget, which is measured op by op, or for ``backend='eager'``.

    Cost: a compilation at the first call for each class, training mode and kind of input. Bytes
    saved are those that the compiler chooses. Results differ from the plain step's by rounding.
    Dropout draws what it draws without compilation, by a kernel of its own;
    ``options=dict(fallback_random=False)`` lets the compiler draw other numbers within its kernels.

    Source: regional compilation, as PyTorch's own recipes call it.
    """
    chosen = select_modules(model, modules, setting=_SETTING)
    _check_backend(options.get('backend'))
    for name, module in chosen.items():
        if is_compiled(module):
            raise ValueError(f'{_SETTING}: {name or "the model"} is compiled already')
        _refuse_checkpointed(module, options)
        for rule in rules_of(module):
            raise ValueError(f'{_SETTING} and {rule.setting} do not go together: {_NOT_WITH_RULES}')
    options = _drawing_as_plain(options)
    for module in chosen.values():
        module.compile(**options)
    return CompiledBlocks(chosen, (options.get('options') or {}).get('fallback_random') is False)


def compile_method(model: nn.Module, name: str, **options: Any) -> None:
    """Compile a method with all that it calls, in which dropout, too, draws as it does uncompiled.

    Args:
        model: Whose method it is.
        name: The method's.
        **options: Of ``torch.compile``.
    """
    setattr(model, name, torch.compile(getattr(model, name), **_drawing_as_plain(options)))


def _check_backend(backend: Any) -> None:
    known = torch.compiler.list_backends(exclude_tags=()) if isinstance(backend, str) else [backend]
    if backend not in known:
        raise ValueError(
            f'{_SETTING}.backend: torch {torch.__version__} has no compiler {backend!r}'
            f'{did_you_mean(backend, known, after=";")}'
        )


def _refuse_checkpointed(module: nn.Module, options: Mapping[str, Any]) -> None:
    for part in module.modules():
        checkpointed = wrapper_of(part, CheckpointedForward)
        if checkpointed is None:
            continue
        if checkpointed.planner.budget is not None:
            raise TECHNIQUE.refusal(_BUDGET, checkpointed.name)
        if not checkpointed.can_be_compiled:
            raise ValueError(
                f'{_SETTING} and {ACTIVATION_CHECKPOINTING.key} do not go together for '
                f'{checkpointed.name}, as compilers of torch {torch.__version__} would write into '
                'its buffers (statistics of BatchNorm) twice in a step; use one, or a newer torch'
            )
        if options.get('backend') == 'eager':
            raise ACTIVATION_CHECKPOINTING.refusal(f'{_SETTING}.backend=eager', checkpointed.name)


def _drawing_as_plain(options: dict[str, Any]) -> dict[str, Any]:
    """Options of ``torch.compile`` by which dropout draws as it does uncompiled, unless they say.

    The default compiler draws other numbers from the same seeds, and others again in a checkpoint.
    """
    mode, own = options.get('mode'), options.get('options')
    if options.get('backend', 'inductor') != 'inductor' or (mode and own):  # torch refuses both
        return options
    of_mode = options_of_mode(mode, options.get('dynamic'))
    own = {'fallback_random': True, **of_mode, **(own or {})}
    return {**options, 'mode': None, 'options': own}


class CompiledBlocks(Handle):
    """Modules that are compiled; made by :func:`compile_blocks`.

    Attributes:
        draws_others: Whether dropout inside has other random numbers than without compilation.
    """

    def __init__(self, modules: dict[str, nn.Module], draws_others: bool) -> None:
        self._modules, self.draws_others = modules, draws_others

    @property
    def names(self) -> list[str]:
        """Names of the modules, in the model's order."""
        return list(self._modules)

    def report(self) -> Report:
        """Which modules are compiled."""
        return Report(
            f'Compiled blocks: {len(self.names)} modules, {self.names[0]} to {self.names[-1]}'
        )

    def undo(self) -> None:
        """Run the modules as they are again."""
        for module in self._modules.values():
            forget_compilation(module)

    def paused(self) -> AbstractContextManager[Any]:
        """A context in which the modules run as they are."""
        return without_compilation(self._modules.values())


@dataclass(frozen=True)
class CompileBlocksSettings(Settings):
    """Settings of :func:`compile_blocks`: modules, and options of ``torch.compile``."""

    modules: Selector | Sequence[Selector] = setting(
        BLOCKS, help="which modules: names, globs, classes, or 'blocks' for the repeated ones"
    )
    backend: str | Callable[..., Any] = setting('inductor', help='the compiler')
    mode: str | None = setting(None, help="a set of the compiler's options, e.g. max-autotune")
    dynamic: bool | None = setting(None, help='whether sizes may vary; None: once they do')
    fullgraph: bool = setting(False, help='whether a break in the graph is an error')
    options: Mapping[str, Any] | None = setting(None, help="the compiler's options by name")


def _apply(model: nn.Module, settings: CompileBlocksSettings) -> CompiledBlocks:
    options = {name: value for name, value in vars(settings).items() if value is not None}
    return compile_blocks(model, options.pop('modules'), **options)


TECHNIQUE = Technique(
    key=_SETTING,
    title='compiled blocks',
    settings=CompileBlocksSettings,
    apply=_apply,
    call='memengine.compile_blocks',
    shorthand='modules',
    after=('activation_offload',),  # a block is compiled with all that is in its forward
    conflicts={
        'compile': 'compile compiles the whole step and compile_blocks its blocks; set one of them',
        _BUDGET: 'a budget is measured op by op; use keep',
    },
    exactness='rounding',
    use_when='on a GPU, for blocks that are alike',
    saves='what the compiler fuses',
    price='one compilation for each kind of block',
    page='activation_checkpointing.md',
    example=CompileBlocksSettings(backend='aot_eager'),
)
