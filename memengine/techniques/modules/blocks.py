"""Which modules a setting means: by name, glob, class, or the model's repeated blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

from memengine.suggest import did_you_mean

BLOCKS = 'blocks'  # the word for a model's repeated blocks

Selector: TypeAlias = str | type[nn.Module]
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The model's repeated blocks by name, in order.

    A block is a module that stands in a container beside others of its class and holds at least
    two weight matrices: a transformer's layers, a ResNet's residual blocks, in every tower.
    Stages, which are modules that hold several blocks, are looked into. Works by structure alone,
    so for timm, torchvision, transformers, open_clip and one's own.

    Returns:
        Names and modules, none inside another; empty when nothing is repeated.
    """
    parts = {name: module for name, module in model.named_modules() if name and _is_part(module)}
    contained = {name: module for name, module in parts.items() if _holder(model, name)[1]}
    return _repeated(model, contained) or _repeated(model, parts)


def _is_part(module: nn.Module) -> bool:
    """Whether the module is more than a container and holds two weight matrices."""
    weights = sum(parameter.ndim > 1 for parameter in module.parameters())
    return type(module) not in _CONTAINERS and weights > 1


def _holder(model: nn.Module, name: str) -> tuple[str, bool]:
    """The module that a part belongs to, and whether containers are between them."""
    outer = name.rpartition('.')[0]
    between = False
    while outer and isinstance(model.get_submodule(outer), _CONTAINERS):
        outer, between = outer.rpartition('.')[0], True
    return outer, between or isinstance(model.get_submodule(outer), _CONTAINERS)


def _repeated(model: nn.Module, parts: dict[str, nn.Module]) -> dict[str, nn.Module]:
    kinds: dict[str, list[type]] = {}
    for name, module in parts.items():
        kinds.setdefault(_holder(model, name)[0], []).append(type(module))
    repeated = {kind for some in kinds.values() for kind in some if some.count(kind) > 1}
    found = {name: module for name, module in parts.items() if type(module) in repeated}
    stages = {type(found[outer]) for inner in found for outer in _enclosing_names(inner, found)}
    return {name: module for name, module in found.items() if type(module) not in stages}


def _enclosing_names(name: str, names: Iterable[str]) -> list[str]:
    return [other for other in names if name.startswith(f'{other}.')]


def select_modules(
    model: nn.Module,
    selectors: Selector | Sequence[Selector],
    *,
    every: int = 1,
    setting: str = 'modules',
) -> dict[str, nn.Module]:
    """The modules that a setting names.

    Args:
        model: Where to look.
        selectors: One or several of: ``'blocks'``, for the model's repeated blocks; a module's
            name; a glob over names (``'backbone.layers.*.mlp'``; a star stands for anything, dots
            too); the name of a class (``'Bottleneck'``), or the class. A list of modules, or a
            Sequential of modules of one class, stands for its members. Of nested modules that one
            selector matches, the outermost are taken.
        every: Takes every k-th of what a selector matches, from the first on.
        setting: What to call the setting in errors.

    Returns:
        Names and modules in the model's order.

    Raises:
        ValueError: When a selector matches nothing (with the nearest names), ``every`` is below 1
            or two selectors match modules that hold one another.
        TypeError: When a selector is neither a string nor a class.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f'{setting}: every must be a number of modules, at least 1, got {every!r}')
    wanted = [selectors] if isinstance(selectors, (str, type)) else list(selectors)
    if not wanted:
        raise ValueError(f"{setting}: names no module; say e.g. ['{BLOCKS}'], or leave it out")
    chosen: set[str] = set()
    for selector in wanted:
        chosen.update(_matches(model, selector, setting)[::every])
    for name in chosen:
        if outer := _enclosing_names(name, chosen):
            raise ValueError(
                f'{setting}: {outer[0]} holds {name}, and both are selected; select one of them'
            )
    return {name: module for name, module in model.named_modules() if name in chosen}


def first_of(
    modules: dict[str, nn.Module], number: int | None, setting: str
) -> dict[str, nn.Module]:
    """So many of the modules that were selected, in their order; all of them for None.

    Raises:
        ValueError: When there are fewer, or the number is none from 1.
    """
    if number is None:
        return modules
    if isinstance(number, bool) or number not in range(1, len(modules) + 1):
        raise ValueError(f'{setting}: first is how many of {len(modules)} modules, got {number!r}')
    return dict(list(modules.items())[:number])


def _matches(model: nn.Module, selector: Selector, setting: str) -> list[str]:
    modules = dict(model.named_modules())
    if isinstance(selector, type):
        found = [name for name, module in modules.items() if isinstance(module, selector)]
    elif not isinstance(selector, str):
        raise TypeError(
            f'{setting}: expected names, globs or classes of modules, got '
            f'{type(selector).__name__} {selector!r}'
        )
    elif selector == BLOCKS:
        found = list(find_blocks(model))
    elif selector in modules:
        found = [selector]
    elif any(sign in selector for sign in '*?['):
        found = [name for name in modules if name and fnmatchcase(name, selector)]
    else:
        found = [name for name, module in modules.items() if type(module).__name__ == selector]
    found = [name for name in found if not _enclosing_names(name, found)]
    members = [member for name in found for member in _members(name, modules[name])]
    if not members:
        raise ValueError(_no_match(model, selector, setting))
    return members


def _members(name: str, module: nn.Module) -> list[str]:
    """The module, or what a list of equal modules holds: it has no forward of its own, or one
    that is not worth being a unit."""
    children = list(module.named_children())
    is_sequence = type(module) is nn.Sequential and len(children) > 1
    alike = len({type(child) for _, child in children}) == 1
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or (is_sequence and alike):
        prefix = f'{name}.' if name else ''
        return [inner for key, child in children for inner in _members(prefix + key, child)]
    return [name]


def _no_match(model: nn.Module, selector: Selector, setting: str) -> str:
    if selector == BLOCKS:
        return (
            f"{setting}: {type(model).__name__} has no repeated blocks, so '{BLOCKS}' means "
            'nothing; name its modules'
        )
    text = selector if isinstance(selector, str) else selector.__name__
    names = {name for name, _ in model.named_modules() if name}
    names |= {type(module).__name__ for module in model.modules()}
    hint = did_you_mean(text, names, after=';')
    return f"{setting}: {type(model).__name__} has no module '{text}'{hint}"
