"""torch.compile of a model's repeated blocks: one compilation for all that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from memengine._torch_private.modules import forget_compilation, is_compiled
from memengine.techniques.checkpointing.checkpoint_activations import refuse_to_compile
from memengine.techniques.compression.scope import rules_of
from memengine.techniques.modules.blocks import BLOCKS, Selector, select_modules

__all__ = ['CompiledBlocks', 'compile_blocks']

_SETTING = 'compile_blocks'


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
        ValueError: When a selector matches nothing, a module is compiled already, keeps dropped or
            quantised activations, or is checkpointed by a budget, which is measured op by op, or
            for ``backend='eager'``.

    Cost: a compilation at the first call for each class, training mode and kind of input. Bytes
    saved are those that the compiler chooses. Results differ from the plain step's by rounding,
    with ``backend='inductor'`` also in the random numbers of dropout.

    Source: regional compilation, as PyTorch's own recipes call it.
    """
    chosen = select_modules(model, modules, setting=_SETTING)
    for name, module in chosen.items():
        if is_compiled(module):
            raise ValueError(f'{_SETTING}: {name or "the model"} is compiled already')
        refuse_to_compile(module, _SETTING, options.get('backend'))
        for rule in rules_of(module):
            raise ValueError(
                f'{_SETTING} and {rule.setting} do not go together, as what compiled code saves '
                'cannot be told apart; use either'
            )
    for module in chosen.values():
        module.compile(**options)
    return CompiledBlocks(chosen)


class CompiledBlocks:
    """Modules that are compiled; made by :func:`compile_blocks`."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._modules = modules

    @property
    def names(self) -> list[str]:
        """Names of the modules, in the model's order."""
        return list(self._modules)

    def undo(self) -> None:
        """Run the modules as they are again."""
        for module in self._modules.values():
            forget_compilation(module)
